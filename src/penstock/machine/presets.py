"""Machine files that come with the package: plan for a machine one does not own. Room: measure."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources

from penstock.errors import MachineError
from penstock.machine.machine import Machine
from penstock.records import from_json, parse

DEFAULT = "desktop-24gb"
"""What is planned for where there is no GPU and no machine was named."""


def preset_names() -> list[str]:
    folder = resources.files("penstock.machine") / "preset_files"
    names = (file.name for file in folder.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def preset(name: str) -> Machine:
    """One of them by name. MachineError lists the names."""
    if name not in preset_names():
        listed = ", ".join(preset_names())
        raise MachineError("machine", f"there is no bundled {name!r}; there are {listed}")
    text = (resources.files("penstock.machine") / "preset_files" / f"{name}.json").read_text(
        encoding="utf-8"
    )
    return from_json(Machine, parse(text), where=name, error=MachineError)


# --------
# This host as a training machine of its own: the CPU computes where a GPU would. Room: decide.
#
# What is called HBM is then a share of the first node's memory, as large as the budget says.
# Nothing
# is a CUDA context, and copies are copies within memory.


def cpu_machine(machine: Machine) -> Machine:
    """The same host without its GPUs.

    How fast its cores compute, and a memory that nobody measured, is the cost model's to say
    (`cost.rates`), and said in what the plan assumed. Paths of the budget still have to be added:
    `budget.with_paths`.
    """
    name = f"{machine.name or 'this host'} (CPU)"
    return replace(machine, name=name, gpus=(), transfers=())


# --------
# What makers say of their GPUs, for those whose speed was not measured. Room: measure.
#
# Dense 16-bit tensor rates with fp32 sums, and memory bandwidth, from the public data sheets.

# name: (operations per second, bytes per second of its own memory)
DATA_SHEETS: dict[str, tuple[float, float]] = {
    "V100": (125e12, 0.90e12),
    "RTX 3090": (71e12, 0.94e12),
    "RTX A5000": (111e12, 0.77e12),
    "RTX A6000": (155e12, 0.77e12),
    "RTX 4090": (165e12, 1.01e12),
    "RTX 6000 Ada": (364e12, 0.96e12),
    "RTX 5090": (209e12, 1.79e12),
    "A10": (125e12, 0.60e12),
    "L4": (121e12, 0.30e12),
    "L40S": (362e12, 0.86e12),
    "A100": (312e12, 2.04e12),
    "H100": (989e12, 3.35e12),
    "H200": (989e12, 4.80e12),
    "B200": (2250e12, 8.00e12),
}

MATMUL_SHARE = 0.78
"""Of the data sheet, in a large matrix product: 770 of 989 TFLOP/s on an H200 (measured)."""

BLOCK_SHARE = 0.71
"""Of that, in a whole transformer layer of an 8B model: 545 of 770 TFLOP/s on an H200, eager, SDPA
(docs/planner.md)."""

COMPILED_GAIN = 1.15
"""What compiling the layer brings: 628 for 545 TFLOP/s on an H200 (docs/planner.md)."""


def data_sheet(name: str) -> tuple[float, float] | None:
    """The longest entry whose words are in the name: an `A100-SXM4-80GB` is an A100."""
    plain = f" {name.replace('-', ' ').replace('_', ' ').lower()} "
    found = [known for known in DATA_SHEETS if f" {known.lower()} " in plain]
    return DATA_SHEETS[max(found, key=len)] if found else None
