"""Machines you can plan for without owning them, and GPU data sheets.

`preset` loads a machine file that ships with the package. `cpu_machine` turns a host into a machine
that trains on its CPU. `data_sheet` gives the vendor's figures for a GPU that was not measured.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from typing import NamedTuple

from penstock.errors import MachineError
from penstock.machine.machine import Machine
from penstock.records import from_json, parse

DEFAULT = "desktop-24gb"
"""Preset to plan for if there is no GPU and no machine was named."""


class DataSheet(NamedTuple):
    """The vendor's figures for a GPU."""

    flops: float
    """Dense 16-bit tensor operations per second, with fp32 accumulation."""

    bandwidth: float
    """Bytes per second of GPU memory."""

    fp32_flops: float
    """Operations per second in fp32, without tensor cores."""


DATA_SHEETS: dict[str, DataSheet] = {
    "V100": DataSheet(125e12, 0.90e12, 15.7e12),
    "RTX 3090": DataSheet(71e12, 0.94e12, 35.6e12),
    "RTX A5000": DataSheet(111e12, 0.77e12, 27.8e12),
    "RTX A6000": DataSheet(155e12, 0.77e12, 38.7e12),
    "RTX 4090": DataSheet(165e12, 1.01e12, 82.6e12),
    "RTX 6000 Ada": DataSheet(364e12, 0.96e12, 91.1e12),
    "RTX 5090": DataSheet(209e12, 1.79e12, 104.8e12),
    "A10": DataSheet(125e12, 0.60e12, 31.2e12),
    "L4": DataSheet(121e12, 0.30e12, 30.3e12),
    "L40S": DataSheet(362e12, 0.86e12, 91.6e12),
    "A100": DataSheet(312e12, 2.04e12, 19.5e12),
    "H100": DataSheet(989e12, 3.35e12, 67e12),
    "H200": DataSheet(989e12, 4.80e12, 67e12),
    "B200": DataSheet(2250e12, 8.00e12, 80e12),
}
"""Public data sheets, by product name."""

MATMUL_SHARE = 0.78
"""Share of the data sheet's rate that a large matrix multiplication reaches: 770 of 989 TFLOP/s on
an H200 (measured)."""

BLOCK_SHARE = 0.71
"""Share of the matrix multiplication rate that a complete transformer layer of an 8B model reaches:
545 of 770 TFLOP/s on an H200, eager with SDPA (docs/planner.md)."""

COMPILED_GAIN = 1.15
"""Speedup from compiling the layer: 628 instead of 545 TFLOP/s on an H200 (docs/planner.md)."""

LAYER_SHARE = MATMUL_SHARE * BLOCK_SHARE * COMPILED_GAIN
"""Share of the data sheet's rate that a compiled layer reaches: 64 %.

No machine that ships with the package computes faster than this: a plan for a machine that you do
not own must not promise what nobody measured."""


def preset_names() -> list[str]:
    """Return the names of the machines that ship with the package."""
    folder = resources.files("penstock.machine") / "preset_files"
    names = (file.name for file in folder.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def preset(name: str) -> Machine:
    """Load a machine that ships with the package. A MachineError lists the names."""
    if name not in preset_names():
        listed = ", ".join(preset_names())
        raise MachineError("machine", f"there is no preset {name!r}; the presets are {listed}")
    text = (resources.files("penstock.machine") / "preset_files" / f"{name}.json").read_text(
        encoding="utf-8"
    )
    return from_json(Machine, parse(text), where=name, error=MachineError)


def cpu_machine(machine: Machine) -> Machine:
    """Return the same host without its GPUs: the CPU computes instead.

    The HBM tier is then a share of the first node's memory, as large as the budget says. There is
    no CUDA context, and transfers are copies within memory. The cost model (`planner.cost.rates`)
    supplies the speed of the cores, and of memory that was not measured, and lists it among the
    plan's assumptions. The caller still has to add the storage paths of the budget:
    `budget.with_paths`.
    """
    name = f"{machine.name or 'this host'} (CPU)"
    # The measured memory of a process includes CUDA if there is a GPU.
    process_memory = None if machine.gpus else machine.process_memory
    return replace(
        machine, name=name, gpus=(), transfers=(), gpu_links=(), process_memory=process_memory
    )


def data_sheet(name: str) -> DataSheet | None:
    """Return the data sheet for a product name, or None: an `A100-SXM4-80GB` is an `A100`.

    If several entries match, the longest one is the most specific.
    """
    plain = f" {name.replace('-', ' ').replace('_', ' ').lower()} "
    matching = [known for known in DATA_SHEETS if f" {known.lower()} " in plain]
    return DATA_SHEETS[max(matching, key=len)] if matching else None
