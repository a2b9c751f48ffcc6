"""Address ranges and pages, apart from each other. Room: hold.

A range is reserved once and costs nothing. Pages are made one by one, mapped into ranges, moved
from one address to another or shown at several, and given back. What is not mapped faults when it
is touched, on the host as on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Page = int
"""A page's name: an offset into a file on the host, a driver's handle on a GPU."""


class Space(Protocol):
    """What a device offers. Methods may be called from several threads at once."""

    @property
    def device(self) -> torch.device: ...

    @property
    def page_nbytes(self) -> int:
        """Pages are of one size, a multiple of what the device can map."""

    def create(self) -> Page:
        """A page of memory that is mapped nowhere. Its contents are not promised."""

    def destroy(self, page: Page) -> None:
        """Give its memory back. It is mapped nowhere any more."""

    def reserve(self, count: int) -> int:
        """The address of a range of `count` pages without memory."""

    def release(self, address: int, count: int) -> None:
        """Give a range back. Nothing is mapped in it any more."""

    def map(self, address: int, pages: Sequence[Page], *, writable: bool = True) -> None:
        """Show pages one behind the other, where nothing is mapped. All or none."""

    def unmap(self, address: int, count: int) -> None:
        """Take `count` mapped pages away from an address; nothing uses them: see `settle`."""

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """A tensor of bytes over any part of a range, mapped or not. It keeps nothing alive."""

    def clear(self, part: torch.Tensor) -> None:
        """Zero bytes that nothing else uses yet, and return when that is done: for a thread beside
        the one that computes."""

    def settle(self) -> None:
        """Return when no work given to the device before this still reads or writes a page."""

    def enter_thread(self) -> None:
        """Called first in a thread that makes or maps pages."""

    def close(self) -> None:
        """Give back what the space itself holds. Every page and range is back already."""


def open_space(device: torch.device, page_nbytes: int | None = None) -> Space:
    """The space of a device; pages of the device's own size unless told otherwise."""
    if device.type == "cuda":
        from penstock.kv.space_cuda import CudaSpace

        return CudaSpace(device, page_nbytes)
    from penstock.kv.space_host import HostSpace

    return HostSpace(page_nbytes)


def tensor_over(address: int, nbytes: int, device_type: int, index: int) -> torch.Tensor:
    """Bytes at an address as a tensor, by DLPack: torch then asks no driver about the address."""
    from penstock import _native

    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(
        _native.bytes_at(address, nbytes, device_type, index)
    )
    return tensor
