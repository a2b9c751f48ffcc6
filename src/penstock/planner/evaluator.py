"""The places that each location stands for, and their weights in a stripe. Room: decide."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.machine.machine import Machine
from penstock.model.inventory import Inventory
from penstock.plan.activation_overlay import overlaid_activations, overlaid_nbytes
from penstock.plan.budget import Budget
from penstock.plan.buffers import (
    CUDA_CONTEXT,
    Pool,
    input_nbytes,
    pipe_lanes,
    pipe_nbytes,
    pools,
    role_nbytes,
)
from penstock.plan.build_schedule import step_schedule
from penstock.plan.placement import BlockPlacement, Home, Placement, Share, SweepSide, stripe
from penstock.plan.schedule import Schedule
from penstock.plan.workload import Workload
from penstock.planner.candidate import GROUPS, BlockLocations, Candidate, Location
from penstock.planner.cost import Cost, Rates, StepTimer, estimate
from penstock.planner.staging_pieces import MOST, coarse
from penstock.roles import STATE, Formats, Role
from penstock.tiers import Tier


def places(
    machine: Machine, rates: Rates, budget: Budget
) -> Mapping[Location, tuple[tuple[Share, float], ...]]:
    """The places of each location, with their weights in a stripe."""
    dram = [(Share(tier=Tier.DRAM, nbytes=0, node=n.id), rates.nodes[n.id]) for n in
            machine.dram_nodes]  # fmt: skip
    cxl = [(Share(tier=Tier.CXL, nbytes=0, node=n.id), rates.nodes[n.id]) for n in
           machine.cxl_nodes]  # fmt: skip
    paths = [(Share(tier=Tier.NVME, nbytes=0, path=p.path), float(p.nbytes)) for p in budget.nvme]
    return {
        Location.HBM: ((Share(tier=Tier.HBM, nbytes=0), 1.0),),
        Location.DRAM: tuple((share, node.sweep) for share, node in dram),
        Location.MIX: tuple((share, node.sweep) for share, node in [*dram, *cxl]),
        Location.CXL: tuple((share, node.to_gpu) for share, node in cxl),
        Location.NVME: tuple(paths),
    }


# --------
# What a candidate takes beside what rests, without writing its schedule. Room: decide.
#
# The search asks this of thousands. What passes through HBM depends on who streams, not on where
# it
# comes from, so it is the same for most of them; what passes through staging is a row of pieces
# of
# which a few are there at a time. This is the most that lives at once, and packing may take a
# little
# more: a plan that is handed out is counted to the byte, from its schedule.


class _Run(NamedTuple):
    """Pieces of one block that pass through staging one after the other."""

    head: tuple[int, ...]
    """Bytes of the first of them: those that may meet what came before."""

    tail: tuple[int, ...]
    """Bytes of the last."""

    most: int
    """The most at once, of its own."""


@dataclass(slots=True)
class QuickSizer:
    """For one model, one workload and one size of pieces."""

    inventory: Inventory
    """The model."""

    workload: Workload
    """What is to be done."""

    context_nbytes: int
    """What the driver takes."""

    placement: Callable[[Candidate], Placement]
    """How a candidate is written out."""

    known_hbm: dict[Candidate, int] = field(default_factory=dict)
    """Of candidates asked about before. Depends on no budget."""

    _runs: dict[object, _Run] = field(init=False, default_factory=dict)

    def of(self, candidate: Candidate) -> dict[Tier, int]:
        placement = self.placement(candidate)
        pipes = len(pipe_lanes(self.workload, placement))
        dram = pipes * pipe_nbytes(self.inventory, self.workload, placement)
        dram += self._staging(candidate, placement)
        return {Tier.HBM: self.hbm(candidate), Tier.DRAM: dram}

    def hbm(self, candidate: Candidate) -> int:
        """As if everything outside HBM were in DRAM."""
        locations = tuple(map(_nearer, candidate.locations))
        alike = Candidate(locations, candidate.rounds, candidate.slots, candidate.ahead)
        if alike not in self.known_hbm:
            placement = self.placement(alike)
            found = pools(
                self.inventory,
                self.workload,
                placement,
                step_schedule(self.inventory, placement),
                context_nbytes=self.context_nbytes,
            )
            self.known_hbm[alike] = sum(pool.nbytes for pool in found if pool.tier is Tier.HBM)
        return self.known_hbm[alike]

    def _staging(self, candidate: Candidate, placement: Placement) -> int:
        """The most of it at once: the sweeps' pieces on the way forth, weights on the way back."""
        window = placement.pieces_staged
        formats = self.workload.formats(candidate.rounds)
        most = 0
        before: tuple[int, ...] = ()
        for block, roles in _reads(candidate):
            run = self._run(block, roles, placement, formats)
            joined = before + run.head
            most = max(most, run.most, _most(joined, window))
            before = (before + run.tail)[1 - window :]
        return most

    def _run(
        self, block: int, roles: tuple[Role, ...], placement: Placement, formats: Formats
    ) -> _Run:
        model, step, window = (
            self.inventory.blocks[block],
            placement.piece_elements,
            placement.pieces_staged,
        )
        trained = model.pieces(step)
        frozen = model.pieces(step, trainable=False) if Role.WEIGHT in roles else ()
        key = (trained, frozen, roles, formats)
        if key not in self._runs:
            sizes = [_nbytes(formats, roles, piece) for piece in trained]
            sizes += [_nbytes(formats, (Role.WEIGHT,), piece) for piece in frozen]
            head, tail = tuple(sizes[: window - 1]), tuple(sizes[1 - window :])
            self._runs[key] = _Run(head, tail, _most(tuple(sizes), window))
        return self._runs[key]


