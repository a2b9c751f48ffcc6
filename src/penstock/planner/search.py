"""From first candidates to the best found: the cost model judges every step. Room: decide.

Deterministic: no clock, no random numbers, ties go to the earlier candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, islice, permutations, product

from penstock.planner.candidates import ORDERS, PREFERENCES, FillOrder, fill, residents, spread
from penstock.planner.choice import BlockSpots, Choice, Spot
from penstock.planner.evaluator import PlanEvaluator
from penstock.tiers import Tier


@dataclass(frozen=True, slots=True)
class Effort:
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


THOROUGH = Effort()
QUICK = Effort(seeds=8, starts=1, moves=12, orders=3, rounds=1)
"""For what-if questions, of which there are many."""


CLOSE = 0.005
"""Of the time that the GPU computes: what is as close to it is as good as any."""


def search(desk: PlanEvaluator, effort: Effort = THOROUGH) -> Choice | None:
    """The best candidate found, or None if nothing fits."""
    return _that_fits(desk, lambda: _search(desk, effort))


def first_fit(desk: PlanEvaluator) -> Choice | None:
    """Anything that fits, untimed."""
    return _that_fits(desk, lambda: next(_candidates(desk, Effort(orders=1, rounds=1)), None))


def _that_fits(desk: PlanEvaluator, find: Callable[[], Choice | None]) -> Choice | None:
    """Candidates are counted quickly; what is handed out, to the byte."""
    for _ in range(4):
        choice = find()
        if choice is None or not desk.lacks(choice):
            return choice
    return None


def _search(desk: PlanEvaluator, effort: Effort) -> Choice | None:
    """The first candidates, and the few best of them changed as long as it helps: the best of all
    is often not the one that can be made best."""
    seeds: list[Choice] = []
    worst = math.inf  # of those that will be changed
    for choice in islice(_candidates(desk, effort), effort.seeds):
        if _better(desk, choice, worst):
            seeds = sorted([*seeds, choice], key=desk.score)[: effort.starts]
            worst = desk.score(seeds[-1]) if len(seeds) == effort.starts else math.inf
    best: Choice | None = None
    for seed in seeds:
        if best is not None and (desk.timed > effort.work or _as_good_as_any(desk, best)):
            break
        choice = _climb(desk, seed, effort.moves)
        if best is None or desk.score(choice) < desk.score(best):
            best = choice
    return best


def _as_good_as_any(desk: PlanEvaluator, choice: Choice) -> bool:
    return desk.score(choice) < (1 + CLOSE) * desk.computing(choice)


def _better(desk: PlanEvaluator, choice: Choice, score: float) -> bool:
    """Most that are not can be told without timing them."""
    return desk.at_least(choice) < score and desk.score(choice) < score


def _candidates(desk: PlanEvaluator, effort: Effort) -> Iterator[Choice]:
    """Those that fit, the most promising first: few rounds, HBM full, the sweep's states in
    DRAM."""
    kinds = range(len(PREFERENCES) if desk.capacity(Tier.CXL) else 1)
    inputs = (0, len(desk.inventory.layers))
    seen: set[Choice] = set()
    fitting = 0
    most = desk.workload.micro_batches if desk.inventory.may_have_rounds else 1
    for rounds in filter(desk.room_for_all, _rounds(most)):
        before = len(seen)
        for some in residents(desk, rounds):
            for order, kind, kept in product(ORDERS[: effort.orders], kinds, inputs):
                recipe = FillOrder(order, kind, some, hbm_inputs=kept, rounds=rounds)
                choice = fill(desk, recipe)
                if choice is not None and choice not in seen:
                    seen.add(choice)
                    yield choice
        fitting += len(seen) > before
        if fitting >= effort.rounds:
            return


def _rounds(micro_batches: int) -> list[int]:
    found = [1]
    while found[-1] * 2 <= micro_batches:
        found.append(found[-1] * 2)
    return found if found[-1] == micro_batches else [*found, micro_batches]


def _climb(desk: PlanEvaluator, choice: Choice, moves: int) -> Choice:
    """Take every change that helps, coarse ones first, until none does or the moves are spent."""
    tried = 0
    improved = True
    seen = {choice}
    while improved and tried < moves:
        improved = False
        for other in _neighbours(desk, choice):
            if other in seen:
                continue
            seen.add(other)
            if desk.shortage(other):
                continue
            tried += 1
            if _better(desk, other, desk.score(choice) * (1 - 1e-4)):
                choice, improved = other, True
                break
            if tried >= moves:
                break
    return choice


def _neighbours(desk: PlanEvaluator, choice: Choice) -> Iterator[Choice]:
    yield from _buffers(choice)
    count = len(choice.spots)
    size = max(1, count // 4)
    while True:
        yield from _moves(desk, choice, size)
        yield from _swaps(desk, choice, size)
        if size == 1:
            return
        size = max(1, size // 4)


def _buffers(choice: Choice) -> Iterator[Choice]:
    """More blocks in flight, or more of them kept over the turn."""
    layers = len(choice.spots) - 2
    for slots, ahead in ((3, 2), (4, 1), (8, 1), (16, 1), (2, 1)):
        if slots <= layers + 1 and (slots, ahead) != (choice.slots, choice.ahead):
            yield replace(choice, slots=slots, ahead=ahead)


def _moves(desk: PlanEvaluator, choice: Choice, size: int) -> Iterator[Choice]:
    """Some blocks' group to another tier."""
    for group in ("state", "weight", "gradient", "input"):
        for source in Spot:
            blocks = _blocks_at(choice, group, source)
            for target in _targets(desk, group):
                if target is not source and blocks:
                    ordered = sorted(blocks)
                    patterns = (spread(blocks)[:size], ordered[:size], ordered[-size:])
                    for some in dict.fromkeys(map(tuple, patterns)):
                        yield _put(choice, group, some, target)
    yield from _residents(choice, size)


