"""Fill HBM with what forward passes save, so that backward recomputes less.

The search decides where everything is stored as if every layer were recomputed. What is left of HBM
then keeps the saved tensors of as many layers as fit. Saved tensors save compute time, and resident
blocks save optimizer sweeps and copies, so blocks are also moved out of HBM in favour of kept
layers; the cost model decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.plan.buffers import micro_batches_per_round
from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.initial_candidates import can_split
from penstock.tiers import Tier

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the resident blocks that are moved out of HBM to see whether kept layers are better."""

NEARBY = (1, 2, 4)
"""By how many resident blocks the best of them is changed next."""

EXACT_CHECKS = 6
"""Number of candidates to check to the byte."""


def may_keep(evaluator: PlanEvaluator) -> bool:
    """Return whether plans may keep what forward passes save.

    An estimate of how much that is would not be good enough: a plan must not exceed its budget.
    """
    memory = evaluator.memory
    known = memory.saved is not None and memory.origin != "estimated"
    return known and evaluator.workload.may_keep


def keep_layers(evaluator: PlanEvaluator, candidate: Candidate, *, exact: bool) -> Candidate:
    """Return the candidate, or a faster one that keeps what some layers save.

    With `exact`, it fits to the byte. Otherwise it fits by the quick count.
    """
    if not may_keep(evaluator):
        return candidate
    resident = resident_blocks(candidate)
    counts = sorted({round(share * len(resident)) for share in SHARES})
    best, out = candidate, 0
    tried: set[int] = set()
    for wanted in (counts, None):  # first all over the range, then near the best
        wanted = wanted if wanted is not None else _nearby(out, len(resident))
        for number in wanted:
            if number in tried:
                continue
            tried.add(number)
            for other in _variants(evaluator, candidate, resident[:number]):
                if evaluator.score(other) < evaluator.score(best):
                    best, out = other, number
    return _fit_exactly(evaluator, candidate, best) if exact else best


def _nearby(number: int, most: int) -> list[int]:
    changed = (number + sign * step for step in NEARBY for sign in (-1, 1))
    return [each for each in changed if 0 <= each <= most]


def resident_blocks(candidate: Candidate) -> list[int]:
    """Return the resident blocks, those first that the step would wait for least.

    Sweeps of the first layers come first in a step. The embedding and the head are large.
    """
    resident = [i for i, each in enumerate(candidate.locations) if each.resident]
    outer = (0, len(candidate.locations) - 1)
    return sorted(resident, key=lambda i: (i in outer, -i))


def _variants(
    evaluator: PlanEvaluator, candidate: Candidate, out: list[int]
) -> Iterator[Candidate]:
    """Yield candidates with some blocks out of HBM, and with all layers kept that then fit."""
    moved = move_out(evaluator, candidate, out)
    streamed = moved.moved(
        {
            i: each._replace(activation=Location.DRAM)
            for i, each in enumerate(moved.locations)
            if each.activation is Location.HBM
        }
    )
    seen = set()
    for base in (moved, streamed, replace(streamed, slots=2, ahead=1)):
        kept = most_kept(evaluator, base)
        if kept.kept and kept not in seen:
            seen.add(kept)
            yield kept


def move_out(evaluator: PlanEvaluator, candidate: Candidate, blocks: list[int]) -> Candidate:
    """Return the candidate with some resident blocks in DRAM."""
    return candidate.moved({i: _in_dram(evaluator, candidate, i) for i in blocks})


def _in_dram(evaluator: PlanEvaluator, candidate: Candidate, block: int) -> BlockLocations:
    """Return the locations of a block that leaves HBM; an adapter stays there."""
    locations = candidate.locations[block]
    if can_split(evaluator, block):
        return locations._replace(frozen=Location.DRAM)
    trained = Location.DRAM if locations.state else None
    return locations._replace(weight=Location.DRAM, state=trained, gradient=trained)


def most_kept(evaluator: PlanEvaluator, candidate: Candidate) -> Candidate:
    """Return the candidate with as much kept as fits; every addition needs more HBM."""
    each = micro_batches_per_round(evaluator.workload, candidate.rounds)
    low, high = 0, each * len(evaluator.inventory.layers)
    if evaluator.shortage(candidate):
        return candidate
    while low < high:
        middle = (low + high + 1) // 2
        if evaluator.shortage(with_kept(evaluator, candidate, middle)):
            high = middle - 1
        else:
            low = middle
    return with_kept(evaluator, candidate, low)


def with_kept(evaluator: PlanEvaluator, candidate: Candidate, passes: int) -> Candidate:
    """Return the candidate with a number of forward passes kept, those of the last layers first.

    They are needed again soonest. Each layer has as many passes as a round has micro-batches.
    """
    each = micro_batches_per_round(evaluator.workload, candidate.rounds)
    kept = []
    for _ in evaluator.inventory.layers:
        kept.append(min(each, passes))
        passes -= kept[-1]
    return replace(candidate, kept=(0, *reversed(kept), 0) if any(kept) else ())


def _fit_exactly(evaluator: PlanEvaluator, without: Candidate, candidate: Candidate) -> Candidate:
    """Keep less until the candidate fits to the byte; return the one without if nothing does."""
    for _ in range(EXACT_CHECKS):
        if not candidate.kept:
            return without
        needed = evaluator.total_nbytes(candidate)
        excess = {t: needed[t] - evaluator.capacity(t) for t in Tier}
        if all(nbytes <= 0 for nbytes in excess.values()):
            return candidate
        if any(excess[t] > 0 for t in Tier if t is not Tier.HBM):
            return without  # staging packs worse than counted
        saved = evaluator.memory.saved
        assert saved is not None
        less = -(-excess[Tier.HBM] // max(1, saved))
        candidate = with_kept(evaluator, candidate, max(0, sum(candidate.kept) - less))
    return without
