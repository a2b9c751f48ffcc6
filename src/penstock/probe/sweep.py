"""Measure the optimizer sweep on a memory node: by moment format, size and threads.

torch is imported only when it is needed.
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
from penstock.probe.measurement import Effort, Progress, collect_samples, figure
from penstock.units import GiB, format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.optim.thread_pool import Pool

MOMENTS: tuple[SweepMoments, ...] = ("fp32", "bf16", "int8")

STATE_BYTES: dict[SweepMoments, float] = {"fp32": 14.0, "bf16": 10.0, "int8": 8.0 + 4 / 256}
"""Bytes per parameter with its gradient. `optim.sweep_benchmark.TRAFFIC` has a step's traffic."""

SIZES = (10**6, 4 * 10**6, 16 * 10**6, 64 * 10**6, 256 * 10**6, 10**9)
"""Parameters per pass. Short passes look too fast because of caches and queues, mostly on CXL."""

THREADS_SIZE = 64 * 10**6
"""Maximum size for comparing thread counts; a quick probe uses a quarter of it."""

MAX_BYTES = 16 * GiB
"""Maximum memory of a full probe, if a quarter of the available memory is that much."""

TRIAL_SIZE = 1 << 16
"""Parameters of the first trial, which predicts the duration of longer passes. It is no figure."""

QUICK_SLICES, FULL_SLICES = 20, 40
"""Time limit of one size in slices, from allocating its memory to its last sample."""


@dataclass(frozen=True, slots=True)
class SweepPass:
    """A figure to measure: a number of parameters and of threads."""

    parameters: int
    """Number of parameters updated in one pass."""

    threads: int
    """Number of threads."""

    def __str__(self) -> str:
        plural = "s" if self.threads != 1 else ""
        return f"{self.parameters // 10**6} M parameters, {self.threads} thread{plural}"


class SweepBuffers(Protocol):
    """Weights, gradients and optimizer states of one format on a node, ready to be updated."""

    traffic: float
    """Bytes read and written per parameter."""

    def seconds(self, parameters: int, threads: int) -> float: ...