def _swaps(desk: PlanEvaluator, choice: Choice, size: int) -> Iterator[Choice]:
    """Two groups trade places, about as many bytes each way."""
    spots = (Spot.DRAM, Spot.CXL, Spot.NVME)
    for one, other in permutations(("state", "weight", "gradient", "input"), 2):
        for a, b in combinations(spots, 2):
            first, second = _blocks_at(choice, one, a), _blocks_at(choice, other, b)
            if not first or not second:
                continue
            some = spread(first)[:size]
            wanted = sum(desk.nbytes(i, one, choice.rounds) for i in some)
            each = desk.nbytes(second[0], other, choice.rounds)
            back = spread(second)[: max(1, math.ceil(wanted / max(each, 1)))]
            yield _put(_put(choice, one, some, b), other, back, a)


def _residents(choice: Choice, size: int) -> Iterator[Choice]:
    """Whole blocks into HBM, out of it, or in exchange for others."""
    inside = [i for i, s in enumerate(choice.spots) if s.resident]
    outside = [i for i, s in enumerate(choice.spots) if s.weight and not s.resident]
    come = [outside[:size], outside[-size:]]
    gone = [inside[:size], inside[-size:]]
    yield from (_settle(choice, some, Spot.HBM) for some in come)
    yield from (_settle(choice, some, Spot.DRAM) for some in gone)
    for some, others in product(come, gone):
        yield _settle(_settle(choice, others, Spot.DRAM), some, Spot.HBM)


def _settle(choice: Choice, blocks: list[int], spot: Spot) -> Choice:
    """All of some blocks in one place."""

    def settled(spots: BlockSpots) -> BlockSpots:
        trained = spot if spots.state else None
        return spots._replace(weight=spot, state=trained, gradient=trained)

    return choice.moved({i: settled(choice.spots[i]) for i in blocks})


def _targets(desk: PlanEvaluator, group: str) -> list[Spot]:
    found = [Spot.DRAM]
    if desk.capacity(Tier.CXL):
        found += [Spot.CXL, Spot.MIX] if group == "state" else [Spot.CXL]
    if desk.capacity(Tier.NVME):
        found.append(Spot.NVME)
    return [*found, Spot.HBM] if group == "input" else found


def _blocks_at(choice: Choice, group: str, spot: Spot) -> list[int]:
    return [
        i
        for i, s in enumerate(choice.spots)
        if getattr(s, group) is spot and (group == "input" or not s.resident)
    ]


def _put(choice: Choice, group: str, blocks: list[int] | tuple[int, ...], spot: Spot) -> Choice:
    return choice.moved({i: choice.spots[i]._replace(**{group: spot}) for i in blocks})
