"""Choose the machine to plan for, and decide whether it runs compiled kernels.

`penstock plan` and training answer both questions in their own way, because a plan may be for
another machine, without torch, while training knows the device that it computes on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.errors import EngineError, PlanError
from penstock.machine.machine import Machine
from penstock.machine.presets import DEFAULT, cpu_machine, preset, preset_names
from penstock.machine.probe_cache import cache_path, merge_probe


def machine_for_plan(
    name: str | None, probe_here: Callable[[], Machine] | None = None
) -> tuple[Machine, str]:
    """Find the machine that `penstock plan` plans for, and a remark about the choice.

    Args:
        name: Machine file or preset; None for this machine, or the default preset if this machine
            has no GPU.
        probe_here: Measures this machine if no earlier measurement is cached.
    """
    if name is not None:
        if name in preset_names():
            return preset(name), ""
        if Path(name).is_file():
            return Machine.load(name), ""
        listed = ", ".join(preset_names())
        raise PlanError("machine", f"{name} is neither a machine file nor a preset ({listed})")
    cached = cache_path()
    if cached.is_file():
        here = Machine.load(cached)
    else:
        here = (probe_here or _probe_here)()
        cached.parent.mkdir(parents=True, exist_ok=True)
        here.save(cached)
    if not here.gpus:
        return preset(DEFAULT), (
            f"No GPU found: planning for the preset {DEFAULT} (see `penstock machines`)."
        )
    return here, f"Planning for this machine, as measured by the probe ({cached})."


def machine_for_training(device: str | None = None) -> tuple[Machine, str]:
    """Describe this machine with the rates of its last probe, and say where the rates come from.

    Without a GPU, or with `device="cpu"`, the CPU computes and part of DRAM serves as HBM.
    """
    import torch

    from penstock.machine.discovery import discover

    machine, remark = merge_probe(discover())
    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if on_gpu and not machine.gpus:
        raise EngineError("device='cuda' was requested, but the driver reports no GPU")
    return (machine if on_gpu else cpu_machine(machine)), remark


def plan_uses_kernels(machine: Machine) -> bool:
    """Return whether a plan for the machine assumes compiled layers and kernels: it has a GPU."""
    return bool(machine.gpus)


def has_kernels(device: str | None = None) -> bool:
    """Return whether the device runs compiled layers, Triton kernels and bf16 flash attention.

    That needs Triton and a GPU of compute capability 8.0 or higher.
    """
    import importlib.util

    import torch

    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if not on_gpu or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _probe_here() -> Machine:
    """Measure this machine quickly. Without a GPU, discover it but measure nothing."""
    from penstock.machine.discovery import discover
    from penstock.probe import ProbeOptions, probe

    machine = discover()
    return probe(ProbeOptions(quick=True)).machine if machine.gpus else machine
