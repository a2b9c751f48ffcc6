"""Allocate and pin the host memory of a plan in a thread of its own.

Touching and pinning 100 GB takes many seconds, and needs neither the device nor the interpreter. So
it runs while layers are compiled (`HostArenas.start`) and while weights are read
(`HostArenas.start_pinning`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import torch

from penstock.engine.device import Device
from penstock.memory.arena import Arena
from penstock.memory.placement import Node, Place, Stripe
from penstock.plan.placement import STRIPE_UNIT, Home
from penstock.plan.plan import Plan
from penstock.roles import Role

NICE = 10
"""Niceness of the threads that allocate and pin."""

Key = tuple[int, Role]
"""A block and a role."""


class ArenaSpec(NamedTuple):
    """An arena of a plan."""

    place: Place
    shared: bool
    """Whether other ranks map it."""
    members: tuple[tuple[Key, Home], ...]
    """What is in it."""

    @property
    def nbytes(self) -> int:
        return sum(home.nbytes for _, home in self.members)


def arena_specs(plan: Plan, *, shares_weights: bool = False) -> list[ArenaSpec]:
    """List one arena per memory node, and one for every striped home.

    A stripe distributes pages from the start of its range, so it cannot share an arena. Weights
    that other ranks read have an arena of their own, which all ranks map.
    """
    striped: list[ArenaSpec] = []
    by_node: dict[tuple[int, bool], list[tuple[Key, Home]]] = {}
    for key, home in homes(plan):
        nodes = [share.node for share in home.shares if share.node is not None]
        shared = shares_weights and key[1] is Role.WEIGHT
        if len(nodes) > 1:
            striped.append(ArenaSpec(_stripe(home), shared, ((key, home),)))
        elif nodes:
            by_node.setdefault((nodes[0], shared), []).append((key, home))
    return striped + [
        ArenaSpec(Node(node), shared, tuple(members)) for (node, shared), members in by_node.items()
    ]


def homes(plan: Plan) -> Iterator[tuple[Key, Home]]:
    """Yield every home that takes memory or disk space of its own."""
    overlaid = plan.overlaid_activations()
    for index, block in enumerate(plan.placement.blocks):
        for home in block.homes:
            if home.nbytes and (index, home.role) not in overlaid:
                yield (index, home.role), home


def allocate_arena(spec: ArenaSpec, *, pinned: bool) -> Arena:
    """Allocate an arena, and touch all its pages."""
    if spec.shared:
        return Arena.shared(spec.nbytes, spec.place, pinned)
    return Arena(spec.nbytes, spec.place, pinned)


class HostArenas:
    """The arenas of one engine, allocated and pinned while other work runs.

    At the end of the `with` block, no thread runs, and arenas that nobody has taken are released.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._specs: list[ArenaSpec] = []
        self._arenas: list[Arena] = []
        self._allocation = _Work("penstock host memory")
        self._pinning = _Work("penstock pinning")
        self._pins = False

    def start(self, specs: Sequence[ArenaSpec]) -> None:
        """Start to allocate arenas, one after the other, in another thread."""
        self._specs = list(specs)
        self._allocation.start(self._allocate)

    def wait(self) -> int:
        """Wait for what was started, and return its size in bytes.

        Raises what went wrong in the other thread.
        """
        self._allocation.wait()
        return sum(arena.stats.capacity for arena in self._arenas)

    def take(self, specs: Sequence[ArenaSpec]) -> list[Arena]:
        """Return the arenas, not pinned yet; allocate them now if others, or none, were started.

        Raises what went wrong in the other thread.
        """
        if self._specs != list(specs):
            self.release()
            self._specs = list(specs)
            self._allocate()
        self.wait()
        return list(self._arenas)

    def start_pinning(self) -> None:
        """Start to pin the arenas in another thread. Their memory may be used meanwhile.

        Does nothing if this was started before, or if the device needs no pinned memory.
        """
        if self._device.pinned and not self._pins:
            self._pins = True
            self._pinning.start(self._pin)

    def wait_until_pinned(self) -> None:
        """Block until the arenas are pinned. Raises what went wrong in the other thread."""
        self._pinning.wait()

    def release(self) -> None:
        """Stop, and release the arenas. Waits for the threads, even through Ctrl-C."""
        try:
            try:
                self._allocation.stop()
            finally:
                self._pinning.stop()
        finally:
            self._specs, self._arenas, self._pins = [], [], False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.release()

    def _allocate(self) -> None:
        self._arenas = []
        for spec in self._specs:
            if self._allocation.stopped:
                return
            self._arenas.append(allocate_arena(spec, pinned=False))

    def _pin(self) -> None:
        where = self._device.torch_device
        # The registration belongs to the context of the thread's current device.
        on_gpu = torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext()
        with on_gpu:
            for arena in self._arenas:
                if self._pinning.stopped:
                    return
                arena.pin()


class _Work:
    """A call in a thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.stopped = False
        """Whether the call should end early."""

    def start(self, call: Callable[[], None]) -> None:
        def run() -> None:
            # Threads that touch pages are children of this one, and have its priority. There are as
            # many as CPUs, and the main thread, which compiles or launches kernels, goes first.
            with contextlib.suppress(OSError):
                nice = max(NICE, os.getpriority(os.PRIO_PROCESS, 0))
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
            try:
                call()
            except BaseException as error:
                self._error = error

        self.stopped, self._error = False, None
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the call, if there is one, and raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def stop(self) -> None:
        """Wait for the call, and ignore what it raises."""
        self.stopped = True
        interrupt: KeyboardInterrupt | None = None
        while self._thread is not None:
            try:
                self._thread.join()
                self._thread = None
            except KeyboardInterrupt as pressed:
                interrupt = pressed
        self.stopped, self._error = False, None
        if interrupt is not None:
            raise interrupt


def _stripe(home: Home) -> Stripe:
    """Return a stripe with weights in whole units per node.

    Weights of more than 1000 units in total are scaled down to about 1000.
    """
    units = {s.node: -(-s.nbytes // STRIPE_UNIT) for s in home.shares if s.node is not None}
    scale = max(1.0, sum(units.values()) / 1000)
    return Stripe({node: max(1, round(count / scale)) for node, count in units.items()})
