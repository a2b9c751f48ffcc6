"""The four places bytes can rest. Room: names."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """From fastest to largest. What fits in an earlier one costs less to use."""

    HBM = "hbm"
    """The GPU's own memory."""

    DRAM = "dram"
    """Memory of a node that has CPUs."""

    CXL = "cxl"
    """Memory of a node without CPUs, behind a CXL link: capacity first, bandwidth second."""

    NVME = "nvme"
    """A file or a raw block device."""
