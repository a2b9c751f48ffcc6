"""Decide which machine to plan for, and whether it runs compiled layers and Triton kernels.

`penstock plan`, `penstock train` and `prepare` all ask here, so that they describe the same machine
in the same way.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import EngineError, PlanError
from penstock.machine.machine import Gpu, Machine
from penstock.machine.presets import DEFAULT, cpu_machine, preset, preset_names
from penstock.machine.probe_cache import merge_probe, probed_paths

THIS = "this"
"""The name that stands for this machine, with or without a GPU."""

KERNEL_CAPABILITY = (8, 0)
"""Lowest compute capability that runs compiled layers and Penstock's Triton kernels in bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetMachine:
    """The machine to plan for."""

    machine: Machine
    """Its parts and their speeds."""

    kernels: bool
    """Whether its device runs compiled layers and Triton kernels."""

    is_here: bool
    """Whether it is the machine that this process runs on."""

    remark: str = ""
    """A sentence for the user about the choice and the source of the speeds."""


def this_machine(device: str | None = None, paths: Iterable[str] = ()) -> TargetMachine:
    """Describe this machine as the kernel and the driver report it, with the speeds of its probe.

    Nothing is measured. A saved probe is used only as far as it was measured on this machine.

    Args:
        device: Device that computes: `cuda`, or `cpu`, for which part of DRAM serves as HBM. By
            default, the GPU if there is one.
        paths: Storage paths to describe in addition to those that were probed.
    """
    from penstock.machine.discovery import discover

    probed = (path for path in probed_paths() if Path(path).exists())
    storage = dict.fromkeys([*probed, *paths])
    machine, remark = merge_probe(discover(storage=tuple(storage)))
    on_gpu = _has_usable_gpu(machine) if device is None else device.startswith("cuda")
    if not on_gpu:
        return TargetMachine(
            machine=cpu_machine(machine), kernels=False, is_here=True, remark=remark
        )
    if not machine.gpus:
        raise EngineError("device='cuda' was requested, but the driver reports no GPU")
    machine = _in_torch_order(machine, device)
    kernels = runs_kernels(machine) and importlib.util.find_spec("triton") is not None
    return TargetMachine(machine=machine, kernels=kernels, is_here=True, remark=remark)


def machine_to_plan_for(name: str | None, paths: Iterable[str] = ()) -> TargetMachine:
    """Find the machine that `penstock plan` plans for.

    Args:
        name: Machine file, preset, or `this`. None for this machine, or the default preset if this
            machine has no GPU.
        paths: Storage paths of the budget.
    """
    if name is None or name == THIS:
        here = this_machine(paths=paths)
        if name == THIS or here.machine.gpus:
            remark = here.remark or (
                "Speeds of this machine were not measured; `penstock probe` measures them."
            )
            return replace(here, remark=f"Planning for this machine. {remark}")
        return replace(_named_machine(DEFAULT), remark=(
            f"This machine has no GPU that torch can use: planning for the preset {DEFAULT} "
            f"instead (see `penstock machines`). `penstock train` would compute on the CPU here; "
            f"`--machine {THIS}` plans for that."
        ))  # fmt: skip
    return _named_machine(name)


def runs_kernels(machine: Machine) -> bool:
    """Return whether the machine's first GPU runs compiled layers and Triton kernels.

    A machine file that does not state the compute capability is assumed to describe a GPU that
    does.
    """
    if not machine.gpus:
        return False
    capability = machine.gpus[0].capability_numbers
    return capability is None or capability >= KERNEL_CAPABILITY


def _named_machine(name: str) -> TargetMachine:
    if name in preset_names():
        machine = preset(name)
    elif Path(name).is_file():
        machine = Machine.load(name)
    else:
        listed = ", ".join([*preset_names(), THIS])
        raise PlanError("machine", f"{name} is neither a machine file nor a preset ({listed})")
    return TargetMachine(machine=machine, kernels=runs_kernels(machine), is_here=False)


def _has_usable_gpu(machine: Machine) -> bool:
    """Return whether torch can use a GPU; importing torch takes seconds, so not without a GPU."""
    if not machine.gpus:
        return False
    import torch

    return torch.cuda.is_available()


def _in_torch_order(machine: Machine, device: str | None) -> Machine:
    """Return the machine with its GPUs in torch's order, the one that computes first.

    The driver lists GPUs in PCI bus order, and torch in an order that CUDA_VISIBLE_DEVICES and
    CUDA_DEVICE_ORDER can change. Several ranks use torch's first GPUs, one each. GPUs that torch
    does not list come last.
    """
    import torch

    if not torch.cuda.is_available():  # the engine reports this when it opens the device
        return machine
    used = torch.device(device or "cuda").index
    first = torch.cuda.current_device() if used is None else used
    count = torch.cuda.device_count()
    left, ordered = list(machine.gpus), []
    for ordinal in (first, *(i for i in range(count) if i != first)):
        seen = torch.cuda.get_device_properties(ordinal)
        uuid = str(getattr(seen, "uuid", "") or "")
        known = next((gpu for gpu in left if uuid and gpu.uuid.endswith(uuid)), None)
        if known is None and ordinal == first:
            known = left[0]
        if known is not None:
            left.remove(known)
            ordered.append(_complete(known, seen))
    return replace(machine, gpus=(*ordered, *left))


def _complete(gpu: Gpu, seen: Any) -> Gpu:
    """Fill in what only the driver library reports, if that is not installed."""
    return replace(
        gpu,
        memory=gpu.memory if gpu.memory is not None else seen.total_memory,
        capability=gpu.capability or f"{seen.major}.{seen.minor}",
    )
