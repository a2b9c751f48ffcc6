"""Address ranges and pages, apart from each other. Room: hold.

A range is reserved once and costs nothing. Pages are made one by one, mapped into ranges, moved
from one address to another or shown at several, and given back. What is not mapped faults when it
is touched, on the host as on a GPU.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from penstock import _native
from penstock.kv.errors import SpaceError
from penstock.units import KiB, round_up

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
        return CudaSpace(device, page_nbytes)

    return HostSpace(page_nbytes)


def tensor_over(address: int, nbytes: int, device_type: int, index: int) -> torch.Tensor:
    """Bytes at an address as a tensor, by DLPack: torch then asks no driver about the address."""
    from penstock import _native

    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(
        _native.bytes_at(address, nbytes, device_type, index)
    )
    return tensor


# --------
# The space of host memory: pages of an anonymous file. Room: hold.
#
# It serves generation on a CPU, and it faults where a GPU would, so that what is tested over it
# holds
# on a GPU.

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


# --------
# The space of a GPU's memory, through the CUDA driver. Room: hold.
#
# The driver is an argument, so that everything but its own calls is tested without a GPU.

_DLPACK_CUDA = 2


class CudaSpace:
    """Pages are allocations of the driver that have no address until they are mapped."""

    def __init__(
        self, device: torch.device, page_nbytes: int | None = None, driver: Any = None
    ) -> None:
        self._driver = driver or find_driver()
        index = device.index if device.index is not None else self._current()
        self._index = index
        self.enter_thread()  # starts CUDA: the driver's calls need its context
        self._check_support()
        self._properties = self._driver.CUmemAllocationProp()
        self._properties.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._locate(self._properties.location)
        unit = self._ask_granularity()
        self._page_nbytes = page_nbytes or unit
        if self._page_nbytes % unit:
            raise SpaceError(
                call="page_nbytes",
                reason=f"{page_nbytes} is not a multiple of the driver's {unit}",
                advice="ask for one that is, or for none",
            )

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self._index)

    @property
    def page_nbytes(self) -> int:
        return self._page_nbytes

    def create(self) -> Page:
        try:
            return int(self._call("cuMemCreate", self._page_nbytes, self._properties, 0))
        except SpaceError:
            # torch keeps memory that its tensors no longer use; it may be what is missing.
            self._let_torch_go()
            return int(self._call("cuMemCreate", self._page_nbytes, self._properties, 0))

    def destroy(self, page: Page) -> None:
        self._call("cuMemRelease", page)

    def reserve(self, count: int) -> int:
        return int(self._call("cuMemAddressReserve", count * self._page_nbytes, 0, 0, 0))

    def release(self, address: int, count: int) -> None:
        self._call("cuMemAddressFree", address, count * self._page_nbytes)

    def map(self, address: int, pages: Sequence[Page], *, writable: bool = True) -> None:
        done = 0
        try:
            for page in pages:
                at = address + done * self._page_nbytes
                self._call("cuMemMap", at, self._page_nbytes, 0, page, 0)
                done += 1
            # Access is the dearest of the calls, and one call serves neighbours.
            rights = [self._access(writable)]
            self._call("cuMemSetAccess", address, done * self._page_nbytes, rights, 1)
        except BaseException:
            if done:
                self._call("cuMemUnmap", address, done * self._page_nbytes)
            raise

    def unmap(self, address: int, count: int) -> None:
        if count:
            self._call("cuMemUnmap", address, count * self._page_nbytes)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return tensor_over(address, nbytes, _DLPACK_CUDA, self._index)

    def clear(self, part: torch.Tensor) -> None:
        # A stream of its own, and waited for: the pages are published when they are zero.
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            part.zero_()
        side.synchronize()

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """The driver holds nothing for a space itself."""

    def _current(self) -> int:
        return torch.cuda.current_device()

    def _let_torch_go(self) -> None:
        torch.cuda.empty_cache()

    def _access(self, writable: bool) -> Any:
        rights = self._driver.CUmemAccessDesc()
        self._locate(rights.location)
        flags = self._driver.CUmemAccess_flags
        rights.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if writable
            else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        return rights

    def _locate(self, location: Any) -> None:
        location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._index

    def _check_support(self) -> None:
        kinds = self._driver.CUdevice_attribute
        wanted = kinds.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        device = self._call("cuDeviceGet", self._index)
        if not self._call("cuDeviceGetAttribute", wanted, device):
            raise SpaceError(
                call="cuDeviceGetAttribute",
                reason=f"GPU {self._index} has no virtual memory management",
                advice="use transformers' own caches there, or another GPU",
            )

    def _ask_granularity(self) -> int:
        kinds = self._driver.CUmemAllocationGranularity_flags
        least = kinds.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties, least))

    def _call(self, name: str, *args: Any) -> Any:
        """One driver call. The bindings return the status and then what the call gives."""
        status, *given = getattr(self._driver, name)(*args)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise SpaceError(call=name, reason=_name(status), advice=_ADVICE.get(name, _ASK))
        return given[0] if given else None


_ASK = "run `penstock doctor`, and report this with what it prints"

_ADVICE = {
    "cuMemCreate": "the GPU has no memory left; lower the budget or free what else is on it",
    "cuMemAddressReserve": "lower max_batch or max_context",
}


def _name(status: Any) -> str:
    return getattr(status, "name", None) or f"error {status}"


def find_driver() -> Any:
    """NVIDIA's bindings of the driver. Absent is an error that says what to install."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as missing:
        raise SpaceError(
            call="import cuda.bindings.driver",
            reason=str(missing),
            advice="`pip install cuda-bindings` in the version of your CUDA, or use device='cpu'",
        ) from None
