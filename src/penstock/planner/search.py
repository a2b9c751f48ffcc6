"""From first candidates to the best found: the cost model judges every step. Room: decide.

Deterministic: no clock, no random numbers, ties go to the earlier candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, islice, permutations, product

from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.initial_candidates import (
    ORDERS,
    PREFERENCES,
    FillStrategy,
    fill,
    residents,
    spread,
)
from penstock.tiers import Tier


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """How many candidates are timed."""

    seeds: int = 60
    """First candidates."""

    starts: int = 5
    """Of them, how many are changed at most."""

    moves: int = 100
    """Changes tried on each of those."""

    work: int = 100_000
    """Operations timed, after which no more of them are: small models are searched further."""

    orders: int = len(ORDERS)
    """Ways to fill."""

    rounds: int = 3
    """Numbers of rounds, of those that fit."""


THOROUGH = SearchEffort()
QUICK = SearchEffort(seeds=8, starts=1, moves=12, orders=3, rounds=1)
"""For what-if questions, of which there are many."""


CLOSE = 0.005
"""Of the time that the GPU computes: what is as close to it is as good as any."""


def search(evaluator: PlanEvaluator, effort: SearchEffort = THOROUGH) -> Candidate | None:
    """The best candidate found, or None if nothing fits."""
    return _that_fits(evaluator, lambda: _search(evaluator, effort))


def first_fit(evaluator: PlanEvaluator) -> Candidate | None:
    """Anything that fits, untimed."""
    return _that_fits(
        evaluator, lambda: next(_candidates(evaluator, SearchEffort(orders=1, rounds=1)), None)
    )


def _that_fits(evaluator: PlanEvaluator, find: Callable[[], Candidate | None]) -> Candidate | None:
    """Candidates are counted quickly; what is handed out, to the byte."""
    for _ in range(4):
        candidate = find()
        if candidate is None or not evaluator.lacks(candidate):
            return candidate
    return None


def _search(evaluator: PlanEvaluator, effort: SearchEffort) -> Candidate | None:
    """The first candidates, and the few best of them changed as long as it helps: the best of all
    is often not the one that can be made best."""
    seeds: list[Candidate] = []
    worst = math.inf  # of those that will be changed
    for candidate in islice(_candidates(evaluator, effort), effort.seeds):
        if _better(evaluator, candidate, worst):
            seeds = sorted([*seeds, candidate], key=evaluator.score)[: effort.starts]
            worst = evaluator.score(seeds[-1]) if len(seeds) == effort.starts else math.inf
    best: Candidate | None = None
    for seed in seeds:
        if best is not None and (evaluator.timed > effort.work or _as_good_as_any(evaluator, best)):
            break
        candidate = _climb(evaluator, seed, effort.moves)
        if best is None or evaluator.score(candidate) < evaluator.score(best):
            best = candidate
    return best


def _as_good_as_any(evaluator: PlanEvaluator, candidate: Candidate) -> bool:
    return evaluator.score(candidate) < (1 + CLOSE) * evaluator.computing(candidate)


def _better(evaluator: PlanEvaluator, candidate: Candidate, score: float) -> bool:
    """Most that are not can be told without timing them."""
    return evaluator.at_least(candidate) < score and evaluator.score(candidate) < score


def _candidates(evaluator: PlanEvaluator, effort: SearchEffort) -> Iterator[Candidate]:
    """Those that fit, the most promising first: few rounds, HBM full, the sweep's states in
    DRAM."""
    kinds = range(len(PREFERENCES) if evaluator.capacity(Tier.CXL) else 1)
    inputs = (0, len(evaluator.inventory.layers))
    seen: set[Candidate] = set()
    fitting = 0
    most = evaluator.workload.micro_batches if evaluator.inventory.may_have_rounds else 1
    for rounds in filter(evaluator.room_for_all, _rounds(most)):
        before = len(seen)
        for some in residents(evaluator, rounds):
            for order, kind, kept in product(ORDERS[: effort.orders], kinds, inputs):
                recipe = FillStrategy(order, kind, some, hbm_inputs=kept, rounds=rounds)
                candidate = fill(evaluator, recipe)
                if candidate is not None and candidate not in seen:
                    seen.add(candidate)
                    yield candidate
        fitting += len(seen) > before
        if fitting >= effort.rounds:
            return


def _rounds(micro_batches: int) -> list[int]:
    found = [1]
    while found[-1] * 2 <= micro_batches:
        found.append(found[-1] * 2)
    return found if found[-1] == micro_batches else [*found, micro_batches]


def _climb(evaluator: PlanEvaluator, candidate: Candidate, moves: int) -> Candidate:
    """Take every change that helps, coarse ones first, until none does or the moves are spent."""
    tried = 0
    improved = True
    seen = {candidate}
    while improved and tried < moves:
        improved = False
        for other in _neighbours(evaluator, candidate):
            if other in seen:
                continue
            seen.add(other)
            if evaluator.shortage(other):
                continue
            tried += 1
            if _better(evaluator, other, evaluator.score(candidate) * (1 - 1e-4)):
                candidate, improved = other, True
                break
            if tried >= moves:
                break
    return candidate


def _neighbours(evaluator: PlanEvaluator, candidate: Candidate) -> Iterator[Candidate]:
    yield from _buffers(candidate)
    count = len(candidate.locations)
    size = max(1, count // 4)
    while True:
        yield from _moves(evaluator, candidate, size)
        yield from _swaps(evaluator, candidate, size)
        if size == 1:
            return
        size = max(1, size // 4)


def _buffers(candidate: Candidate) -> Iterator[Candidate]:
    """More blocks in flight, or more of them kept over the turn."""
    layers = len(candidate.locations) - 2
    for slots, ahead in ((3, 2), (4, 1), (8, 1), (16, 1), (2, 1)):
        if slots <= layers + 1 and (slots, ahead) != (candidate.slots, candidate.ahead):
            yield replace(candidate, slots=slots, ahead=ahead)


def _moves(evaluator: PlanEvaluator, candidate: Candidate, size: int) -> Iterator[Candidate]:
    """Some blocks' group to another tier."""
    for group in ("state", "weight", "gradient", "input"):
        for source in Location:
            blocks = _blocks_at(candidate, group, source)
            for target in _targets(evaluator, group):
                if target is not source and blocks:
                    ordered = sorted(blocks)
                    patterns = (spread(blocks)[:size], ordered[:size], ordered[-size:])
                    for some in dict.fromkeys(map(tuple, patterns)):
                        yield _put(candidate, group, some, target)
    yield from _residents(candidate, size)


