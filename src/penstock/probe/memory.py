"""Measure memory nodes: read, write and copy rates, idle latency, and copies between nodes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from penstock import _native
from penstock.errors import ProbeError
from penstock.machine.limits import host_memory
from penstock.machine.machine import Figure, MemoryNode, MemoryOperation, MemoryRate, NodeCopy
from penstock.machine.sysfs import System
from penstock.memory.placement import Node
from penstock.memory.region import RegionOptions, allocate_region
from penstock.probe.measurement import Effort, Progress, measure_rate, measure_time
from penstock.units import MiB, format_bytes

OPERATIONS: tuple[MemoryOperation, ...] = ("read", "write", "copy")

UNIT = 1 * MiB
"""Size of a pass in bytes is a multiple of this."""

MIN_BYTES = 8 * MiB
"""Minimum buffer. A node that can spare less is not measured."""

CHASE_BYTES = 512 * MiB
"""Maximum memory that the latency measurement walks through."""

CHASE_HOPS = 1000
"""Number of dependent loads in a latency run is a multiple of this."""


class MemoryBuffer(Protocol):
    """Memory to measure. The methods return the seconds of the complete call."""

    nbytes: int

    def max_nbytes(self, operation: MemoryOperation) -> int: ...
    def stream(self, operation: MemoryOperation, nbytes: int, threads: int) -> float: ...
    def prepare_chase(self, nbytes: int) -> float: ...
    def chase(self, hops: int) -> float: ...


class NodeBuffer:
    """`nbytes` of memory on one node. With a `target`, also on that node, and copies go there."""

    def __init__(self, nbytes: int, node: int, cpus: Sequence[int], target: int | None = None):
        self.nbytes = nbytes
        self._cpus = list(cpus)
        self._source = allocate_region(nbytes, Node(node), RegionOptions())
        self._target = None
        if target is not None:
            self._target = allocate_region(nbytes, Node(target), RegionOptions())
        self._next = 0
        self._stop = 0

    def max_nbytes(self, operation: MemoryOperation) -> int:
        """Return the maximum size of a pass. A copy within one node uses half for each side."""
        return self.nbytes // 2 if operation == "copy" and self._target is None else self.nbytes

    def stream(self, operation: MemoryOperation, nbytes: int, threads: int) -> float:
        """Make one pass over the next `nbytes`, and return the seconds it took.

        Each pass continues where the last one ended, so that it does not find its cache lines.
        """
        source = target = self._source.address
        if self._target is not None:
            target = self._target.address
        elif operation == "copy":
            target += self.nbytes // 2
        offset = self._next if self._next + nbytes <= self.max_nbytes(operation) else 0
        self._next = offset + nbytes
        op = getattr(_native.StreamOp, operation)
        (seconds,) = _native.stream(
            op, target + offset, source + offset, nbytes, threads, self._cpus, passes=1
        )
        return seconds

    def prepare_chase(self, nbytes: int) -> float:
        """Write a random cycle of pointers for `chase` to follow."""
        start = time.perf_counter()
        _native.lay_chase(self._source.address, nbytes)
        self._stop = 0
        return time.perf_counter() - start

    def chase(self, hops: int) -> float:
        """Follow `hops` pointers from where the last call stopped."""
        seconds, self._stop = _native.chase(self._source.address, self._stop, hops, self._cpus)
        return seconds


def thread_counts(num_cpus: int, *, quick: bool) -> tuple[int, ...]:
    """Return the thread counts to measure: 1, 2, 4 and so on up to all; quick: one, half, all."""
    if quick:
        return tuple(sorted({1, max(1, num_cpus // 2), num_cpus}))
    powers = {1 << k for k in range(num_cpus.bit_length())}
    return tuple(sorted({n for n in powers if n < num_cpus} | {num_cpus}))


def spare_bytes(node: int, limit: int, system: System) -> int:
    """Return the memory to use on a node: at most a quarter of the available, in huge pages."""
    spare = min(limit, system.node_bytes(node).available // 4)
    spare = min(spare, host_memory(system).free // 4)
    return spare // _native.UNIT_NBYTES * _native.UNIT_NBYTES


def fit_buffer(spare: int, effort: Effort, set_up: Callable[[int], float]) -> int:
    """Return the bytes that `set_up` can handle in its time, from a trial with the minimum."""
    if spare < MIN_BYTES:
        raise ProbeError(
            f"it needs {format_bytes(MIN_BYTES)}, and a quarter of the free memory is "
            f"{format_bytes(spare)}; free some memory and probe again"
        )
    seconds = max(set_up(MIN_BYTES), 1e-9)
    fitting = int(MIN_BYTES * effort.setup_seconds / seconds)
    return max(MIN_BYTES, min(spare, fitting) // MIN_BYTES * MIN_BYTES)


def allocate_buffer(
    node: int, effort: Effort, system: System, target: int | None = None
) -> MemoryBuffer:
    """Allocate as much memory on a node (or two) as the limits and the time allow."""
    cpus = cpus_between(node, node if target is None else target, system)
    spare = spare_bytes(node, effort.host_bytes, system)
    if target is not None:
        spare = min(spare, spare_bytes(target, effort.host_bytes // 2, system))

    def set_up(nbytes: int) -> float:
        start = time.perf_counter()
        NodeBuffer(nbytes, node, cpus, target)
        return time.perf_counter() - start

    return NodeBuffer(fit_buffer(spare, effort, set_up), node, cpus, target)


def cpus_between(source: int, target: int, system: System) -> tuple[int, ...]:
    """Return the CPUs that copy: those of the source, unless only the target has CPUs."""
    nodes_with_cpus = [n for n in (source, target) if system.node_cpus(n)]
    return system.nearest_cpus(nodes_with_cpus[0] if nodes_with_cpus else source)


def probe_node(
    node: MemoryNode,
    buffer: MemoryBuffer,
    threads: Sequence[int],
    effort: Effort,
    progress: Progress,
) -> MemoryNode:
    """Return the node with its measured rates and latency."""
    rates = []
    for operation in OPERATIONS:
        for count in threads:
            what = f"node {node.id}: {operation}, {_threads(count)}"
            measure = partial(_stream_rate, buffer, operation, count, effort)
            if (rate := progress.measure(what, measure)) is not None:
                rates.append(MemoryRate(operation=operation, threads=count, bytes_per_second=rate))
    latency = progress.measure(f"node {node.id}: latency", partial(_latency, buffer, effort))
    return dataclasses.replace(node, rates=tuple(rates), latency=latency)


def probe_copy(
    pair: tuple[int, int], buffer: MemoryBuffer, threads: int, effort: Effort, progress: Progress
) -> NodeCopy | None:
    """Measure copies from the first node to the second; None if that failed."""
    source, target = pair
    what = f"node {source} to node {target}: copy, {_threads(threads)}"
    rate = progress.measure(what, partial(_stream_rate, buffer, "copy", threads, effort))
    if rate is None:
        return None
    return NodeCopy(source=source, target=target, threads=threads, bytes_per_second=rate)


def _stream_rate(
    buffer: MemoryBuffer, operation: MemoryOperation, threads: int, effort: Effort
) -> Figure:
    def run(nbytes: int) -> float:
        return buffer.stream(operation, nbytes, threads)

    return measure_rate(run, effort, unit=UNIT, limit=buffer.max_nbytes(operation))


def _latency(buffer: MemoryBuffer, effort: Effort) -> Figure:
    nbytes = fit_buffer(min(buffer.nbytes, CHASE_BYTES), effort, buffer.prepare_chase)
    buffer.prepare_chase(nbytes)
    # Go around the cycle at most once in all runs: a second lap would hit in the cache.
    laps = (effort.max_samples + 2) * CHASE_HOPS
    limit = nbytes // _native.CHASE_STEP_NBYTES // laps * CHASE_HOPS
    return measure_time(buffer.chase, effort, unit=CHASE_HOPS, limit=limit)


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count != 1 else ''}"
