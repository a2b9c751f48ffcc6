"""First candidates: tiers filled from the fastest, group by group. Room: decide.

Latency-critical groups come first where the fast tiers are scarce, but which groups those are
depends on the work: so several orders are tried and the cost model judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.planner.candidate import GROUPS, TIERS, BlockLocations, Candidate, Location
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

PREFERENCES: tuple[dict[str, tuple[Location, ...]], ...] = (
    {"state": (Location.DRAM, Location.MIX, Location.CXL, Location.NVME)},
    {"state": (Location.MIX, Location.DRAM, Location.CXL, Location.NVME)},
    {
        "state": (Location.DRAM, Location.MIX, Location.CXL, Location.NVME),
        "weight": (Location.CXL, Location.DRAM, Location.NVME),
        "input": (Location.CXL, Location.DRAM, Location.NVME),
    },
)
"""Where each group looks for room, first candidate first; the last two matter with CXL only."""

OTHERS = (Location.DRAM, Location.CXL, Location.NVME)


@dataclass(frozen=True, slots=True)
class FillStrategy:
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


def fill(evaluator: PlanEvaluator, recipe: FillStrategy) -> Candidate | None:
    """A candidate that fits, or None."""
    reserve: Counter[Tier] = Counter()
    for _ in range(4):
        candidate = _fill_once(evaluator, recipe, reserve)
        if candidate is None:
            return None
        short = evaluator.shortage(candidate)
        if not short:
            return candidate
        if set(short) - {Tier.DRAM}:
            return None
        # Staging shows only when it is known what goes to NVMe: leave room for it and try again.
        reserve[Tier.DRAM] += short[Tier.DRAM]
    return None


def _fill_once(
    evaluator: PlanEvaluator, recipe: FillStrategy, reserve: Counter[Tier]
) -> Candidate | None:
    room = {tier: evaluator.capacity(tier) - reserve[tier] for tier in Tier}
    locations = [undecided(evaluator, recipe, i) for i in range(len(evaluator.inventory.blocks))]
    for groups, blocks in _turns(recipe, locations):
        wants = PREFERENCES[recipe.preference].get("+".join(groups), OTHERS)
        open_blocks = [i for i in blocks if getattr(locations[i], groups[0]) is Location.DRAM]
        if groups == ("input",):  # those that are lent a place take none
            lent = evaluator.lendable(locations, recipe.rounds)
            open_blocks = [i for i in open_blocks if i not in lent]
        for location in wants:
            if not all(evaluator.capacity(tier) for tier in TIERS[location]):
                continue
            took = _take(evaluator, groups, location, open_blocks, room, recipe.rounds)
            for i in took:
                locations[i] = locations[i]._replace(**dict.fromkeys(groups, location))
            open_blocks = [i for i in open_blocks if i not in took]
        if open_blocks:
            return None
    return Candidate(tuple(locations), recipe.rounds, recipe.slots, recipe.ahead)


def _turns(
    recipe: FillStrategy, locations: Sequence[BlockLocations]
) -> Iterator[tuple[tuple[str, ...], Sequence[int]]]:
    """Which groups of which blocks take room, first to last."""
    for group in recipe.order:
        if group == BLOCK:
            frozen = [i for i, location in enumerate(locations) if location.state is None]
            yield from ((("state", "gradient", "weight"), (i,)) for i in range(len(locations)))
            yield ("weight",), frozen
        else:
            yield (group,), range(len(locations))


def undecided(evaluator: PlanEvaluator, recipe: FillStrategy, index: int) -> BlockLocations:
    """Everything to be placed says DRAM; what the block does not have, None."""
    block = evaluator.inventory.blocks[index]
    trained, layer = bool(block.parameters(True)), block.kind == "layer"
    home = Location.HBM if index in recipe.resident else Location.DRAM
    last = len(evaluator.inventory.blocks) - 2
    keeps_input = index > last - recipe.hbm_inputs
    return BlockLocations(
        weight=home if block.tensors else None,
        state=home if trained else None,
        gradient=home if trained else None,
        input=(Location.HBM if keeps_input else Location.DRAM) if layer else None,
    )


def _take(
    evaluator: PlanEvaluator, groups: tuple[str, ...], location: Location, blocks: Sequence[int],
    room: dict[Tier, int], rounds: int,
) -> set[int]:  # fmt: skip
    """As many as fit: the outer blocks, which are largest, and layers spread evenly, so that what
    a slower tier must do is spread over the step too."""
    if not blocks:
        return set()
    layers = [i for i in blocks if evaluator.inventory.blocks[i].kind == "layer"]
    order = [i for i in blocks if i not in layers] + spread(layers)
    taken = set()
    for i in order:
        wanted = _by_tier(evaluator, i, groups, location, rounds)
        if all(room[tier] >= nbytes for tier, nbytes in wanted.items()):
            for tier, nbytes in wanted.items():
                room[tier] -= nbytes
            taken.add(i)
    return taken


def _by_tier(
    evaluator: PlanEvaluator, block: int, groups: tuple[str, ...], location: Location, rounds: int
) -> Counter[Tier]:
    found: Counter[Tier] = Counter()
    for role in (role for group in groups for role in GROUPS[group]):
        for share in evaluator.home(block, role, location, rounds).shares:
            found[share.tier] += share.nbytes
    return found


def spread(layers: Sequence[int]) -> list[int]:
    """Any first part of the order lies evenly over the row."""
    golden = 0.6180339887498949
    return sorted(layers, key=lambda i: ((i * golden) % 1.0, i))


def residents(evaluator: PlanEvaluator, rounds: int) -> list[tuple[int, ...]]:
    """Blocks to keep in HBM: as many as it holds, in two orders; half of them; none.

    First layers, whose sweep would be waited for. Where disks are used also last ones: the others'
    gradients then lend room to more inputs."""
    count = len(evaluator.inventory.blocks)
    outer = [i for i in (0, count - 1) if evaluator.inventory.blocks[i].tensors]
    layers = list(range(1, count - 1))
    found: list[tuple[int, ...]] = []
    for order in ([*outer, *layers], [*layers, *outer]):
        most = _most(evaluator, FillStrategy(rounds=rounds), order)
        found += [tuple(sorted(order[:number])) for number in (most, most // 2)]
    if evaluator.capacity(Tier.NVME):
        number = max(0, len(found[0]) - len(outer))
        found.insert(0, tuple(sorted([*outer, *layers[len(layers) - number :]])))
    return list(dict.fromkeys([*found, ()]))


def _most(evaluator: PlanEvaluator, base: FillStrategy, order: Sequence[int]) -> int:
    """How many blocks HBM holds, whatever the host can do, by bisection: each more takes more."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        resident = tuple(sorted(order[:middle]))
        recipe = replace(base, resident=resident)
        locations = tuple(
            undecided(evaluator, recipe, i) for i in range(len(evaluator.inventory.blocks))
        )
        if evaluator.hbm_needs(Candidate(locations, base.rounds)) <= evaluator.capacity(Tier.HBM):
            low = middle
        else:
            high = middle - 1
    return low
