"""Count the bytes of tensors that are alive while code runs, as it runs.

The counter sees every operation and the storages that it creates. A storage lives as long as Python
variables, views or autograd hold it, so lifetimes are those of the real run, with real tensors and
with fake ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.model.lifetimes import Request
from penstock.model.operation_workspace import operation_workspace
from penstock.units import round_up

GRAIN = 512
"""The CUDA caching allocator rounds every allocation up to a multiple of this."""


class StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live bytes inside its `with` block: what operations create there, and nothing else.

    With `workspaces`, memory that GPU kernels allocate for themselves counts as well.
    """

    def __init__(self, *, workspaces: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspaces = workspaces
        self._live: dict[int, tuple[int, StorageWeakRef, int]] = {}  # by address
        self._nbytes = self._count = 0
        self.peak = 0
        """The most bytes alive at any time."""
        self.requests: list[Request] = []
        """Allocations and frees so far, in order."""

    def live(self) -> int:
        """Return the bytes that are alive now."""
        for address, (key, reference, nbytes) in list(self._live.items()):
            if reference.expired():  # type: ignore[no-untyped-call]
                del self._live[address]
                self._nbytes -= nbytes
                if nbytes:
                    self.requests.append(Request(key, None))
        return self._nbytes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        known = {t.untyped_storage()._cdata for t in given if _has_storage(t)}
        # Storages that died since the last operation go first: this operation reused their memory.
        self.live()
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self._live:
                nbytes = round_up(storage.nbytes(), GRAIN)
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._live[storage._cdata] = (self._request(nbytes), reference, nbytes)
                self._nbytes += nbytes
        workspace = operation_workspace(func, given) if self._workspaces else 0
        if workspace:
            self.requests.append(Request(self._request(workspace), None))
        self.peak = max(self.peak, self._nbytes + workspace)
        return result

    def _request(self, nbytes: int) -> int:
        self._count += 1
        if nbytes:
            self.requests.append(Request(self._count, nbytes))
        return self._count


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and _has_storage(leaf):
            yield leaf


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
