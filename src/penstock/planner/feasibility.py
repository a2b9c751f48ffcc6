"""Find a placement that fits, if there is one, whatever its speed.

The search fills the fast tiers first, so its candidates change with every budget, and more memory
may lose the one that fits. Here the slow tiers are filled first, with the largest groups first, and
DRAM gets the rest. What is left for DRAM shrinks as other budgets grow, so that what fits in a
budget also fits in a larger one. Tests check that on random models and machines; it is not proven:
the number of shared gradients that is tried depends on the budget of DRAM.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, product
from typing import NamedTuple

from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.initial_candidates import (
    FillStrategy,
    most_resident,
    nbytes_by_tier,
    split_choices,
    undecided,
)
from penstock.tiers import Tier

SLOW = (Location.NVME, Location.CXL)
"""Locations that are filled before DRAM."""

ON_NVME: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            ("state", "weight", "gradient", "activation"),
            ("state", "weight", "gradient"),
            ("state", "weight"),
            ("state", "activation"),
            ("state",),
        ),
    )
)
"""Groups that may be stored on NVMe. Each of them needs DRAM for staging or pipes, so a placement
without some of them may need less DRAM."""

PINNED = 4
"""How many numbers of gradients in host memory to try."""

EXACT_CHECKS = 8
"""Number of candidates to check to the byte."""


class Groups(NamedTuple):
    """Groups of several blocks that have the same size."""

    group: str
    """Name of the group."""

    nbytes: int
    """Size of one of them in bytes."""

    blocks: tuple[int, ...]
    """The blocks."""


class Pinned(NamedTuple):
    """Groups whose location is decided: gradients, and activations in the memory of gradients."""

    location: Location
    """Where they are."""

    gradients: frozenset[int]
    """Blocks whose gradients are there."""

    activations: frozenset[int]
    """Blocks whose activations are there, and need no memory of their own."""

    nbytes: int
    """Bytes of the gradients."""


HbmChoices = dict[tuple[int, int], tuple[FillStrategy, ...]]
"""What to store in HBM, for a number of rounds and a capacity of HBM. For one model and workload it
depends on nothing else. Start with an empty dictionary."""


def may_fit(evaluator: PlanEvaluator, cache: HbmChoices) -> bool:
    """Return whether a candidate fits by the quick count, which may be a little too low."""
    return next(fitting(evaluator, cache), None) is not None


def first_fit(evaluator: PlanEvaluator, cache: HbmChoices | None = None) -> Candidate | None:
    """Return a candidate that fits to the byte, or None. It is not timed.

    A `cache` speeds up further calls with other budgets. It does not change the result.
    """
    cache = {} if cache is None else cache
    for _ in range(EXACT_CHECKS):
        candidate = next(fitting(evaluator, cache), None)
        if candidate is None or not evaluator.exact_shortage(candidate):
            return candidate
    return None


def fitting(evaluator: PlanEvaluator, cache: HbmChoices) -> Iterator[Candidate]:
    """Yield candidates that fit by the quick count."""
    for rounds in filter(evaluator.could_fit, round_counts(evaluator)):
        key = (rounds, evaluator.capacity(Tier.HBM))
        if key not in cache:
            cache[key] = tuple(_hbm_choices(evaluator, rounds))
        for strategy in cache[key]:
            for candidate in _host_choices(evaluator, strategy):
                if not evaluator.shortage(candidate):
                    yield candidate


def round_counts(evaluator: PlanEvaluator) -> list[int]:
    """Return the numbers of rounds to try: powers of two, and one micro-batch per round."""
    work = evaluator.workload
    # A forward pass whose loss the caller computes is one round.
    divisible = evaluator.inventory.may_have_rounds and work.caller_loss is None
    most = work.micro_batches if divisible else 1
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == most else [*counts, most]


# HBM.


def _hbm_choices(evaluator: PlanEvaluator, rounds: int) -> Iterator[FillStrategy]:
    """Yield what to store in HBM: nothing, or blocks and activations until it is full."""
    count = len(evaluator.inventory.blocks)
    outer = [i for i in (0, count - 1) if evaluator.inventory.blocks[i].tensors]
    layers = list(range(1, count - 1))
    seen: set[FillStrategy] = set()
    back = layers[::-1]
    orders: tuple[list[int], ...] = ([], [*back, *outer], [*outer, *back], [*outer, *layers])
    splits = split_choices(evaluator)
    for order, all_activations, split in product(orders, (False, True), splits):
        start = FillStrategy(
            rounds=rounds, hbm_activations=all_activations * len(layers), split=split
        )
        most = most_resident(evaluator, start, order)
        for number in (most, max(0, most - 1), len(order)):
            strategy = replace(start, resident=tuple(sorted(order[:number])))
            used = evaluator.quick_hbm_nbytes(_undecided(evaluator, strategy))
            left = evaluator.capacity(Tier.HBM) - used
            if order and not all_activations:
                kept = left // max(1, evaluator.group_nbytes(1, "activation", rounds))
                strategy = replace(strategy, hbm_activations=max(0, min(len(layers), kept)))
            if left >= 0 and strategy not in seen:
                seen.add(strategy)
                yield strategy


def _undecided(evaluator: PlanEvaluator, strategy: FillStrategy) -> Candidate:
    blocks = range(len(evaluator.inventory.blocks))
    return Candidate(tuple(undecided(evaluator, strategy, i) for i in blocks), strategy.rounds)


# Host memory and drives.


def _host_choices(evaluator: PlanEvaluator, strategy: FillStrategy) -> Iterator[Candidate]:
    """Yield candidates that may fit, with as little as possible in DRAM."""
    slow = [place for place in SLOW if evaluator.capacity(Tier(place.value))]
    orders = [tuple(slow), tuple(reversed(slow))] if len(slow) > 1 else [tuple(slow)]
    on_nvme = ON_NVME if Location.NVME in slow else ON_NVME[:1]
    for base in _mixed_choices(_undecided(evaluator, strategy), slow):
        mixed = _mixed_nbytes(evaluator, base)
        in_dram = _groups_in_dram(evaluator, base)
        for pinned in _pinned_choices(evaluator, base, slow):
            groups = _open_groups(in_dram, pinned)
            stored = sum(each.nbytes * len(each.blocks) for each in groups)
            free = {tier: evaluator.capacity(tier) - mixed[tier] for tier in Tier}
            free[Tier(pinned.location.value)] -= pinned.nbytes
            if stored > sum(free.values()) - free[Tier.HBM]:
                continue
            for order, allowed, kept in product(orders, on_nvme, _large_states(groups)):
                limits = _Limits(free, allowed, kept)
                candidate = _place(base, pinned, groups, order, limits)
                if candidate is not None:
                    yield candidate


class _Limits(NamedTuple):
    """The memory that a placement may use."""

    free: Mapping[Tier, int]
    """Bytes of each tier."""

    on_nvme: frozenset[str]
    """Groups that may be stored on NVMe."""

    off_nvme: frozenset[Groups]
    """Groups that may not, although others of that name may."""

    def allow(self, groups: Groups, place: Location) -> bool:
        if place is not Location.NVME:
            return True
        name = "weight" if groups.group == "frozen" else groups.group
        return name in self.on_nvme and groups not in self.off_nvme


def _large_states(groups: Sequence[Groups]) -> list[frozenset[Groups]]:
    """Return sets of states of the embedding and the head to keep off NVMe.

    They are much larger than the others. A drive may be better filled with those of layers.
    """
    single = [each for each in groups if len(each.blocks) == 1 and each.group == "state"]
    sizes = range(len(single) + 1)
    return [frozenset(some) for size in sizes for some in combinations(single, size)]


def _mixed_choices(base: Candidate, slow: Sequence[Location]) -> Iterator[Candidate]:
    """Yield the candidate with states of none, some or all blocks striped over DRAM and CXL."""
    yield base
    if Location.CXL in slow:
        states = [i for i, each in enumerate(base.locations) if each.state is Location.DRAM]
        for number in dict.fromkeys((1, 2, len(states) // 2, len(states))):
            some = states[len(states) - number :]
            yield base.moved({i: base.locations[i]._replace(state=Location.MIX) for i in some})


def _mixed_nbytes(evaluator: PlanEvaluator, base: Candidate) -> Counter[Tier]:
    total: Counter[Tier] = Counter()
    for i, each in enumerate(base.locations):
        if each.state is Location.MIX:
            total += nbytes_by_tier(evaluator, i, ("state",), Location.MIX, base.rounds)
    return total


def _pinned_choices(
    evaluator: PlanEvaluator, base: Candidate, slow: Sequence[Location]
) -> Iterator[Pinned]:
    """Yield how many gradients stay in host memory, so that activations can share theirs.

    The more of them, the more bytes are saved, until all activations are shared. The largest
    numbers that fit are tried, because the other groups may need a little of that memory, too.
    Gradients of early blocks are best, as those of later blocks share no activation of the blocks
    before. But that of the first block, a large table, may leave no room for any other.
    """
    yield Pinned(Location.DRAM, frozenset(), frozenset(), 0)
    has_activations = any(each.activation is Location.DRAM for each in base.locations)
    if base.rounds > 1 or evaluator.workload.accumulate or not has_activations:
        return
    every = [i for i, each in enumerate(base.locations) if each.gradient is Location.DRAM]
    in_host = (Location.DRAM, *(place for place in slow if place is Location.CXL))
    for location, owners in product(in_host, (every, every[1:])):
        sizes = [evaluator.group_nbytes(i, "gradient", base.rounds) for i in owners]
        totals = [0, *accumulate(sizes)]
        most = bisect_right(totals, evaluator.capacity(Tier(location.value))) - 1
        for number in range(most, max(0, most - PINNED), -1):
            gradients = frozenset(owners[:number])
            overlaid = _overlaid(evaluator, base, location, gradients)
            yield Pinned(location, gradients, overlaid, totals[number])


def _overlaid(
    evaluator: PlanEvaluator, base: Candidate, location: Location, gradients: frozenset[int]
) -> frozenset[int]:
    """Return the activations that fit in the memory of these gradients."""
    locations = [
        each._replace(
            gradient=each.gradient and (location if i in gradients else Location.HBM),
            activation=location if each.activation is Location.DRAM else each.activation,
        )
        for i, each in enumerate(base.locations)
    ]
    return frozenset(evaluator.overlaid_blocks(locations, base.rounds))


def _groups_in_dram(evaluator: PlanEvaluator, base: Candidate) -> dict[tuple[str, int], list[int]]:
    """Return the blocks of the groups that are not in HBM, by name and size of the group."""
    alike: dict[tuple[str, int], list[int]] = {}
    for i, locations in enumerate(base.locations):
        for group, location in zip(BlockLocations._fields, locations, strict=True):
            if location is Location.DRAM:
                nbytes = evaluator.group_nbytes(i, group, base.rounds)
                alike.setdefault((group, nbytes), []).append(i)
    return alike


def _open_groups(in_dram: Mapping[tuple[str, int], list[int]], pinned: Pinned) -> list[Groups]:
    """Return the groups that are not pinned, the largest first."""
    done = {"gradient": pinned.gradients, "activation": pinned.activations}
    groups = []
    for (group, nbytes), blocks in in_dram.items():
        excluded = done.get(group)
        left = tuple(i for i in blocks if i not in excluded) if excluded else tuple(blocks)
        if left:
            groups.append(Groups(group, nbytes, left))
    return sorted(groups, key=lambda each: -each.nbytes)


def _place(
    base: Candidate,
    pinned: Pinned,
    groups: Iterable[Groups],
    order: Sequence[Location],
    limits: _Limits,
) -> Candidate | None:
    """Fill the slow tiers, the largest groups first. Return None if DRAM is too small."""
    free = dict(limits.free)
    moves: list[tuple[Groups, Location, tuple[int, ...]]] = []
    for each in groups:
        rest = each.blocks
        for place in order:
            if rest and limits.allow(each, place):
                tier = Tier(place.value)
                number = max(0, free[tier]) // max(1, each.nbytes)
                moves.append((each, place, rest[:number]))
                free[tier] -= each.nbytes * len(rest[:number])
                rest = rest[number:]
        free[Tier.DRAM] -= each.nbytes * len(rest)
        if free[Tier.DRAM] < 0:
            return None
    return None if min(free.values()) < 0 else _moved(base, pinned, moves)


def _moved(
    base: Candidate,
    pinned: Pinned,
    moves: Iterable[tuple[Groups, Location, tuple[int, ...]]],
) -> Candidate:
    changes: dict[int, BlockLocations] = dict(enumerate(base.locations))
    for i in pinned.gradients:
        changes[i] = changes[i]._replace(gradient=pinned.location)
    for i in pinned.activations:
        changes[i] = changes[i]._replace(activation=pinned.location)
    for each, place, blocks in moves:
        for i in blocks:
            changes[i] = changes[i]._replace(**{each.group: place})
    return base.moved(changes)