def _reads(candidate: Candidate) -> Iterator[tuple[int, tuple[Role, ...]]]:
    """What is read from NVMe into staging, block by block, in about the order of a step."""
    for block, locations in enumerate(candidate.locations):
        roles: tuple[Role, ...] = (Role.WEIGHT,) if locations.weight is Location.NVME else ()
        roles += STATE if locations.state is Location.NVME else ()
        roles += (Role.GRADIENT,) if locations.gradient is Location.NVME else ()
        if roles:
            yield block, roles
    for block in range(len(candidate.locations) - 1, -1, -1):
        if candidate.locations[block].weight is Location.NVME:
            yield block, (Role.WEIGHT,)


def _nearer(locations: BlockLocations) -> BlockLocations:
    def near(location: Location | None) -> Location | None:
        return location if location is None or location is Location.HBM else Location.DRAM

    return BlockLocations(*map(near, locations))


def _nbytes(formats: Formats, roles: tuple[Role, ...], piece: tuple[int, int]) -> int:
    return sum(formats.at_rest(role, piece[1] - piece[0]) for role in roles)


def _most(sizes: tuple[int, ...], window: int) -> int:
    return max((sum(sizes[k : k + window]) for k in range(len(sizes))), default=0)


# --------
# Weighs candidates: their bytes to the byte, and their time by the cost model. Room: decide.

WEAR = 1e-11
"""Seconds per byte: 100 GB on NVMe weigh as much as one second of step time."""


