"""First candidates: tiers filled from the fastest, group by group. Room: decide.

Latency-critical groups come first where the fast tiers are scarce, but which groups those are
depends on the work: so several orders are tried and the cost model judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.planner.choice import GROUPS, TIERS, BlockSpots, Choice, Spot
from penstock.planner.evaluator import PlanEvaluator
from penstock.tiers import Tier

BLOCK = "block"
"""State, gradient and weight of one block in one place, from the first block on. What is left for
the slow tiers is then the end of the row, whose turn comes last, so that a disk can begin with it
at once."""

ORDERS: tuple[tuple[str, ...], ...] = (
    ("state", "gradient", "weight", "input"),
    ("state", "gradient", "input", "weight"),
    ("gradient", "weight", "input", "state"),
    ("input", "weight", "gradient", "state"),
    ("weight", "gradient", "state", "input"),
    ("input", BLOCK),
    (BLOCK, "input"),
)
"""Which group gets the fast tiers first. The sweep's own comes first by default; where states must
go to disk anyway, the others are better off in DRAM."""

PREFERENCES: tuple[dict[str, tuple[Spot, ...]], ...] = (
    {"state": (Spot.DRAM, Spot.MIX, Spot.CXL, Spot.NVME)},
    {"state": (Spot.MIX, Spot.DRAM, Spot.CXL, Spot.NVME)},
    {
        "state": (Spot.DRAM, Spot.MIX, Spot.CXL, Spot.NVME),
        "weight": (Spot.CXL, Spot.DRAM, Spot.NVME),
        "input": (Spot.CXL, Spot.DRAM, Spot.NVME),
    },
)
"""Where each group looks for room, first choice first; the last two matter with CXL only."""

OTHERS = (Spot.DRAM, Spot.CXL, Spot.NVME)


@dataclass(frozen=True, slots=True)
class FillOrder:
    """How to fill."""

    order: tuple[str, ...] = ORDERS[0]
    """Which group first."""

    preference: int = 0
    """Which of PREFERENCES."""

    resident: tuple[int, ...] = ()
    """Blocks that live in HBM."""

    hbm_inputs: int = 0
    """Layers, from the last, whose inputs stay in HBM: they are needed again soonest."""

    rounds: int = 1
    """See Placement."""

    slots: int = 2
    """See Placement."""

    ahead: int = 1
    """See Placement."""


def fill(desk: PlanEvaluator, recipe: FillOrder) -> Choice | None:
    """A candidate that fits, or None."""
    reserve: Counter[Tier] = Counter()
    for _ in range(4):
        choice = _fill_once(desk, recipe, reserve)
        if choice is None:
            return None
        short = desk.shortage(choice)
        if not short:
            return choice
        if set(short) - {Tier.DRAM}:
            return None
        # Staging shows only when it is known what goes to NVMe: leave room for it and try again.
        reserve[Tier.DRAM] += short[Tier.DRAM]
    return None


def _fill_once(desk: PlanEvaluator, recipe: FillOrder, reserve: Counter[Tier]) -> Choice | None:
    room = {tier: desk.capacity(tier) - reserve[tier] for tier in Tier}
    spots = [undecided(desk, recipe, i) for i in range(len(desk.inventory.blocks))]
    for groups, blocks in _turns(recipe, spots):
        wants = PREFERENCES[recipe.preference].get("+".join(groups), OTHERS)
        open_blocks = [i for i in blocks if getattr(spots[i], groups[0]) is Spot.DRAM]
        if groups == ("input",):  # those that are lent a place take none
            lent = desk.lendable(spots, recipe.rounds)
            open_blocks = [i for i in open_blocks if i not in lent]
        for spot in wants:
            if not all(desk.capacity(tier) for tier in TIERS[spot]):
                continue
            took = _take(desk, groups, spot, open_blocks, room, recipe.rounds)
            for i in took:
                spots[i] = spots[i]._replace(**dict.fromkeys(groups, spot))
            open_blocks = [i for i in open_blocks if i not in took]
        if open_blocks:
            return None
    return Choice(tuple(spots), recipe.rounds, recipe.slots, recipe.ahead)


def _turns(
    recipe: FillOrder, spots: Sequence[BlockSpots]
) -> Iterator[tuple[tuple[str, ...], Sequence[int]]]:
    """Which groups of which blocks take room, first to last."""
    for group in recipe.order:
        if group == BLOCK:
            frozen = [i for i, spot in enumerate(spots) if spot.state is None]
            yield from ((("state", "gradient", "weight"), (i,)) for i in range(len(spots)))
            yield ("weight",), frozen
        else:
            yield (group,), range(len(spots))


def undecided(desk: PlanEvaluator, recipe: FillOrder, index: int) -> BlockSpots:
    """Everything to be placed says DRAM; what the block does not have, None."""
    block = desk.inventory.blocks[index]
    trained, layer = bool(block.parameters(True)), block.kind == "layer"
    home = Spot.HBM if index in recipe.resident else Spot.DRAM
    last = len(desk.inventory.blocks) - 2
    keeps_input = index > last - recipe.hbm_inputs
    return BlockSpots(
        weight=home if block.tensors else None,
        state=home if trained else None,
        gradient=home if trained else None,
        input=(Spot.HBM if keeps_input else Spot.DRAM) if layer else None,
    )


def _take(
    desk: PlanEvaluator, groups: tuple[str, ...], spot: Spot, blocks: Sequence[int],
    room: dict[Tier, int], rounds: int,
) -> set[int]:  # fmt: skip
    """As many as fit: the outer blocks, which are largest, and layers spread evenly, so that what
    a slower tier must do is spread over the step too."""
    if not blocks:
        return set()
    layers = [i for i in blocks if desk.inventory.blocks[i].kind == "layer"]
    order = [i for i in blocks if i not in layers] + spread(layers)
    taken = set()
    for i in order:
        wanted = _by_tier(desk, i, groups, spot, rounds)
        if all(room[tier] >= nbytes for tier, nbytes in wanted.items()):
            for tier, nbytes in wanted.items():
                room[tier] -= nbytes
            taken.add(i)
    return taken


def _by_tier(
    desk: PlanEvaluator, block: int, groups: tuple[str, ...], spot: Spot, rounds: int
) -> Counter[Tier]:
    found: Counter[Tier] = Counter()
    for role in (role for group in groups for role in GROUPS[group]):
        for share in desk.home(block, role, spot, rounds).shares:
            found[share.tier] += share.nbytes
    return found


def spread(layers: Sequence[int]) -> list[int]:
    """Any first part of the order lies evenly over the row."""
    golden = 0.6180339887498949
    return sorted(layers, key=lambda i: ((i * golden) % 1.0, i))


def residents(desk: PlanEvaluator, rounds: int) -> list[tuple[int, ...]]:
    """Blocks to keep in HBM: as many as it holds, in two orders; half of them; none.

    First layers, whose sweep would be waited for. Where disks are used also last ones: the others'
    gradients then lend room to more inputs."""
    count = len(desk.inventory.blocks)
    outer = [i for i in (0, count - 1) if desk.inventory.blocks[i].tensors]
    layers = list(range(1, count - 1))
    found: list[tuple[int, ...]] = []
    for order in ([*outer, *layers], [*layers, *outer]):
        most = _most(desk, FillOrder(rounds=rounds), order)
        found += [tuple(sorted(order[:number])) for number in (most, most // 2)]
    if desk.capacity(Tier.NVME):
        number = max(0, len(found[0]) - len(outer))
        found.insert(0, tuple(sorted([*outer, *layers[len(layers) - number :]])))
    return list(dict.fromkeys([*found, ()]))


def _most(desk: PlanEvaluator, base: FillOrder, order: Sequence[int]) -> int:
    """How many blocks HBM holds, whatever the host can do, by bisection: each more takes more."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        resident = tuple(sorted(order[:middle]))
        recipe = replace(base, resident=resident)
        spots = tuple(undecided(desk, recipe, i) for i in range(len(desk.inventory.blocks)))
        if desk.hbm_needs(Choice(spots, base.rounds)) <= desk.capacity(Tier.HBM):
            low = middle
        else:
            high = middle - 1
    return low
