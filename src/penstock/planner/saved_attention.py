"""Choose the layers whose results of attention are saved, so that backward does not repeat them.

Results are small next to what a kept layer saves, and a link that is mostly idle can move them. So
they are first put in host memory, where they need one slot of HBM for all layers, and in HBM as far
as there is room. Where HBM is full, some kept forward passes, weight slots or resident blocks make
room for the slot; the cost model decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.planner.candidate import Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.kept_layers import move_out, resident_blocks, with_kept
from penstock.tiers import Tier

PLACES = (Location.DRAM, Location.CXL)
"""Where results may be stored outside HBM, the preferred one first."""

LESS_KEPT = (1, 2, 4, 8)
"""How many kept forward passes may be given up to make room."""

OUT = (1, 2)
"""How many resident blocks may leave HBM to make room."""

SHARES = (0.5, 0.75)
"""Shares of the layers whose results are saved in host memory, if all of them are too many for the
link."""

GAIN = 0.999
"""A candidate that saves results in HBM must be faster than the one without by this factor."""

GAIN_OUTSIDE = 0.98
"""The same for results in host memory. They pass through one slot, so the thread that launches
kernels waits in every layer until the thread that offloads has issued its copy. The cost model does
not count that. A step that was to gain 0.3 % had a longer forward pass (docs/decisions/0125)."""

EXACT_CHECKS = 4
"""Number of candidates to check to the byte."""


def save_attention(evaluator: PlanEvaluator, candidate: Candidate, *, exact: bool) -> Candidate:
    """Return the candidate, or a faster one that saves what attention returns in some layers.

    With `exact`, it fits to the byte. Otherwise it fits by the quick count, and only a few
    candidates are tried.
    """
    if not evaluator.workload.may_save_attention or not _layers(evaluator):
        return candidate
    without = evaluator.score(candidate)
    tried: set[Candidate] = set()
    for base in _bases(candidate, evaluator) if exact else (candidate,):
        tried.update(_saved(evaluator, base))
    faster = sorted(
        (each for each in tried if evaluator.score(each) < _gain(each) * without),
        key=evaluator.score,
    )
    if not exact:
        return faster[0] if faster else candidate
    return _first_that_fits(evaluator, candidate, faster[:EXACT_CHECKS])


def _gain(candidate: Candidate) -> float:
    """Return by which factor a candidate must be faster than the one that saves nothing."""
    return GAIN_OUTSIDE if any(place in PLACES for place in candidate.attention) else GAIN


def _layers(evaluator: PlanEvaluator) -> list[int]:
    """Return the layers whose results can be saved, those first that save the most time.

    A layer with a sliding window computes less. Of equal layers, those with a long way to go come
    first: the results of the last ones return before they could have left.
    """
    blocks = evaluator.inventory.blocks
    found = [i for i, block in enumerate(blocks) if block.kind == "layer" and block.heads]
    return sorted(found, key=lambda i: (blocks[i].window is not None, i))


def _bases(candidate: Candidate, evaluator: PlanEvaluator) -> Iterator[Candidate]:
    """Yield the candidate, and others with more room in HBM."""
    yield candidate
    if candidate.slots > 2:
        yield replace(candidate, slots=2, ahead=1)
    passes = sum(candidate.kept)
    less = dict.fromkeys(min(passes, number) for number in (*LESS_KEPT, passes // 2, passes))
    yield from (with_kept(evaluator, candidate, passes - number) for number in less if number)
    resident = resident_blocks(candidate)
    yield from (
        move_out(evaluator, candidate, resident[:number])
        for number in OUT
        if number <= len(resident)
    )


def _saved(evaluator: PlanEvaluator, base: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with results of as many layers saved as fit, in HBM or outside."""
    layers = _layers(evaluator)
    in_hbm = most_saved(evaluator, base, layers, Location.HBM)
    yield in_hbm
    for place in PLACES:
        if not evaluator.capacity(Tier(place.value)):
            continue
        outside = most_saved(evaluator, base, layers, place)
        yield outside
        count = sum(each is place for each in outside.attention)
        yield from (with_attention(base, layers[: round(share * count)], place) for share in SHARES)
        # HBM that is left saves copies.
        yield most_saved(evaluator, outside, list(reversed(layers)), Location.HBM)


def with_attention(base: Candidate, layers: Sequence[int], place: Location) -> Candidate:
    """Return the candidate with the results of some more layers saved in a place."""
    saved = list(base.attention or [None] * len(base.locations))
    for layer in layers:
        saved[layer] = place
    return replace(base, attention=tuple(saved) if any(saved) else ())


def most_saved(
    evaluator: PlanEvaluator, base: Candidate, layers: Sequence[int], place: Location
) -> Candidate:
    """Return the candidate with the results of as many layers saved in a place as fit."""
    low, high = 0, len(layers)
    if not evaluator.shortage(with_attention(base, layers, place)):
        low = high
    while low < high:
        middle = (low + high + 1) // 2
        if evaluator.shortage(with_attention(base, layers[:middle], place)):
            high = middle - 1
        else:
            low = middle
    return with_attention(base, layers[:low], place)


def _first_that_fits(
    evaluator: PlanEvaluator, without: Candidate, candidates: Sequence[Candidate]
) -> Candidate:
    """Return the first that fits to the byte and is faster with pieces of the planned size."""
    for candidate in candidates:
        enough = _gain(candidate) * evaluator.exact_score(without)
        if evaluator.fits_exactly(candidate) and evaluator.exact_score(candidate) < enough:
            return candidate
    return without
