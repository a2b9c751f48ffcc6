"""The guest's nodes, and memory regions without torch, for the tests in the guest."""

from __future__ import annotations

import os

from penstock import _native
from penstock.memory.placement import Place
from penstock.memory.region import RegionOptions, allocate_region
from penstock.memory.residency import Residency, residency

MODE = os.environ.get("PENSTOCK_VM_MODE", "")
NODES = {"numa": (0, 1, 2), "cxl": (0, 1, 2), "cxlperf": (0, 1, 3)}.get(MODE, ())
FAR = NODES[-1] if NODES else 0
UNIT = _native.UNIT_NBYTES
PAGE = _native.page_nbytes()


def where(region: _native.Region) -> Residency:
    """Return where the pages of a region are."""
    return residency(region.address, region.mapped_nbytes)


def allocate(nbytes: int, place: Place, **options: object) -> _native.Region:
    """Allocate a region."""
    return allocate_region(nbytes, place, RegionOptions(**options))  # type: ignore[arg-type]
