"""Run a probe: decide what to measure, in which order, and in how much time."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path

from penstock import _native
from penstock.errors import ProbeError
from penstock.machine.discovery import discover
from penstock.machine.machine import (
    Gpu,
    GpuLink,
    Machine,
    MemoryNode,
    NodeCopy,
    StoragePath,
    SweepMoments,
    Transfer,
)
from penstock.machine.sysfs import System
from penstock.probe import compute, copies, memory, peers, process, shared, storage, sweep
from penstock.probe.measurement import Effort, OnProgress, Progress
from penstock.units import GiB, MiB

QUICK_SECONDS = 11.0
"""Time for all figures of a quick probe, in addition to setup."""

OVERHEAD = 1.6
"""Time a figure takes relative to its slice, because of choosing the length of a run and warming
up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """Options of a probe."""

    quick: bool = False
    """Whether to measure fewer thread counts, sizes and depths, with less time for each."""

    storage: tuple[Path, ...] = ()
    """Directories to measure storage in. If empty, storage is not measured."""

    nodes: tuple[int, ...] | None = None
    """Memory nodes to measure; None means every node that this process may use."""

    gpus: bool = True
    """Whether to measure the GPUs: their compute and copies to and from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The measured machine, and what could not be measured."""

    machine: Machine
    """This machine with its measured rates."""

    notes: tuple[str, ...]
    """Sentences about figures that are missing or need care."""

    seconds: float
    """Duration of the probe."""


def probe(
    options: ProbeOptions, on_progress: OnProgress | None = None, system: System | None = None
) -> ProbeResult:
    """Measure this machine.

    No file, thread or memory is left behind, even after Ctrl-C.
    """
    start = time.monotonic()
    try:
        _native.isa_name()
    except ValueError as error:  # an unknown PENSTOCK_ISA, with which nothing can be measured
        raise ProbeError(str(error)) from None
    system = system or System()
    session = Session(discover(system, options.storage), options, system)
    machine, notes = session.run(on_progress)
    return ProbeResult(machine=machine, notes=notes, seconds=time.monotonic() - start)


def choose_effort(num_figures: int, *, quick: bool) -> Effort:
    """Return the time and memory for each figure. A quick probe shares its time among them."""
    if not quick:
        return Effort(slice_seconds=0.5, host_bytes=2 * GiB)
    slice_seconds = QUICK_SECONDS / OVERHEAD / max(1, num_figures)
    return Effort(slice_seconds=min(0.3, max(0.02, slice_seconds)), host_bytes=512 * MiB)


