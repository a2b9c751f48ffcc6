"""Address ranges and pages of memory, allocated independently of each other.

A range of addresses is reserved once and costs no memory. Pages are created one by one and mapped
into ranges; a page can be mapped at several addresses, and moved by mapping it elsewhere. Touching
an address without a page faults, on the host as on a GPU.

`HostSpace` serves generation on a CPU. It faults where a GPU would, so tests that pass over it also
hold on a GPU. `CudaSpace` uses the virtual memory management of the CUDA driver.
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

HOST_PAGE_NBYTES = 64 * KiB
"""Page size on the host. The OS's own 4 KiB would soon reach vm.max_map_count, because each
page can become a mapping of its own."""

Page = int
"""Identifies a page: its number in a file on the host, or a driver handle on a GPU."""

_DLPACK_CPU = 1
_DLPACK_CUDA = 2


class Space(Protocol):
    """The address space of a device. Methods may be called from several threads concurrently."""

    @property
    def device(self) -> torch.device:
        """The device whose memory the pages are."""
        ...

    @property
    def page_nbytes(self) -> int:
        """Size of all pages: a multiple of the smallest size that the device can map."""

    def create(self) -> Page:
        """Allocate a page that is not mapped. Its contents are undefined."""

    def destroy(self, page: Page) -> None:
        """Release a page's memory. The page must not be mapped any more."""

    def reserve(self, count: int) -> int:
        """Reserve addresses for `count` pages, without memory, and return the first address."""

    def release(self, address: int, count: int) -> None:
        """Release a reserved range. Nothing may be mapped in it any more."""

    def map(self, address: int, pages: Sequence[Page], *, writable: bool = True) -> None:
        """Map pages one after the other, where nothing is mapped. Map all of them or none."""

    def unmap(self, address: int, count: int) -> None:
        """Unmap `count` pages. No work on the device may still use them: see `synchronize`."""

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """Return a tensor of bytes over a part of a range, mapped or not. It owns no memory."""

    def zero(self, part: torch.Tensor) -> None:
        """Zero bytes that nothing else uses yet, and return when that is done.

        The background thread calls this while another thread computes.
        """

    def synchronize(self) -> None:
        """Wait until no work submitted to the device before this call still uses a page."""

    def enter_thread(self) -> None:
        """Prepare the calling thread for creating and mapping pages."""

    def close(self) -> None:
        """Release what the space itself holds. All pages and ranges must have been released."""


def open_space(device: torch.device, page_nbytes: int | None = None) -> Space:
    """Open the address space of a device, with pages of the device's own size by default."""
    if device.type == "cuda":
        return CudaSpace(device, page_nbytes)

    return HostSpace(page_nbytes)


def tensor_over(address: int, nbytes: int, device_type: int, index: int) -> torch.Tensor:
    """Return the bytes at an address as a tensor.

    It goes through DLPack, because torch then does not ask the driver about the address, which may
    not be mapped yet.
    """
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(
        _native.bytes_at(address, nbytes, device_type, index)
    )
    return tensor


class HostSpace:
    """Pages of one anonymous file (memfd), identified by their number in it."""

    def __init__(self, page_nbytes: int | None = None) -> None:
        unit = _native.page_nbytes()
        self._page_nbytes = page_nbytes or round_up(HOST_PAGE_NBYTES, unit)
        if self._page_nbytes % unit:
            raise SpaceError(
                call="page_nbytes",
                reason=f"{page_nbytes} is not a multiple of the kernel's page size, {unit}",
                advice="use a multiple",
            )
        self._lock = threading.Lock()
        self._fd: int | None = _native.open_pages("penstock-kv")
        self._file_pages = 0  # guarded by _lock, like _holes
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
            page = self._holes[-1] if self._holes else self._file_pages
            try:
                if page == self._file_pages:
                    _native.extend_pages(fd, (page + 1) * self._page_nbytes)
                # Commit now: memory that runs out later would end the process with SIGBUS.
                _native.commit_pages(fd, page * self._page_nbytes, self._page_nbytes)
            except OSError as error:
                raise _space_error(error, "free host memory or lower the budget") from None
            if page == self._file_pages:
                self._file_pages += 1
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
        except OSError as error:
            advice = "lower max_batch or max_context, or raise `ulimit -v`"
            raise _space_error(error, advice) from None

    def release(self, address: int, count: int) -> None:
        _native.release_range(address, count * self._page_nbytes)

    def map(self, address: int, pages: Sequence[Page], *, writable: bool = True) -> None:
        unit = self._page_nbytes
        try:
            for first, run in _consecutive_runs(pages):
                nbytes = len(run) * unit
                _native.map_pages(
                    address + first * unit, nbytes, self._file, run[0] * unit, writable
                )
        except OSError as error:
            self.unmap(address, len(pages))
            raise _space_error(error, "raise vm.max_map_count, or use larger pages") from None

    def unmap(self, address: int, count: int) -> None:
        if count:
            _native.unmap_pages(address, count * self._page_nbytes)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return tensor_over(address, nbytes, _DLPACK_CPU, 0)

    def zero(self, part: torch.Tensor) -> None:
        part.zero_()

    def synchronize(self) -> None:
        """Do nothing: work on the host is done when its call returns."""

    def enter_thread(self) -> None:
        """Do nothing: a host thread needs no preparation."""

    def close(self) -> None:
        if self._fd is not None:
            _native.close_pages(self._fd)
            self._fd = None

    @property
    def _file(self) -> int:
        if self._fd is None:
            raise SpaceError(call="the space", reason="it is closed", advice="create a new cache")
        return self._fd


