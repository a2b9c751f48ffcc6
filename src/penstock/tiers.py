"""The memory tiers that bytes can be placed in."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """A memory tier. The members are ordered from fastest to largest."""

    HBM = "hbm"
    """GPU memory."""

    DRAM = "dram"
    """Memory of a NUMA node that has CPUs."""

    CXL = "cxl"
    """Memory behind a CXL link: a NUMA node without CPUs, with more capacity than bandwidth."""

    NVME = "nvme"
    """Storage: a file or a raw block device."""
