"""Divide the optimizer sweeps of blocks in host memory between the CPU and the GPU.

The search decides where everything is stored as if the CPU swept every block that is not in HBM.
States of some blocks may instead pass through HBM, where the GPU sweeps them at the same time as
the CPU sweeps others. Both sides use host memory, and the GPU's side also uses the link, so the
cost model decides how many blocks that should be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.optimizer_options import WHOLE_TENSOR
from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.kept_layers import most_kept, move_out, resident_blocks, with_kept

FACTORS = (0.6, 0.8, 1.0, 1.25, 1.6, 2.0, 2.6, 3.4, 5.0, 8.0)
"""How long a sweep on the GPU is assumed to take, relative to its time if nothing else used the
link and host memory. A larger factor gives the GPU fewer blocks."""

FIRST_FACTORS = (1.0, 2.0)
"""The factors to compare places in HBM with, before all others are tried."""

OUT = (1, 2, 4)
"""Numbers of blocks that leave HBM to make room for states."""

LESS_KEPT = 6
"""How many kept forward passes may be given up to make room for states."""

GAIN = 0.995
"""A candidate that sweeps on both sides must be faster than the one without by this factor."""

EXACT_CHECKS = 4
"""Number of candidates to check to the byte."""


def may_sweep_on_gpu(evaluator: PlanEvaluator) -> bool:
    """Return whether the GPU may sweep blocks in host memory."""
    work = evaluator.workload
    has_gpu = bool(evaluator.machine.gpus)
    return has_gpu and work.world == 1 and work.optimizer not in WHOLE_TENSOR


def share_sweeps(evaluator: PlanEvaluator, candidate: Candidate, *, exact: bool) -> Candidate:
    """Return the candidate, or a faster one in which the GPU sweeps some of the blocks in DRAM.

    With `exact`, it fits to the byte. Otherwise it fits by the quick count, and only a few
    candidates are tried.
    """
    if not may_sweep_on_gpu(evaluator) or not _is_limited_by_sweeps(evaluator, candidate):
        return candidate
    bases = list(_bases(evaluator, candidate)) if exact else [candidate]
    tried = {c for base in bases for c in _shared(evaluator, base, FIRST_FACTORS)}
    if not tried:
        return candidate
    if exact:
        best = min(tried, key=evaluator.score)
        tried.update(_shared(evaluator, replace(best, gpu_swept=frozenset()), FACTORS))
    enough = GAIN * evaluator.score(candidate)
    faster = sorted((c for c in tried if evaluator.score(c) < enough), key=evaluator.score)
    if not exact:
        return faster[0] if faster else candidate
    return _first_that_fits(evaluator, candidate, faster[:EXACT_CHECKS])


def _is_limited_by_sweeps(evaluator: PlanEvaluator, candidate: Candidate) -> bool:
    """Return whether the step takes longer than its computation, and something can be shared."""
    some = any(each.trained_in_host_memory for each in candidate.locations)
    return some and GAIN * evaluator.score(candidate) > evaluator.compute_seconds(candidate)


def _bases(evaluator: PlanEvaluator, candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate, and others with more room in HBM.

    They have fewer weight slots, no activations in HBM, keep fewer forward passes, or have fewer
    blocks in HBM and keep more.
    """
    yield candidate
    if candidate.slots > 2:
        yield replace(candidate, slots=2, ahead=1)
    activations = [i for i, each in enumerate(candidate.locations) if _activation_in_hbm(each)]
    if activations and not candidate.kept:
        in_dram = {
            i: candidate.locations[i]._replace(activation=Location.DRAM) for i in activations
        }
        yield candidate.moved(in_dram)
    passes = sum(candidate.kept)
    yield from (
        with_kept(evaluator, candidate, passes - less)
        for less in range(1, 1 + min(passes, LESS_KEPT))
    )
    resident = resident_blocks(candidate)
    for number in OUT:
        if number <= len(resident):
            moved = replace(move_out(evaluator, candidate, resident[:number]), kept=())
            yield moved
            room = _largest_share(evaluator, moved)
            if candidate.kept and not evaluator.shortage(room):
                yield replace(most_kept(evaluator, room), gpu_swept=frozenset())


def _activation_in_hbm(locations: BlockLocations) -> bool:
    return locations.activation is Location.HBM and not locations.resident


def _largest_share(evaluator: PlanEvaluator, candidate: Candidate) -> Candidate:
    """Return the candidate with every block swept on the GPU that may be."""
    blocks = (i for i, each in enumerate(candidate.locations) if each.trained_in_host_memory)
    return replace(candidate, gpu_swept=frozenset(blocks))


def _shared(
    evaluator: PlanEvaluator, candidate: Candidate, factors: tuple[float, ...]
) -> Iterator[Candidate]:
    """Yield the candidate with different shares of its sweeps on the GPU, as far as they fit."""
    if evaluator.shortage(_largest_share(evaluator, candidate)):
        return
    for swept in dict.fromkeys(_assign(evaluator, candidate, factor) for factor in factors):
        if swept:
            yield replace(candidate, gpu_swept=swept)


def _assign(evaluator: PlanEvaluator, candidate: Candidate, factor: float) -> frozenset[int]:
    """Give each block in turn to the side that would have swept it first.

    Blocks are swept in the order of forward, so neither side may fall behind the other.
    """
    cpu_free = gpu_free = 0.0
    swept: set[int] = set()
    for block, locations in enumerate(candidate.locations):
        if locations.state is None or locations.state is Location.HBM:
            continue
        on_cpu, on_gpu = evaluator.sweep_seconds(candidate, block)
        if locations.trained_in_host_memory and gpu_free + factor * on_gpu < cpu_free + on_cpu:
            gpu_free += factor * on_gpu
            swept.add(block)
        else:
            cpu_free += on_cpu
    return frozenset(swept)


def _first_that_fits(
    evaluator: PlanEvaluator, without: Candidate, candidates: list[Candidate]
) -> Candidate:
    """Return the first that fits to the byte and is faster with pieces of the planned size."""
    for candidate in candidates:
        enough = GAIN * evaluator.exact_score(without)
        if evaluator.fits_exactly(candidate) and evaluator.exact_score(candidate) < enough:
            return candidate
    return without