def _consecutive_runs(pages: Sequence[Page]) -> Iterator[tuple[int, Sequence[Page]]]:
    """Yield runs of pages that follow each other in the file, each with its position.

    A run takes one system call, and counts once towards vm.max_map_count.
    """
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield start, pages[start:i]
            start = i


def _space_error(error: OSError, advice: str) -> SpaceError:
    call = str(error.strerror).split(":")[0]
    return SpaceError(call=call, reason=os.strerror(error.errno or 0), advice=advice)


class CudaSpace:
    """Pages of GPU memory: driver allocations that have no address until they are mapped.

    The driver is an argument, so that everything but the driver itself is tested without a GPU.
    """

    def __init__(
        self, device: torch.device, page_nbytes: int | None = None, driver: Any = None
    ) -> None:
        self._driver = driver or find_driver()
        index = device.index if device.index is not None else self._current_index()
        self._index = index
        self.enter_thread()  # creates torch's CUDA context, which the driver's calls need
        self._check_support()
        self._properties = self._driver.CUmemAllocationProp()
        self._properties.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._set_location(self._properties.location)
        unit = self._granularity()
        self._page_nbytes = page_nbytes or unit
        if self._page_nbytes % unit:
            raise SpaceError(
                call="page_nbytes",
                reason=f"{page_nbytes} is not a multiple of the driver's granularity, {unit}",
                advice="use a multiple, or leave it out",
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
            # torch caches the memory of freed tensors. Releasing it may be enough.
            self._empty_torch_cache()
            return int(self._call("cuMemCreate", self._page_nbytes, self._properties, 0))

    def destroy(self, page: Page) -> None:
        self._call("cuMemRelease", page)

    def reserve(self, count: int) -> int:
        return int(self._call("cuMemAddressReserve", count * self._page_nbytes, 0, 0, 0))

    def release(self, address: int, count: int) -> None:
        self._call("cuMemAddressFree", address, count * self._page_nbytes)

    def map(self, address: int, pages: Sequence[Page], *, writable: bool = True) -> None:
        mapped = 0
        try:
            for page in pages:
                target = address + mapped * self._page_nbytes
                self._call("cuMemMap", target, self._page_nbytes, 0, page, 0)
                mapped += 1
            # Setting access is the most expensive of the calls; one call covers all pages.
            rights = [self._access(writable)]
            self._call("cuMemSetAccess", address, mapped * self._page_nbytes, rights, 1)
        except BaseException:
            if mapped:
                self._call("cuMemUnmap", address, mapped * self._page_nbytes)
            raise

    def unmap(self, address: int, count: int) -> None:
        if count:
            self._call("cuMemUnmap", address, count * self._page_nbytes)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return tensor_over(address, nbytes, _DLPACK_CUDA, self._index)

    def zero(self, part: torch.Tensor) -> None:
        # On a stream of its own, so that it does not wait for the work of the computing thread; and
        # waited for, because the caller publishes the page as zeroed when this returns.
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            part.zero_()
        side.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Do nothing: the driver holds nothing for the space itself."""

    def _current_index(self) -> int:
        return torch.cuda.current_device()

    def _empty_torch_cache(self) -> None:
        torch.cuda.empty_cache()

    def _access(self, writable: bool) -> Any:
        rights = self._driver.CUmemAccessDesc()
        self._set_location(rights.location)
        flags = self._driver.CUmemAccess_flags
        rights.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if writable
            else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        return rights

    def _set_location(self, location: Any) -> None:
        location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._index

    def _check_support(self) -> None:
        attributes = self._driver.CUdevice_attribute
        wanted = attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        device = self._call("cuDeviceGet", self._index)
        if not self._call("cuDeviceGetAttribute", wanted, device):
            raise SpaceError(
                call="cuDeviceGetAttribute",
                reason=f"GPU {self._index} does not support virtual memory management",
                advice="use one of transformers' own caches, or another GPU",
            )

    def _granularity(self) -> int:
        flags = self._driver.CUmemAllocationGranularity_flags
        minimum = flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties, minimum))

    def _call(self, name: str, *args: Any) -> Any:
        """Call the driver. Its bindings return a status, followed by the results."""
        status, *results = getattr(self._driver, name)(*args)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            advice = _ADVICE.get(name, _DEFAULT_ADVICE)
            raise SpaceError(call=name, reason=_status_name(status), advice=advice)
        return results[0] if results else None


_DEFAULT_ADVICE = "run `penstock doctor`, and report this error together with its output"

_ADVICE = {
    "cuMemCreate": "the GPU has no memory left; lower the budget or free other memory on the GPU",
    "cuMemAddressReserve": "lower max_batch or max_context",
}


def _status_name(status: Any) -> str:
    return getattr(status, "name", None) or f"error {status}"


def find_driver() -> Any:
    """Import NVIDIA's bindings of the CUDA driver, or raise an error that says how to install."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise SpaceError(
            call="import cuda.bindings.driver",
            reason=str(error),
            advice="run `pip install 'penstock[cuda]'`, which installs cuda-bindings (they must "
            "match your CUDA version), or use device='cpu'",
        ) from None
