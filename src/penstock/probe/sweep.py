"""The optimizer's own rate over a memory node: by format, parameters and threads. Room: measure.

torch is imported where it is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ProbeError
from penstock.machine.machine import Figure, MemoryRate, SweepMoments
from penstock.memory.placement import Node
from penstock.probe.measurement import Effort, Progress, figure, take_samples
from penstock.units import GiB, format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.optim.threads import Pool

MOMENTS: tuple[SweepMoments, ...] = ("fp32", "bf16", "int8")

HELD_BYTES: dict[SweepMoments, float] = {"fp32": 14.0, "bf16": 10.0, "int8": 8.0 + 4 / 256}
"""A parameter's, with its gradient. What one step moves of them is `optim.rate.TRAFFIC`."""

SIZES = (10**6, 4 * 10**6, 16 * 10**6, 64 * 10**6, 256 * 10**6, 10**9)
"""Parameters of one pass. Caches and queues flatter the short ones, on CXL above all."""

MIDDLE = 64 * 10**6
"""At most, where only threads are compared, and in a quick probe a quarter of it."""

MOST_BYTES = 16 * GiB
"""Held by a full probe, if a quarter of what is available is as much."""

TRIAL = 1 << 16
"""Parameters of the first try, which says what longer ones will take: no size, and in no figure."""

QUICK_SLICES, FULL_SLICES = 20, 40
"""The most that one size may take, from giving it pages and numbers to its last sample."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One figure to take."""

    parameters: int
    threads: int

    def __str__(self) -> str:
        plural = "s" if self.threads != 1 else ""
        return f"{self.parameters // 10**6} M parameters, {self.threads} thread{plural}"


class Bed(Protocol):
    """A node's memory that holds one format's state, ready to be stepped."""

    traffic: float
    """Bytes read and written for each parameter."""

    def seconds(self, parameters: int, threads: int) -> float: ...


class NodeBed:
    """`parameters` of one format on one node."""

    def __init__(
        self, node: int, moments: SweepMoments, parameters: int, cpus: Sequence[int]
    ) -> None:
        from penstock.optim.sweep_rate import TRAFFIC, Bed

        self.traffic = TRAFFIC[moments]
        self._bed = Bed(parameters, moments, Node(node))
        self._cpus, self._pools, self._next = cpus, dict[int, "Pool"](), 0

    def seconds(self, parameters: int, threads: int) -> float:
        """One step of the next ones: it must not find in the cache what the last one left."""
        from penstock.optim.sweep import LEAF, Pool

        if threads not in self._pools:
            self._pools[threads] = Pool(threads, cpus=self._cpus)
        at = self._next if self._next + parameters <= self._bed.numel else 0
        self._next = -(-(at + parameters) // LEAF) * LEAF
        return self._bed.step(self._pools[threads], at=at, numel=parameters)


def most_bytes(effort: Effort, *, quick: bool) -> int:
    """What sweeps may hold, before a node has its say."""
    return effort.host_bytes if quick else max(effort.host_bytes, MOST_BYTES)


def plan(moments: SweepMoments, spare: int, threads: Sequence[int], *, quick: bool) -> list[Pass]:
    """All sizes there is room for with all threads, and one of them with fewer; quick: one size."""
    sizes = [size for size in SIZES if size * HELD_BYTES[moments] <= spare]
    most = max(threads)
    if quick:
        return [Pass(size, most) for size in sizes if size <= MIDDLE // 4][-1:]
    middle = [size for size in sizes if size <= MIDDLE][-1:]
    return [
        *(Pass(size, count) for size in middle for count in threads if count != most),
        *(Pass(size, most) for size in sizes),
    ]


def take_bed(
    node: int,
    moments: SweepMoments,
    wanted: Sequence[Pass],
    effort: Effort,
    cpus: Sequence[int],
    *,
    quick: bool,
) -> tuple[Bed, int]:
    """A bed for the largest pass, or for the largest that can be had in time, and how large."""
    from penstock.optim import sweep_rate  # noqa: F401  # torch with it, whose import is no part of a try

    def make(parameters: int) -> Bed:
        return NodeBed(node, moments, parameters, cpus)

    return fit(wanted, effort, make, quick=quick)


def fit(
    wanted: Sequence[Pass],
    effort: Effort,
    make: Callable[[int], Bed],
    clock: Callable[[], float] = time.perf_counter,
    *,
    quick: bool,
) -> tuple[Bed, int]:
    """The largest one wanted that can be made and stepped in time, and its parameters."""
    if not wanted:
        raise ProbeError(
            f"it takes {format_bytes(int(SIZES[0] * HELD_BYTES['fp32']))}, and a quarter of what "
            f"is free is less; free some memory and probe again"
        )
    most, threads = max(one.parameters for one in wanted), max(one.threads for one in wanted)
    sizes = [s for s in SIZES if s <= most]
    allowed = (QUICK_SLICES if quick else FULL_SLICES) * effort.slice_seconds
    size = TRIAL
    while True:
        begin = clock()
        bed = make(size)
        took = clock() - begin + effort.runs_least * bed.seconds(size, threads)
        in_time = size * allowed / max(took, 1e-9)
        # A short one says little about a long one, so it grows by steps.
        fitting = [s for s in sizes if s <= max(size, min(in_time, 16 * size))]
        if not fitting:
            raise _too_slow(sizes[0], took * sizes[0] / size, allowed)
        if max(fitting) == size:
            return bed, size
        del bed
        size = max(fitting)


def _too_slow(parameters: int, seconds: float, allowed: float) -> ProbeError:
    return ProbeError(
        f"{parameters // 10**6} M parameters would take about {format_seconds(seconds)}, and may "
        f"take {format_seconds(allowed)}; plans derive the sweep from the node's reads and writes"
    )


def within(wanted: Sequence[Pass], room: int) -> list[Pass]:
    """What a quick probe steps: one size whatever the time, so no more than the bed has."""
    return [replace(one, parameters=min(one.parameters, room)) for one in wanted]


def probe_sweeps(
    node: int,
    moments: SweepMoments,
    wanted: Sequence[Pass],
    bed: tuple[Bed, int],
    effort: Effort,
    progress: Progress,
) -> Iterator[MemoryRate]:
    """The rates of those passes that the bed has room for."""
    for one in wanted:
        what = f"node {node}: sweep, {moments} moments, {one}"
        rate = progress.take(what, partial(_rate, *bed, one, effort))
        if rate is not None:
            yield MemoryRate(
                operation="sweep",
                threads=one.threads,
                moments=moments,
                parameters=one.parameters,
                bytes_per_second=rate,
            )


def _rate(bed: Bed, room: int, one: Pass, effort: Effort) -> Figure:
    size = one.parameters
    if size > room:
        raise ProbeError(f"there was time for {room // 10**6} M")

    def run(parameters: int) -> float:
        return bed.seconds(parameters, one.threads)

    _, seconds = take_samples(run, effort, unit=size, most=size)
    return figure([size * bed.traffic / s for s in seconds])
