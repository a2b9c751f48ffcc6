"""The sweep's threads. Room: update. Apart from torch's own, asleep between jobs."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from penstock import _native
from penstock.errors import SweepInputError
from penstock.machine.sysfs import System


class Pool:
    """A bounded team of threads, confined to chosen CPUs or to those nearest a memory node.

    Jobs run one after the other, in the order of their start, but for those that are said to share
    nothing with the ones before. `nice` (0 to 19) lets other threads go first, as while the GPU is
    being fed; a thread cannot take it back.
    """

    def __init__(
        self,
        threads: int | None = None,
        *,
        cpus: Sequence[int] | None = None,
        node: int | None = None,
        nice: int = 0,
    ) -> None:
        if cpus is not None and node is not None:
            raise SweepInputError("cpus", "and node both say where threads run; give one of them")
        if node is not None:
            cpus = System().nearest_cpus(node)
        usable = sorted(os.sched_getaffinity(0))
        self.cpus = tuple(usable if cpus is None else cpus)
        if not self.cpus or not set(self.cpus) <= set(usable):
            raise SweepInputError("cpus", f"are {self.cpus}, but this process may use {usable}")
        self.nice = nice
        try:
            # Confined only where asked: without, threads may follow the process to other CPUs.
            where = [] if cpus is None else list(self.cpus)
            self.native = _native.SweepPool(
                len(self.cpus) if threads is None else threads, where, nice
            )
        except (ValueError, TypeError) as refused:
            raise SweepInputError("pool", f"cannot be made: {refused}") from None

    @property
    def threads(self) -> int:
        return self.native.threads


_shared: list[Pool] = []
_lock = threading.Lock()


def default_pool() -> Pool:
    """One pool for the process, as wide as its CPUs, made when first needed."""
    with _lock:
        if not _shared:
            _shared.append(Pool())
        return _shared[0]


def _forget_pool() -> None:
    # A child of fork has the object but not its threads. It is leaked on purpose: joining threads
    # that are not there would never end.
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _leaked.extend(_shared)
    _shared.clear()


_leaked: list[Pool] = []
os.register_at_fork(after_in_child=_forget_pool)
