"""Build the first candidates of the search by filling tiers, the fastest first, group by group.

If fast tiers are scarce, the groups that are most sensitive to latency should get them. Which
groups those are depends on the workload, so several orders are tried and the cost model decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.planner.candidate import GROUPS, TIERS, BlockLocations, Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.tiers import Tier

BLOCK = "block"
"""Stands for state, gradient and weight of one block together, from the first block on. The last
blocks are then left for the slow tiers. Their sweeps come last in a step, so a disk can start to
read them at the start of the step."""

ORDERS: tuple[tuple[str, ...], ...] = (
    ("state", "gradient", "weight", "activation"),
    ("state", "gradient", "activation", "weight"),
    ("gradient", "weight", "activation", "state"),
    ("activation", "weight", "gradient", "state"),
    ("weight", "gradient", "state", "activation"),
    ("activation", BLOCK),
    (BLOCK, "activation"),
)
"""Orders in which groups get the fast tiers. Optimizer states are first by default. If states must
be stored on disk anyway, DRAM is better used for the other groups."""

PREFERENCES: tuple[dict[str, tuple[Location, ...]], ...] = (
    {"state": (Location.DRAM, Location.MIX, Location.CXL, Location.NVME)},
    {"state": (Location.MIX, Location.DRAM, Location.CXL, Location.NVME)},
    {
        "state": (Location.DRAM, Location.MIX, Location.CXL, Location.NVME),
        "weight": (Location.CXL, Location.DRAM, Location.NVME),
        "activation": (Location.CXL, Location.DRAM, Location.NVME),
    },
)
"""Locations to try for each group, in order. The last two entries differ only on machines with
CXL memory."""

ADAPTER = 8
"""A block has an adapter if it has at least so many frozen weights for each that is trained."""

DEFAULT_PREFERENCE = (Location.DRAM, Location.CXL, Location.NVME)
"""Locations to try for groups that `PREFERENCES` does not list."""


@dataclass(frozen=True, slots=True)
class FillStrategy:
    """How to fill the tiers."""

    order: tuple[str, ...] = ORDERS[0]
    """Order of the groups."""

    preference: int = 0
    """Index into `PREFERENCES`."""

    resident: tuple[int, ...] = ()
    """Blocks that are stored in HBM."""

    hbm_activations: int = 0
    """Number of layers, counted from the last, whose activations stay in HBM. The last ones are
    needed again soonest."""

    rounds: int = 1
    """See `Placement.rounds`."""

    split: bool = False
    """Whether HBM stores all that is trained of blocks that have frozen weights, too."""

    slots: int = 2
    """See `Placement.slots`."""

    ahead: int = 1
    """See `Placement.ahead`."""


def fill(evaluator: PlanEvaluator, strategy: FillStrategy) -> Candidate | None:
    """Return a candidate that fits, or None."""
    reserve: Counter[Tier] = Counter()
    for _ in range(4):
        candidate = _fill_once(evaluator, strategy, reserve)
        if candidate is None:
            return None
        short = evaluator.shortage(candidate)
        if not short:
            return candidate
        if set(short) - {Tier.DRAM}:
            return None
        # How much staging is needed is known only once it is known what is stored on NVMe. Reserve
        # all of it and try again: the shortage is less by what was free.
        reserve[Tier.DRAM] = max(
            reserve[Tier.DRAM] + short[Tier.DRAM], evaluator.dram_buffer_nbytes(candidate)
        )
    return None


def _fill_once(
    evaluator: PlanEvaluator, strategy: FillStrategy, reserve: Counter[Tier]
) -> Candidate | None:
    free = {tier: evaluator.capacity(tier) - reserve[tier] for tier in Tier}
    blocks = range(len(evaluator.inventory.blocks))
    locations = [undecided(evaluator, strategy, i) for i in blocks]
    for groups, turn in _turns(strategy, locations):
        # Frozen weights are moved like any others.
        name = "weight" if groups == ("frozen",) else "+".join(groups)
        preference = PREFERENCES[strategy.preference].get(name, DEFAULT_PREFERENCE)
        open_blocks = [i for i in turn if getattr(locations[i], groups[0]) is Location.DRAM]
        if groups == ("activation",):  # overlaid activations need no memory of their own
            overlaid = evaluator.overlaid_blocks(locations, strategy.rounds)
            open_blocks = [i for i in open_blocks if i not in overlaid]
        for location in preference:
            if not all(evaluator.capacity(tier) for tier in TIERS[location]):
                continue
            placed = _place_blocks(evaluator, groups, location, open_blocks, free, strategy.rounds)
            for i in placed:
                locations[i] = locations[i]._replace(**dict.fromkeys(groups, location))
            open_blocks = [i for i in open_blocks if i not in placed]
        if open_blocks:
            return None
    return Candidate(tuple(locations), strategy.rounds, strategy.slots, strategy.ahead)


def _turns(
    strategy: FillStrategy, locations: Sequence[BlockLocations]
) -> Iterator[tuple[tuple[str, ...], Sequence[int]]]:
    """Yield which groups of which blocks to place, in order."""
    for group in strategy.order:
        if group == BLOCK:
            frozen = [i for i, each in enumerate(locations) if each.state is None]
            yield from ((("state", "gradient", "weight"), (i,)) for i in range(len(locations)))
            yield ("weight",), frozen
        else:
            yield (group,), range(len(locations))
        if group in (BLOCK, "weight"):
            yield ("frozen",), range(len(locations))


def undecided(evaluator: PlanEvaluator, strategy: FillStrategy, index: int) -> BlockLocations:
    """Return a block's initial locations: HBM where that is decided, DRAM where it is not.

    Groups that the block does not have are None.
    """
    block = evaluator.inventory.blocks[index]
    trained, layer = block.flat_elements(trainable=True) > 0, block.kind == "layer"
    location = Location.HBM if index in strategy.resident else Location.DRAM
    last_layer = len(evaluator.inventory.blocks) - 2
    keeps_activation = index > last_layer - strategy.hbm_activations
    split = strategy.split and can_split(evaluator, index) and location is Location.DRAM
    location = Location.HBM if split else location
    return BlockLocations(
        weight=location if block.tensors else None,
        state=location if trained else None,
        gradient=location if trained else None,
        activation=(Location.HBM if keeps_activation else Location.DRAM) if layer else None,
        frozen=Location.DRAM if split else None,
    )


def can_split(evaluator: PlanEvaluator, index: int) -> bool:
    """Return whether HBM may store what is trained of a block without what is frozen.

    That is so for a block with an adapter. With several ranks, all weights of a block are together.
    """
    block = evaluator.inventory.blocks[index]
    trained, frozen = (block.flat_elements(trainable=each) for each in (True, False))
    return 0 < trained * ADAPTER <= frozen and evaluator.inventory.shards == 1


def split_choices(evaluator: PlanEvaluator) -> tuple[bool, ...]:
    """Return whether to split blocks, the better choice first.

    Adapters are small: they cost little HBM, and then neither they nor their gradients are moved,
    and the CPU sweeps nothing.
    """
    blocks = range(len(evaluator.inventory.blocks))
    return (True, False) if any(can_split(evaluator, i) for i in blocks) else (False,)


def _place_blocks(
    evaluator: PlanEvaluator, groups: tuple[str, ...], location: Location, blocks: Sequence[int],
    free: dict[Tier, int], rounds: int,
) -> set[int]:  # fmt: skip
    """Place as many blocks as fit in a location, and return them.

    The embedding and the head come first, because they are the largest. Layers are spread evenly,
    so that the work of the slower tier is spread over the step, too.
    """
    if not blocks:
        return set()
    layers = [i for i in blocks if evaluator.inventory.blocks[i].kind == "layer"]
    order = [i for i in blocks if i not in layers] + spread(layers)
    placed = set()
    for i in order:
        wanted = nbytes_by_tier(evaluator, i, groups, location, rounds)
        if all(free[tier] >= nbytes for tier, nbytes in wanted.items()):
            for tier, nbytes in wanted.items():
                free[tier] -= nbytes
            placed.add(i)
    return placed


def nbytes_by_tier(
    evaluator: PlanEvaluator, block: int, groups: tuple[str, ...], location: Location, rounds: int
) -> Counter[Tier]:
    """Return the bytes that groups of a block need in each tier of a location."""
    total: Counter[Tier] = Counter()
    for role in (role for group in groups for role in GROUPS[group]):
        for share in evaluator.home(block, role, location, rounds).shares:
            total[share.tier] += share.nbytes
    return total


def spread(layers: Sequence[int]) -> list[int]:
    """Order layers such that any first part of the list is spread evenly over the model."""
    golden_ratio = 0.6180339887498949
    return sorted(layers, key=lambda i: ((i * golden_ratio) % 1.0, i))


def resident_sets(
    evaluator: PlanEvaluator, rounds: int, *, split: bool = False
) -> list[tuple[int, ...]]:
    """Return sets of blocks to store in HBM: as many as fit, in two orders; half of them; none.

    The first layers are preferred, because the step would wait for their sweeps. If disks are in
    use, a set of last layers is tried, too: more activations can then be overlaid on the gradients
    of the earlier layers.
    """
    count = len(evaluator.inventory.blocks)
    outer = [i for i in (0, count - 1) if evaluator.inventory.blocks[i].tensors]
    layers = list(range(1, count - 1))
    sets: list[tuple[int, ...]] = []
    for order in ([*outer, *layers], [*layers, *outer]):
        most = most_resident(evaluator, FillStrategy(rounds=rounds, split=split), order)
        sets += [tuple(sorted(order[:number])) for number in (most, most // 2)]
    if evaluator.capacity(Tier.NVME):
        number = max(0, len(sets[0]) - len(outer))
        sets.insert(0, tuple(sorted([*outer, *layers[len(layers) - number :]])))
    return list(dict.fromkeys([*sets, ()]))


def most_resident(evaluator: PlanEvaluator, base: FillStrategy, order: Sequence[int]) -> int:
    """Return how many blocks fit in HBM, whatever the host can hold.

    Each additional block needs more HBM, so bisection finds the number.
    """
    low, high = 0, len(order)
    blocks = range(len(evaluator.inventory.blocks))
    while low < high:
        middle = (low + high + 1) // 2
        strategy = replace(base, resident=tuple(sorted(order[:middle])))
        locations = tuple(undecided(evaluator, strategy, i) for i in blocks)
        needed = evaluator.quick_hbm_nbytes(Candidate(locations, base.rounds))
        if needed <= evaluator.capacity(Tier.HBM):
            low = middle
        else:
            high = middle - 1
    return low
