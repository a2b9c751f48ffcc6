"""Memory nodes: read, write and copy rates, idle latency, copies between nodes. Room: measure."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from penstock import _native
from penstock.errors import ProbeError
from penstock.machine.machine import Figure, MemoryNode, MemoryOperation, MemoryRate, NodeCopy
from penstock.machine.sysfs import System
from penstock.memory.placement import Node
from penstock.memory.region import RegionOptions, allocate_region
from penstock.probe.measurement import Effort, Progress, take_rate, take_time
from penstock.units import MiB, format_bytes

OPERATIONS: tuple[MemoryOperation, ...] = ("read", "write", "copy")

UNIT = 1 * MiB
"""Passes are whole multiples of this."""

LEAST_BYTES = 8 * MiB
"""A node with less to spare is not measured."""

CHASE_BYTES = 512 * MiB
"""The most that a latency chase walks through."""

CHASE_HOPS = 1000
"""Hops of a chase are whole multiples of this."""


class Stretch(Protocol):
    """Memory to stream over and chase through. Seconds are for the whole call."""

    nbytes: int

    def room(self, operation: MemoryOperation) -> int: ...
    def stream(self, operation: MemoryOperation, nbytes: int, threads: int) -> float: ...
    def lay_chase(self, nbytes: int) -> float: ...
    def chase(self, hops: int) -> float: ...


class NodeStretch:
    """`nbytes` of one node; of a second too if there is a `target`, and copies then go to that."""

    def __init__(self, nbytes: int, node: int, cpus: Sequence[int], target: int | None = None):
        self.nbytes = nbytes
        self._cpus = list(cpus)
        self._source = allocate_region(nbytes, Node(node), RegionOptions())
        self._target = None
        if target is not None:
            self._target = allocate_region(nbytes, Node(target), RegionOptions())
        self._next = 0
        self._stop = 0

    def room(self, operation: MemoryOperation) -> int:
        """The longest pass there is room for: a copy within one node takes half of it each."""
        return self.nbytes // 2 if operation == "copy" and self._target is None else self.nbytes

    def stream(self, operation: MemoryOperation, nbytes: int, threads: int) -> float:
        """One pass over the next `nbytes`: it must not find the lines of the pass before."""
        source = target = self._source.address
        if self._target is not None:
            target = self._target.address
        elif operation == "copy":
            target += self.nbytes // 2
        offset = self._next if self._next + nbytes <= self.room(operation) else 0
        self._next = offset + nbytes
        op = getattr(_native.StreamOp, operation)
        (seconds,) = _native.stream(
            op, target + offset, source + offset, nbytes, threads, self._cpus, passes=1
        )
        return seconds

    def lay_chase(self, nbytes: int) -> float:
        start = time.perf_counter()
        _native.lay_chase(self._source.address, nbytes)
        self._stop = 0
        return time.perf_counter() - start

    def chase(self, hops: int) -> float:
        seconds, self._stop = _native.chase(self._source.address, self._stop, hops, self._cpus)
        return seconds


def thread_counts(num_cpus: int, *, quick: bool) -> tuple[int, ...]:
    """1, 2, 4 and so on up to all; quick: one, half and all."""
    if quick:
        return tuple(sorted({1, max(1, num_cpus // 2), num_cpus}))
    powers = {1 << k for k in range(num_cpus.bit_length())}
    return tuple(sorted({n for n in powers if n < num_cpus} | {num_cpus}))


def spare_bytes(node: int, most: int, system: System) -> int:
    """What may be taken of a node: a quarter of what is there, in whole huge pages."""
    spare = min(most, system.node_bytes(node).available // 4)
    if (limited := system.memory_limit()) is not None:
        spare = min(spare, limited[1] // 4)
    return spare // _native.UNIT_NBYTES * _native.UNIT_NBYTES


def fit(spare: int, effort: Effort, set_up: Callable[[int], float]) -> int:
    """As many bytes as `set_up` handles in its time, found by trying it on the least."""
    if spare < LEAST_BYTES:
        raise ProbeError(
            f"it takes {format_bytes(LEAST_BYTES)}, and a quarter of what is free is "
            f"{format_bytes(spare)}; free some memory and probe again"
        )
    seconds = max(set_up(LEAST_BYTES), 1e-9)
    fitting = int(LEAST_BYTES * effort.setup_seconds / seconds)
    return max(LEAST_BYTES, min(spare, fitting) // LEAST_BYTES * LEAST_BYTES)


def take_stretch(node: int, effort: Effort, system: System, target: int | None = None) -> Stretch:
    """As much of a node (or of two) as may be taken and can be had in time."""
    cpus = cpus_between(node, node if target is None else target, system)
    spare = spare_bytes(node, effort.host_bytes, system)
    if target is not None:
        spare = min(spare, spare_bytes(target, effort.host_bytes // 2, system))

    def set_up(nbytes: int) -> float:
        start = time.perf_counter()
        NodeStretch(nbytes, node, cpus, target)
        return time.perf_counter() - start

    return NodeStretch(fit(spare, effort, set_up), node, cpus, target)


def cpus_between(source: int, target: int, system: System) -> tuple[int, ...]:
    """Where a copy runs: at its source, unless only its target has processors."""
    nodes_with_cpus = [n for n in (source, target) if system.node_cpus(n)]
    return system.nearest_cpus(nodes_with_cpus[0] if nodes_with_cpus else source)


def probe_node(
    node: MemoryNode,
    stretch: Stretch,
    threads: Sequence[int],
    effort: Effort,
    progress: Progress,
) -> MemoryNode:
    """The node with its rates and latency filled in."""
    rates = []
    for operation in OPERATIONS:
        for count in threads:
            what = f"node {node.id}: {operation}, {_threads(count)}"
            take = partial(_stream_rate, stretch, operation, count, effort)
            if (rate := progress.take(what, take)) is not None:
                rates.append(MemoryRate(operation=operation, threads=count, bytes_per_second=rate))
    latency = progress.take(f"node {node.id}: latency", partial(_latency, stretch, effort))
    return dataclasses.replace(node, rates=tuple(rates), latency=latency)


def probe_copy(
    pair: tuple[int, int], stretch: Stretch, threads: int, effort: Effort, progress: Progress
) -> NodeCopy | None:
    """The copy from the first node to the second."""
    source, target = pair
    what = f"node {source} to node {target}: copy, {_threads(threads)}"
    rate = progress.take(what, partial(_stream_rate, stretch, "copy", threads, effort))
    if rate is None:
        return None
    return NodeCopy(source=source, target=target, threads=threads, bytes_per_second=rate)


def _stream_rate(
    stretch: Stretch, operation: MemoryOperation, threads: int, effort: Effort
) -> Figure:
    def run(nbytes: int) -> float:
        return stretch.stream(operation, nbytes, threads)

    return take_rate(run, effort, unit=UNIT, most=stretch.room(operation))


def _latency(stretch: Stretch, effort: Effort) -> Figure:
    nbytes = fit(min(stretch.nbytes, CHASE_BYTES), effort, stretch.lay_chase)
    stretch.lay_chase(nbytes)
    # Once around at most: a second lap would find in the cache what the first one left there.
    laps = (effort.samples_most + 2) * CHASE_HOPS
    most = nbytes // _native.CHASE_STEP_NBYTES // laps * CHASE_HOPS
    return take_time(stretch.chase, effort, unit=CHASE_HOPS, most=most)


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count != 1 else ''}"
