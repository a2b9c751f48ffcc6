"""Threads of the optimizer sweep. They are separate from torch's threads and sleep between jobs."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from penstock import _native
from penstock.errors import SweepInputError
from penstock.machine.limits import usable_threads
from penstock.machine.sysfs import System


class Pool:
    """A fixed number of threads, optionally confined to given CPUs or to those nearest a node.

    Jobs run one after the other in the order they were started. Only an independent job (see
    `sweep.start`) may begin before the previous one has ended. With `nice` above 0 (up to 19),
    other threads get the CPU first, such as the one that launches GPU kernels. A thread cannot
    lower its own nice value again.
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
            raise SweepInputError("cpus", "and node cannot both be given; give one of them")
        if node is not None:
            cpus = System().nearest_cpus(node)
        usable = sorted(os.sched_getaffinity(0))
        self.cpus = tuple(usable if cpus is None else cpus)
        if not self.cpus or not set(self.cpus) <= set(usable):
            raise SweepInputError(
                "cpus", f"are {self.cpus}, but this process may only use {usable}"
            )
        self.nice = nice
        try:
            # An empty list does not confine the threads, so that they follow the process if its
            # affinity changes.
            confined_to = [] if cpus is None else list(self.cpus)
            self.native = _native.SweepPool(
                usable_threads(System(), len(self.cpus)) if threads is None else threads,
                confined_to,
                nice,
            )
        except (ValueError, TypeError) as error:
            raise SweepInputError("pool", f"cannot be created: {error}") from None

    @property
    def threads(self) -> int:
        """Number of threads."""
        return self.native.threads


_shared: list[Pool] = []
_lock = threading.Lock()


def default_pool() -> Pool:
    """Return the pool that the process shares, with a thread per CPU, created on first use."""
    with _lock:
        if not _shared:
            _shared.append(Pool())
        return _shared[0]


def _reset_after_fork() -> None:
    # A forked child inherits the object but not its threads. Leak it on purpose: joining threads
    # that do not exist would never return. The lock may have been held during the fork, too.
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _leaked.extend(_shared)
    _shared.clear()


_leaked: list[Pool] = []
os.register_at_fork(after_in_child=_reset_after_fork)
