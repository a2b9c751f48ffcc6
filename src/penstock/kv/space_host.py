"""The space of host memory: pages of an anonymous file. Room: hold.

It serves generation on a CPU, and it faults where a GPU would, so that what is tested over it holds
on a GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence

import torch

from penstock import _native
from penstock.kv.errors import SpaceError
from penstock.kv.space import Page, tensor_over
from penstock.units import KiB, round_up

PAGE_NBYTES = 64 * KiB
"""The kernel deals in 4 KiB; a mapping for each of those would soon reach vm.max_map_count."""

_DLPACK_CPU = 1


class HostSpace:
    """Pages of one memfd, by number."""

    def __init__(self, page_nbytes: int | None = None) -> None:
        unit = _native.page_nbytes()
        self._page_nbytes = page_nbytes or round_up(PAGE_NBYTES, unit)
        if self._page_nbytes % unit:
            raise SpaceError(
                call="page_nbytes",
                reason=f"{page_nbytes} is not a multiple of the kernel's {unit}",
                advice="ask for one that is",
            )
        self._lock = threading.Lock()
        self._fd: int | None = _native.open_pages("penstock-kv")
        self._made = 0  # under _lock, as is _holes
        self._holes: list[Page] = []

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def page_nbytes(self) -> int:
        return self._page_nbytes

    def create(self) -> Page:
        with self._lock:
            fd = self._file
            page = self._holes[-1] if self._holes else self._made
            try:
                if page == self._made:
                    _native.extend_pages(fd, (page + 1) * self._page_nbytes)
                _native.commit_pages(fd, page * self._page_nbytes, self._page_nbytes)
            except OSError as failed:
                raise _explain(failed, "free host memory or lower the budget") from None
            if page == self._made:
                self._made += 1
            else:
                self._holes.pop()
            return page

    def destroy(self, page: Page) -> None:
        with self._lock:
            _native.punch_pages(self._file, page * self._page_nbytes, self._page_nbytes)
            self._holes.append(page)

    def reserve(self, count: int) -> int:
        try:
            return _native.reserve_range(count * self._page_nbytes, self._page_nbytes)
        except OSError as failed:
            raise _explain(failed, "lower max_batch or max_context, or lift `ulimit -v`") from None

    def release(self, address: int, count: int) -> None:
        _native.release_range(address, count * self._page_nbytes)

    def map(self, address: int, pages: Sequence[Page], *, writable: bool = True) -> None:
        unit = self._page_nbytes
        try:
            for first, run in _runs(pages):
                nbytes = len(run) * unit
                _native.map_pages(
                    address + first * unit, nbytes, self._file, run[0] * unit, writable
                )
        except OSError as failed:
            self.unmap(address, len(pages))
            raise _explain(failed, "raise vm.max_map_count, or use larger pages") from None

    def unmap(self, address: int, count: int) -> None:
        if count:
            _native.unmap_pages(address, count * self._page_nbytes)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return tensor_over(address, nbytes, _DLPACK_CPU, 0)

    def clear(self, part: torch.Tensor) -> None:
        part.zero_()

    def settle(self) -> None:
        """Work on the host is over when its call returns."""

    def enter_thread(self) -> None:
        """A host thread needs nothing."""

    def close(self) -> None:
        if self._fd is not None:
            _native.close_pages(self._fd)
            self._fd = None

    @property
    def _file(self) -> int:
        if self._fd is None:
            raise SpaceError(call="the space", reason="it is closed", advice="make a new cache")
        return self._fd


def _runs(pages: Sequence[Page]) -> Iterator[tuple[int, Sequence[Page]]]:
    """Neighbours in the file are one mapping: one system call, and one of vm.max_map_count."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield start, pages[start:i]
            start = i


def _explain(failed: OSError, advice: str) -> SpaceError:
    call = str(failed.strerror).split(":")[0]
    return SpaceError(call=call, reason=os.strerror(failed.errno or 0), advice=advice)
