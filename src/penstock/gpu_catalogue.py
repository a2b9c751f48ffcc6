"""What makers say of their GPUs, for those whose speed was not measured. Room: measure.

Dense 16-bit tensor rates with fp32 sums, and memory bandwidth, from the public data sheets.
"""

from __future__ import annotations

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
