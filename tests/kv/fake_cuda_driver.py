"""A stand-in for the CUDA driver without a GPU: the same calls over host memory, but stricter.

It refuses what the real driver forbids (mapping over a mapping, unmapping part of one, freeing a
range in use), and also what would be a bug of Penstock (releasing a page that is still mapped).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from penstock import _native
from penstock.kv.address_space import CudaSpace, tensor_over

OK, OUT_OF_MEMORY, INVALID = 0, 2, 1
PAGE = 4096


class Driver:
    """The driver. Handles are page numbers in one memfd, starting at 1."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=OK)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(
        CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3
    )
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=1)

    def __init__(self, *, supported: int = 1, pages: int = 10**6) -> None:
        self.supported, self.pages_left = supported, pages
        self.fd = _native.open_pages("penstock-test-driver")
        self.created = 0
        self.alive: set[int] = set()
        self.mapped: dict[int, int] = {}  # address -> handle
        self.ranges: dict[int, int] = {}
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda call: None
        """Called before each driver call. It may raise, or delay the call."""
        self.fail: Callable[[str], bool] = lambda call: False

    def CUmemAllocationProp(self) -> SimpleNamespace:  # noqa: N802  # the driver's name
        return SimpleNamespace(type=0, location=SimpleNamespace(type=0, id=-1))

    def CUmemAccessDesc(self) -> SimpleNamespace:  # noqa: N802  # the driver's name
        return SimpleNamespace(flags=0, location=SimpleNamespace(type=0, id=-1))

    def __getattr__(self, name: str) -> Any:
        """Return `_cuMemMap` for `cuMemMap`, recorded in `calls` and failing if `fail` says so."""
        if not name.startswith("cu"):
            raise AttributeError(name)
        work = getattr(self, f"_{name}")

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            self.before(name)
            if self.fail(name):
                return (INVALID,)
            results: tuple[Any, ...] = work(*args)
            return results

        return call

    def _cuDeviceGet(self, index: int) -> tuple[int, int]:  # noqa: N802
        return OK, index

    def _cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:  # noqa: N802
        return OK, self.supported

    def _cuMemGetAllocationGranularity(self, prop: Any, flag: int) -> tuple[int, int]:  # noqa: N802
        return OK, PAGE

    def _cuMemCreate(self, nbytes: int, prop: Any, flags: int) -> tuple[int, int]:  # noqa: N802
        if len(self.alive) >= self.pages_left or prop.location.type != 1 or prop.type != 1:
            return OUT_OF_MEMORY, 0
        self.created += 1
        _native.extend_pages(self.fd, (self.created + 1) * nbytes)
        at = self.created * nbytes  # filled with bytes that a missing memset would reveal
        view = _native.reserve_range(nbytes, PAGE)
        _native.map_pages(view, nbytes, self.fd, at, True)
        tensor_over(view, nbytes, 1, 0).fill_(0xFF)
        _native.release_range(view, nbytes)
        self.alive.add(self.created)
        return OK, self.created

    def _cuMemRelease(self, handle: int) -> tuple[int]:  # noqa: N802
        if handle not in self.alive or handle in self.mapped.values():
            return (INVALID,)
        self.alive.remove(handle)
        _native.punch_pages(self.fd, handle * PAGE, PAGE)
        return (OK,)

    def _cuMemAddressReserve(self, nbytes: int, *_: int) -> tuple[int, int]:  # noqa: N802
        address = _native.reserve_range(nbytes, PAGE)
        self.ranges[address] = nbytes
        return OK, address

    def _cuMemAddressFree(self, address: int, nbytes: int) -> tuple[int]:  # noqa: N802
        inside = any(address <= at < address + nbytes for at in self.mapped)
        if self.ranges.get(address) != nbytes or inside:
            return (INVALID,)
        del self.ranges[address]
        _native.release_range(address, nbytes)
        return (OK,)

    def _cuMemMap(  # noqa: N802
        self, address: int, nbytes: int, offset: int, handle: int, flags: int
    ) -> tuple[int]:
        if address in self.mapped or handle not in self.alive or nbytes != PAGE:
            return (INVALID,)
        self.mapped[address] = handle
        return (OK,)

    def _cuMemSetAccess(  # noqa: N802
        self, address: int, nbytes: int, rights: list[Any], count: int
    ) -> tuple[int]:
        pages = range(address, address + nbytes, PAGE)
        if any(at not in self.mapped for at in pages) or rights[0].location.id < 0:
            return (INVALID,)
        for at in pages:
            offset = self.mapped[at] * PAGE
            _native.map_pages(at, PAGE, self.fd, offset, rights[0].flags == 3)
        return (OK,)

    def _cuMemUnmap(self, address: int, nbytes: int) -> tuple[int]:  # noqa: N802
        pages = range(address, address + nbytes, PAGE)
        if any(at not in self.mapped for at in pages):
            return (INVALID,)
        for at in pages:
            del self.mapped[at]
        _native.unmap_pages(address, nbytes)
        return (OK,)


class DriverSpace(CudaSpace):
    """CudaSpace over the stand-in driver, without what it needs of torch's own CUDA."""

    def __init__(self, driver: Driver | None = None, page_nbytes: int | None = None) -> None:
        self.driver = driver or Driver()
        self.emptied = 0
        super().__init__(torch.device("cuda", 0), page_nbytes, self.driver)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return tensor_over(address, nbytes, 1, 0)

    def zero(self, part: torch.Tensor) -> None:
        part.zero_()

    def synchronize(self) -> None:
        """Do nothing: the host is done when a call returns."""

    def enter_thread(self) -> None:
        """Do nothing: the host needs no context."""

    def close(self) -> None:
        _native.close_pages(self.driver.fd)

    def _empty_torch_cache(self) -> None:
        self.emptied += 1