class NodeSweepBuffers:
    """`parameters` parameters of one format on one node."""

    def __init__(
        self, node: int, moments: SweepMoments, parameters: int, cpus: Sequence[int]
    ) -> None:
        from penstock.optim.sweep_benchmark import TRAFFIC, SweepBuffers

        self.traffic = TRAFFIC[moments]
        self._buffers = SweepBuffers(parameters, moments, Node(node))
        self._cpus, self._pools, self._next = cpus, dict[int, "Pool"](), 0

    def seconds(self, parameters: int, threads: int) -> float:
        """Update the next `parameters` parameters and return the seconds it took.

        Each pass continues where the last one ended, so that it finds nothing in the caches.
        """
        from penstock.optim.sweep import LEAF, Pool

        if threads not in self._pools:
            self._pools[threads] = Pool(threads, cpus=self._cpus)
        at = self._next if self._next + parameters <= self._buffers.numel else 0
        self._next = -(-(at + parameters) // LEAF) * LEAF
        return self._buffers.step(self._pools[threads], at=at, numel=parameters)


def max_bytes(effort: Effort, *, quick: bool) -> int:
    """Return the memory that sweeps may use, before the limits of a node."""
    return effort.host_bytes if quick else max(effort.host_bytes, MAX_BYTES)


def plan(
    moments: SweepMoments, spare: int, threads: Sequence[int], *, quick: bool
) -> list[SweepPass]:
    """Return the passes to measure: every size that fits with all threads, one size with fewer.

    A quick probe measures one size with all threads.
    """
    sizes = [size for size in SIZES if size * STATE_BYTES[moments] <= spare]
    all_threads = max(threads)
    if quick:
        return [SweepPass(size, all_threads) for size in sizes if size <= THREADS_SIZE // 4][-1:]
    middle = [size for size in sizes if size <= THREADS_SIZE][-1:]
    return [
        *(SweepPass(size, count) for size in middle for count in threads if count != all_threads),
        *(SweepPass(size, all_threads) for size in sizes),
    ]


def allocate_buffers(
    node: int,
    moments: SweepMoments,
    passes: Sequence[SweepPass],
    effort: Effort,
    cpus: Sequence[int],
    *,
    quick: bool,
) -> tuple[SweepBuffers, int]:
    """Allocate buffers for the largest pass that fits in its time, and return their size."""
    from penstock.optim import sweep_benchmark  # noqa: F401  # import torch before the first trial is timed

    def create(parameters: int) -> SweepBuffers:
        return NodeSweepBuffers(node, moments, parameters, cpus)

    return find_largest(passes, effort, create, quick=quick)


def find_largest(
    passes: Sequence[SweepPass],
    effort: Effort,
    create: Callable[[int], SweepBuffers],
    clock: Callable[[], float] = time.perf_counter,
    *,
    quick: bool,
) -> tuple[SweepBuffers, int]:
    """Find the largest size that can be allocated and updated in time; return buffers and size."""
    if not passes:
        raise ProbeError(
            f"it needs {format_bytes(int(SIZES[0] * STATE_BYTES['fp32']))}, and a quarter of the "
            f"free memory is less; free some memory and probe again"
        )
    largest = max(sweep_pass.parameters for sweep_pass in passes)
    threads = max(sweep_pass.threads for sweep_pass in passes)
    sizes = [s for s in SIZES if s <= largest]
    allowed = (QUICK_SLICES if quick else FULL_SLICES) * effort.slice_seconds
    size = TRIAL_SIZE
    while True:
        start = clock()
        buffers = create(size)
        took = clock() - start + effort.min_runs * buffers.seconds(size, threads)
        in_time = size * allowed / max(took, 1e-9)
        # A short pass says little about a long one, so increase the size in steps.
        fitting = [s for s in sizes if s <= max(size, min(in_time, 16 * size))]
        if not fitting:
            raise _too_slow(sizes[0], took * sizes[0] / size, allowed)
        if max(fitting) == size:
            return buffers, size
        del buffers
        size = max(fitting)


def _too_slow(parameters: int, seconds: float, allowed: float) -> ProbeError:
    return ProbeError(
        f"{parameters // 10**6} M parameters would take about {format_seconds(seconds)}, longer "
        f"than the {format_seconds(allowed)} allowed; plans estimate the optimizer sweep from the "
        f"node's read and write rates"
    )


def limit_passes(passes: Sequence[SweepPass], capacity: int) -> list[SweepPass]:
    """Limit passes to the size of the buffers. A quick probe measures a size that fits its time."""
    return [
        replace(sweep_pass, parameters=min(sweep_pass.parameters, capacity))
        for sweep_pass in passes
    ]


def probe_sweeps(
    node: int,
    moments: SweepMoments,
    passes: Sequence[SweepPass],
    buffers: tuple[SweepBuffers, int],
    effort: Effort,
    progress: Progress,
) -> Iterator[MemoryRate]:
    """Yield the rates of the passes that fit in the buffers."""
    for sweep_pass in passes:
        what = f"node {node}: sweep, {moments} moments, {sweep_pass}"
        rate = progress.measure(what, partial(_rate, *buffers, sweep_pass, effort))
        if rate is not None:
            yield MemoryRate(
                operation="sweep",
                threads=sweep_pass.threads,
                moments=moments,
                parameters=sweep_pass.parameters,
                bytes_per_second=rate,
            )


def _rate(buffers: SweepBuffers, capacity: int, sweep_pass: SweepPass, effort: Effort) -> Figure:
    size = sweep_pass.parameters
    if size > capacity:
        raise ProbeError(f"time only allowed for {capacity // 10**6} M")

    def run(parameters: int) -> float:
        return buffers.seconds(parameters, sweep_pass.threads)

    _, seconds = collect_samples(run, effort, unit=size, limit=size)
    return figure([size * buffers.traffic / s for s in seconds])
