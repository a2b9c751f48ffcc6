"""Whether a buffer and a part of an extent fit each other. Room: hold. Pure."""

from __future__ import annotations

from penstock.storage.errors import AlignmentError
from penstock.storage.layout import Extent, Layout


def check_span(
    layout: Layout, extent: Extent, *, address: int, held: int, offset: int, length: int
) -> None:
    """Raise unless `length` bytes at `address` can move to or from `offset` as they are.

    Nothing is copied to make it fit: a hidden buffer would be memory that no plan knows of.
    """
    name, align, unit = extent.name, layout.alignment, layout.unit
    if address % align:
        raise AlignmentError(
            f"{name}: the buffer starts {address % align} B after a multiple of {align}; take it "
            f"with arena.take(..., align={align})"
        )
    if length > held:
        raise AlignmentError(f"{name}: {length} B wanted of a buffer of {held} B")
    if offset < 0 or offset % unit:
        raise AlignmentError(f"{name}: offset {offset} is not a multiple of the unit, {unit}")
    end = offset + length
    if length < 1 or end > extent.stored_nbytes:
        raise AlignmentError(
            f"{name}: bytes {offset} to {end} of an extent of {extent.stored_nbytes} "
            f"(padding included)"
        )
    if length % unit and end != extent.stored_nbytes:
        raise AlignmentError(
            f"{name}: a length of {length} B is neither a multiple of the unit, {unit}, nor does "
            f"it reach the extent's end at {extent.stored_nbytes}; a whole extent needs a buffer "
            f"of extent.stored_nbytes"
        )