class Session:
    """The work of one probe. The list of figures is complete before the first is measured."""

    def __init__(self, machine: Machine, options: ProbeOptions, system: System) -> None:
        self._machine, self._options, self._system = machine, options, system
        # A node we may use can be missing from the machine: GPU memory is not a memory node.
        allowed = [n.id for n in machine.nodes if n.id in system.allowed_nodes()]
        chosen = allowed if options.nodes is None else options.nodes
        self._nodes = tuple(machine.node(id) for id in chosen)  # raises for an unknown node
        self._pairs = tuple(permutations([node.id for node in self._nodes], 2))
        self._requests = storage.requests(quick=options.quick)
        indices = [g.index for g in machine.gpus] if options.gpus else []
        self._groups = copies.plan(indices, self.effort(1).host_bytes, quick=options.quick)
        self._links = machine.gpu_links if options.gpus else ()
        self._sweeps = {node.id: self._plan_sweeps(node.id) for node in self._nodes}

    def effort(self, num_figures: int) -> Effort:
        """Return the time and memory for each figure, if there are `num_figures`."""
        return choose_effort(num_figures, quick=self._options.quick)

    @property
    def num_figures(self) -> int:
        """Number of figures that the probe measures."""
        nodes = sum(len(self._threads(n.id)) * len(memory.OPERATIONS) + 1 for n in self._nodes)
        nodes += sum(len(passes) for of in self._sweeps.values() for passes in of.values())
        transfers = sum(map(len, self._groups)) * len(self._nodes)
        transfers += len(self._nodes) if self._groups else 0  # copies during a sweep
        requests = len(self._requests) * len(self._machine.storage)
        figures = nodes + len(self._pairs) + transfers + self._num_gpu_figures + requests
        figures += peers.figures(self._links)
        return figures + 1  # the memory of a process

    @property
    def _num_gpu_figures(self) -> int:
        each = len(compute.figures(quick=self._options.quick))
        return each * len(self._machine.gpus) if self._options.gpus else 0

    def run(self, on_progress: OnProgress | None = None) -> tuple[Machine, tuple[str, ...]]:
        """Measure everything. Returns the machine with its rates, and the notes."""
        total = self.num_figures
        effort, progress = self.effort(total), Progress(total, on_progress)
        measured = {node.id: self._probe_node(node, effort, progress) for node in self._nodes}
        for id, node in measured.items():
            node = self._probe_sweeps(node, effort, progress)
            measured[id] = self._probe_shared(node, effort, progress) if self._groups else node
        machine = dataclasses.replace(
            self._machine,
            nodes=tuple(measured.get(node.id, node) for node in self._machine.nodes),
            node_copies=self._probe_copies(effort, progress),
            transfers=self._probe_gpus(effort, progress),
            gpu_links=self._probe_links(effort, progress),
            gpus=self._probe_compute(effort, progress),
            storage=self._probe_storage(effort, progress),
            process_memory=self._probe_process(progress),
        )
        progress.report("done")
        return machine, tuple(progress.notes)

    def _threads(self, node: int) -> tuple[int, ...]:
        num_cpus = len(self._system.nearest_cpus(node))
        return memory.thread_counts(num_cpus, quick=self._options.quick)

    def _probe_node(self, node: MemoryNode, effort: Effort, progress: Progress) -> MemoryNode:
        threads = self._threads(node.id)
        create = partial(memory.allocate_buffer, node.id, effort, self._system)
        figures = len(memory.OPERATIONS) * len(threads) + 1
        buffer = progress.attempt(f"node {node.id}", create, figures=figures)
        if buffer is None:
            return node
        return memory.probe_node(node, buffer, threads, effort, progress)

    def _plan_sweeps(self, node: int) -> dict[SweepMoments, list[sweep.SweepPass]]:
        quick = self._options.quick
        limit = sweep.max_bytes(self.effort(1), quick=quick)
        spare, threads = memory.spare_bytes(node, limit, self._system), self._threads(node)
        return {of: sweep.plan(of, spare, threads, quick=quick) for of in sweep.MOMENTS}

    def _probe_sweeps(self, node: MemoryNode, effort: Effort, progress: Progress) -> MemoryNode:
        cpus, rates = self._system.nearest_cpus(node.id), list(node.rates)
        quick = self._options.quick
        for moments, passes in self._sweeps[node.id].items():
            what = f"node {node.id}: sweep, {moments} moments"
            progress.report(what)
            create = partial(
                sweep.allocate_buffers, node.id, moments, passes, effort, cpus, quick=quick
            )
            buffers = progress.attempt(what, create, figures=len(passes))
            if buffers is not None:
                passes = sweep.limit_passes(passes, buffers[1]) if quick else passes
                rates += sweep.probe_sweeps(node.id, moments, passes, buffers, effort, progress)
            del buffers  # free the memory before the next format allocates its own
        return dataclasses.replace(node, rates=tuple(rates))

    def _probe_shared(self, node: MemoryNode, effort: Effort, progress: Progress) -> MemoryNode:
        """Measure a sweep on a node while the first GPU copies to and from it."""
        what, gpu = f"node {node.id}: sweep and copies", self._groups[0][0].gpus[0]
        progress.report(what)
        both = progress.attempt(what, partial(self._create_shared, node.id, gpu, effort), figures=1)
        if both is None:
            return node
        threads = max(self._threads(node.id))
        rate = shared.probe_shared(node.id, gpu, both[0], threads, both[1], effort, progress)
        return node if rate is None else dataclasses.replace(node, rates=(*node.rates, rate))

    def _create_shared(
        self, node: int, gpu: int, effort: Effort
    ) -> tuple[tuple[sweep.SweepBuffers, int], copies.Copier]:
        passes = [p for p in self._sweeps[node]["fp32"] if p.parameters <= sweep.THREADS_SIZE]
        cpus, quick = self._system.nearest_cpus(node), self._options.quick
        ordinals = copies.cuda_ordinals(self._machine.gpus)
        copier = self._create_copier(node, (gpu,), ordinals, effort)
        buffers = sweep.allocate_buffers(node, "fp32", passes, effort, cpus, quick=quick)
        return buffers, copier

    def _probe_copies(self, effort: Effort, progress: Progress) -> tuple[NodeCopy, ...]:
        copies = []
        for source, target in self._pairs:
            create = partial(memory.allocate_buffer, source, effort, self._system, target)
            buffer = progress.attempt(f"node {source} to node {target}", create, figures=1)
            if buffer is not None:
                threads = len(memory.cpus_between(source, target, self._system))
                copy = memory.probe_copy((source, target), buffer, threads, effort, progress)
                copies += [copy] if copy is not None else []
        return tuple(copies)

    def _probe_gpus(self, effort: Effort, progress: Progress) -> tuple[Transfer, ...]:
        if not self._groups:
            return ()
        progress.report("starting CUDA")
        find = partial(copies.cuda_ordinals, self._machine.gpus)
        figures = sum(map(len, self._groups)) * len(self._nodes)
        ordinals = progress.attempt("GPU copies", find, figures=figures)
        transfers: list[Transfer] = []
        for node in self._nodes if ordinals is not None else ():
            for group in filter(None, self._groups):
                create = partial(
                    self._create_copier, node.id, group[0].gpus, ordinals or {}, effort
                )
                what = f"node {node.id} and GPU {', '.join(map(str, group[0].gpus))}"
                copier = progress.attempt(what, create, figures=len(group))
                if copier is not None:
                    transfers += copies.probe_group(node.id, group, copier, effort, progress)
                del create, copier  # free the buffers before the next group allocates its own
        return tuple(transfers)

    def _create_copier(
        self, node: int, gpus: tuple[int, ...], ordinals: dict[int, int], effort: Effort
    ) -> copies.Copier:
        if hidden := [index for index in gpus if index not in ordinals]:
            raise ProbeError(
                f"CUDA does not list GPU {hidden[0]} in this process; check CUDA_VISIBLE_DEVICES"
            )
        spare = memory.spare_bytes(node, effort.host_bytes, self._system)
        return copies.TorchCopier(node, {index: ordinals[index] for index in gpus}, spare)

    def _probe_links(self, effort: Effort, progress: Progress) -> tuple[GpuLink, ...]:
        if not peers.figures(self._links):
            return self._machine.gpu_links
        find = partial(copies.cuda_ordinals, self._machine.gpus)
        ordinals = progress.attempt("GPU links", find, figures=peers.figures(self._links))
        if ordinals is None:
            return self._machine.gpu_links
        measured = []
        for link in self._links:
            if link.kind != "none":
                create = partial(peers.TorchPeerCopier, link.gpus, ordinals)
                copier = progress.attempt(peers.describe(link), create, figures=1)
                if copier is not None:
                    link = peers.probe_link(link, copier, effort, progress)
                del create, copier  # free the buffers before the next link allocates its own
            measured.append(link)
        return tuple(measured)

    def _probe_compute(self, effort: Effort, progress: Progress) -> tuple[Gpu, ...]:
        if not self._num_gpu_figures:
            return self._machine.gpus
        find = partial(copies.cuda_ordinals, self._machine.gpus)
        ordinals = progress.attempt("GPU compute", find, figures=self._num_gpu_figures)
        measured = []
        for gpu in self._machine.gpus if ordinals is not None else ():
            create = partial(self._create_benchmark, gpu.index, ordinals or {})
            quick = self._options.quick
            figures = len(compute.figures(quick=quick))
            benchmark = progress.attempt(f"GPU {gpu.index}", create, figures=figures)
            if benchmark is not None:
                gpu = compute.probe_gpu(gpu, benchmark, effort, progress, quick=quick)
            measured.append(gpu)
        return tuple(measured) or self._machine.gpus

    def _create_benchmark(self, index: int, ordinals: dict[int, int]) -> compute.GpuBenchmark:
        if index not in ordinals:
            raise ProbeError("CUDA does not list it in this process; check CUDA_VISIBLE_DEVICES")
        return compute.TorchGpuBenchmark(ordinals[index])

    def _probe_process(self, progress: Progress) -> int | None:
        # Without the GPUs the figure would lack CUDA and the compiler.
        if self._machine.gpus and not self._options.gpus:
            progress.done += 1
            return None
        measure = partial(process.measure_process, gpu=bool(self._machine.gpus))
        return progress.measure("memory of a process", measure)

    def _probe_storage(self, effort: Effort, progress: Progress) -> tuple[StoragePath, ...]:
        paths = []
        for path in self._machine.storage:
            measure = partial(storage.probe_path, path, self._requests, effort, progress)
            measured = progress.attempt(path.path, measure, figures=len(self._requests))
            paths.append(path if measured is None else measured)
        return tuple(paths)