@dataclass(slots=True)
class PlanEvaluator:
    """One model, one workload, one machine, one budget."""

    inventory: Inventory
    """The model."""

    workload: Workload
    """What is to be done."""

    machine: Machine
    """Where."""

    budget: Budget
    """With what."""

    unbounded: bool = False
    """Believe the budget even where the machine has less: to say what would be enough."""

    piece_elements: int = MOST
    """See Placement."""

    rates: Rates = field(init=False)
    weighed: dict[Candidate, float] = field(init=False, default_factory=dict)
    timed: int = field(init=False, default=0)
    """Operations of the candidates timed so far."""

    _short: dict[Candidate, dict[Tier, int]] = field(init=False, default_factory=dict)
    _latest: tuple[Candidate, Schedule] | None = field(init=False, default=None)
    _quick: QuickSizer = field(init=False)
    _stopwatch: StepTimer = field(init=False)
    _coarse: int = field(init=False)
    _capacities: dict[Tier, int] = field(init=False)
    _blocks: dict[tuple[int, BlockLocations, int], BlockPlacement] = field(
        init=False, default_factory=dict
    )
    _demands: dict[tuple[int, BlockLocations, int], tuple[tuple[Tier, int], ...]] = field(
        init=False, default_factory=dict
    )
    _homes: dict[tuple[int, Role, Location, int], Home] = field(init=False, default_factory=dict)
    _sizes: dict[object, int] = field(init=False, default_factory=dict)
    _alike: dict[tuple[int, Role, Location], Home] = field(init=False, default_factory=dict)
    _places: Mapping[Location, tuple[tuple[Share, float], ...]] = field(init=False)

    def __post_init__(self) -> None:
        compiled = self.workload.numerics.compiled
        self.rates = Rates.of(self.machine, self.workload.moments, compiled=compiled)
        self._places = places(self.machine, self.rates, self.budget)
        self._capacities = {tier: self._capacity(tier) for tier in Tier}
        args = (self.inventory, self.workload)
        self._quick = QuickSizer(*args, self.context_nbytes, self.placement)
        self._stopwatch = StepTimer(*args, self.rates, issued=self.piece_elements)
        self._coarse = coarse(self.inventory, self.piece_elements)

    # Bytes.

    @property
    def context_nbytes(self) -> int:
        return CUDA_CONTEXT if self.machine.gpus else 0

    def capacity(self, tier: Tier) -> int:
        return self._capacities[tier]

    def with_budget(self, budget: Budget) -> PlanEvaluator:
        """The same for another budget, with what does not depend on it."""
        other = replace(self, budget=budget)
        other.remember(self._quick.known_hbm)
        return other

    def remember(self, known: dict[Candidate, int]) -> None:
        """Use, and add to, what HBM takes for candidates, which depends on no budget."""
        self._quick.known_hbm = known

    def room_for_all(self, rounds: int) -> bool:
        """Whether all tiers together could hold what rests: if not, nothing else need be asked."""
        groups = [g for g in GROUPS if g != "input"]
        blocks = range(len(self.inventory.blocks))
        wanted = sum(self.nbytes(i, group, rounds) for i in blocks for group in groups)
        return wanted <= sum(self._capacities.values())

    def _capacity(self, tier: Tier) -> int:
        """The budget, or less where a stripe by bandwidth cannot use all of every node."""
        limit = self.budget.of(tier)
        location = {Tier.CXL: Location.CXL, Tier.DRAM: Location.DRAM}.get(tier)
        if location is not None and not self.unbounded:
            places = self._places[location]
            total = sum(weight for _, weight in places)
            for share, weight in places:
                assert share.node is not None
                limit = min(limit, int(self.machine.node(share.node).capacity * total / weight))
            return limit if places else 0
        return limit

    def nbytes(self, block: int, group: str, rounds: int) -> int:
        return sum(self._role_nbytes(block, role, rounds) for role in GROUPS[group])

    def demand(self, candidate: Candidate) -> Counter[Tier]:
        """Bytes that rest in each tier, inputs included that are lent no place."""
        found: Counter[Tier] = Counter()
        for index, locations in enumerate(candidate.locations):
            for tier, nbytes in self._block_demand(index, locations, candidate.rounds):
                found[tier] += nbytes
        found.subtract(self.lent(candidate))
        return found

    def lent(self, candidate: Candidate) -> Counter[Tier]:
        """Bytes of inputs that rest where gradients leave room."""
        blocks = [self._block(i, s, candidate.rounds) for i, s in enumerate(candidate.locations)]
        return overlaid_nbytes(blocks, rounds=candidate.rounds, accumulate=self.workload.accumulate)

    def lendable(self, locations: Sequence[BlockLocations], rounds: int) -> set[int]:
        """The blocks whose inputs do."""
        blocks = [self._block(i, s, rounds) for i, s in enumerate(locations)]
        return set(overlaid_activations(blocks, rounds=rounds, accumulate=self.workload.accumulate))

    def _block_demand(
        self, index: int, locations: BlockLocations, rounds: int
    ) -> tuple[tuple[Tier, int], ...]:
        key = (index, locations, rounds)
        if key not in self._demands:
            block = self._block(index, locations, rounds)
            pairs = ((s.tier, s.nbytes) for home in block.homes for s in home.shares)
            self._demands[key] = tuple(pairs)
        return self._demands[key]

    def pools(self, candidate: Candidate) -> tuple[Pool, ...]:
        return pools(
            self.inventory,
            self.workload,
            self.placement(candidate),
            self._schedule(candidate),
            context_nbytes=self.context_nbytes,
        )

    def _schedule(self, candidate: Candidate) -> Schedule:
        """The bytes and the time of one candidate are asked for one after the other."""
        if self._latest is None or self._latest[0] != candidate:
            self._latest = (candidate, step_schedule(self.inventory, self.placement(candidate)))
        return self._latest[1]

    def shortage(self, candidate: Candidate) -> dict[Tier, int]:
        """Bytes by which each tier is too small; empty if it fits. Quick: see `lacks`."""
        if candidate not in self._short:
            short = self._over(self.demand(candidate))
            if not short:
                wanted = self.demand(candidate)
                wanted.update(self._quick.of(candidate))
                short = self._over(wanted)
            self._short[candidate] = short
        return self._short[candidate]

    def lacks(self, candidate: Candidate) -> dict[Tier, int]:
        """The same, to the byte. What it finds is left free from now on, so that another candidate
        may be looked for."""
        short = self._over(self.needs(candidate))
        if short:
            for tier, nbytes in short.items():
                self._capacities[tier] -= nbytes
            self._short.clear()
            self.weighed.clear()
        return short

    def needs(self, candidate: Candidate) -> Counter[Tier]:
        """Bytes that each tier must have, all in all, to the byte."""
        wanted = self.demand(candidate)
        for pool in self.pools(candidate):
            wanted[pool.tier] += pool.nbytes
        return wanted

    def hbm_needs(self, candidate: Candidate) -> int:
        """Of those, what HBM must have."""
        return self.demand(candidate)[Tier.HBM] + self._quick.hbm(candidate)

    def _over(self, wanted: Mapping[Tier, int]) -> dict[Tier, int]:
        room = self._capacities
        return {t: wanted[t] - room[t] for t in Tier if wanted.get(t, 0) > room[t]}

    # Time.

    def seconds(self, candidate: Candidate) -> float:
        """The step's time, with pieces no smaller than it takes to tell; infinite if it does not
        fit."""
        if candidate not in self.weighed:
            self.weighed[candidate] = (
                math.inf if self.shortage(candidate) else self._time(candidate)
            )
        return self.weighed[candidate]

    def _time(self, candidate: Candidate) -> float:
        placement = replace(self.placement(candidate), piece_elements=self._coarse)
        schedule = step_schedule(self.inventory, placement)
        self.timed += len(schedule.operations)
        return self._stopwatch.seconds(placement, schedule)

    def at_least(self, candidate: Candidate) -> float:
        """What its score cannot be below, without timing it."""
        placement = self.placement(candidate)
        return self._stopwatch.at_least(placement) + WEAR * self.demand(candidate)[Tier.NVME]

    def computing(self, candidate: Candidate) -> float:
        """What the GPU computes: with so many rounds, no plan is faster."""
        return self._stopwatch.computing(self.placement(candidate))

    def score(self, candidate: Candidate) -> float:
        """The step's time, and a little for what rests on NVMe: of two plans that are equally
        fast, the one that writes less lets the drive live longer."""
        return self.seconds(candidate) + WEAR * self.demand(candidate)[Tier.NVME]

    def cost(self, candidate: Candidate) -> Cost:
        placement, schedule = self.placement(candidate), self._schedule(candidate)
        return estimate(self.inventory, self.workload, placement, self.rates, schedule=schedule)

    # From locations to homes.

    def placement(self, candidate: Candidate) -> Placement:
        return Placement(
            rounds=candidate.rounds,
            slots=candidate.slots,
            ahead=candidate.ahead,
            piece_elements=self.piece_elements,
            blocks=tuple(
                self._block(i, s, candidate.rounds) for i, s in enumerate(candidate.locations)
            ),
        )

    def _block(self, index: int, locations: BlockLocations, rounds: int) -> BlockPlacement:
        key = (index, locations, rounds)
        if key not in self._blocks:
            self._blocks[key] = self._make_block(index, locations, rounds)
        return self._blocks[key]

    def _make_block(self, index: int, locations: BlockLocations, rounds: int) -> BlockPlacement:
        homes: list[Home] = []
        for group, location in locations._asdict().items():
            if location is not None:
                homes += [self.home(index, role, location, rounds) for role in GROUPS[group]]
        side: SweepSide = (
            "none" if locations.state is None else "gpu" if locations.resident else "cpu"
        )
        name = self.inventory.blocks[index].name
        return BlockPlacement(block=name, homes=tuple(homes), sweep=side)

    def home(self, block: int, role: Role, location: Location, rounds: int) -> Home:
        key = (block, role, location, rounds)
        if key not in self._homes:
            nbytes = self._role_nbytes(block, role, rounds)
            alike = (nbytes, role, location)
            if alike not in self._alike:
                self._alike[alike] = Home(role=role, shares=stripe(nbytes, self._places[location]))
            self._homes[key] = self._alike[alike]
        return self._homes[key]

    def _role_nbytes(self, block: int, role: Role, rounds: int) -> int:
        if role is Role.INPUT:
            return input_nbytes(self.inventory, self.workload, rounds)
        model, step = self.inventory.blocks[block], self.piece_elements
        key = (model.pieces(step), model.pieces(step, trainable=False), role, rounds)
        if key not in self._sizes:
            self._sizes[key] = role_nbytes(model, role, self.workload.formats(rounds), step)
        return self._sizes[key]