def _swaps(evaluator: PlanEvaluator, candidate: Candidate, size: int) -> Iterator[Candidate]:
    """Two groups trade places, about as many bytes each way."""
    locations = (Location.DRAM, Location.CXL, Location.NVME)
    for one, other in permutations(("state", "weight", "gradient", "input"), 2):
        for a, b in combinations(locations, 2):
            first, second = _blocks_at(candidate, one, a), _blocks_at(candidate, other, b)
            if not first or not second:
                continue
            some = spread(first)[:size]
            wanted = sum(evaluator.nbytes(i, one, candidate.rounds) for i in some)
            each = evaluator.nbytes(second[0], other, candidate.rounds)
            back = spread(second)[: max(1, math.ceil(wanted / max(each, 1)))]
            yield _put(_put(candidate, one, some, b), other, back, a)


def _residents(candidate: Candidate, size: int) -> Iterator[Candidate]:
    """Whole blocks into HBM, out of it, or in exchange for others."""
    inside = [i for i, s in enumerate(candidate.locations) if s.resident]
    outside = [i for i, s in enumerate(candidate.locations) if s.weight and not s.resident]
    come = [outside[:size], outside[-size:]]
    gone = [inside[:size], inside[-size:]]
    yield from (_settle(candidate, some, Location.HBM) for some in come)
    yield from (_settle(candidate, some, Location.DRAM) for some in gone)
    for some, others in product(come, gone):
        yield _settle(_settle(candidate, others, Location.DRAM), some, Location.HBM)


def _settle(candidate: Candidate, blocks: list[int], location: Location) -> Candidate:
    """All of some blocks in one place."""

    def settled(locations: BlockLocations) -> BlockLocations:
        trained = location if locations.state else None
        return locations._replace(weight=location, state=trained, gradient=trained)

    return candidate.moved({i: settled(candidate.locations[i]) for i in blocks})


def _targets(evaluator: PlanEvaluator, group: str) -> list[Location]:
    found = [Location.DRAM]
    if evaluator.capacity(Tier.CXL):
        found += [Location.CXL, Location.MIX] if group == "state" else [Location.CXL]
    if evaluator.capacity(Tier.NVME):
        found.append(Location.NVME)
    return [*found, Location.HBM] if group == "input" else found


def _blocks_at(candidate: Candidate, group: str, location: Location) -> list[int]:
    return [
        i
        for i, s in enumerate(candidate.locations)
        if getattr(s, group) is location and (group == "input" or not s.resident)
    ]


def _put(
    candidate: Candidate, group: str, blocks: list[int] | tuple[int, ...], location: Location
) -> Candidate:
    return candidate.moved(
        {i: candidate.locations[i]._replace(**{group: location}) for i in blocks}
    )
