"""The space of a GPU's memory, through the CUDA driver. Room: hold.

The driver is an argument, so that everything but its own calls is tested without a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from penstock.kv.errors import SpaceError
from penstock.kv.space import Page, tensor_over

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
