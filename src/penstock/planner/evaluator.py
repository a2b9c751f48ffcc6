"""Evaluate candidates: the bytes they need in each tier, and how long a step takes.

The search evaluates thousands of candidates, so there are two levels of accuracy. `shortage` and
`seconds` are quick: they count buffers without building the candidate's schedule (`QuickSizer`) and
time it with coarse pieces. `exact_shortage` and `cost` build the schedule, and every plan that the
search returns is checked with them, to the byte.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.machine.machine import Machine
from penstock.model.inventory import Block, Inventory
from penstock.plan.activation_overlay import overlaid_activations, overlaid_nbytes
from penstock.plan.budget import Budget
from penstock.plan.buffers import (
    CUDA_CONTEXT,
    BufferPool,
    activation_nbytes,
    attention_micro_nbytes,
    attention_slot_nbytes,
    mailboxes_nbytes,
    micro_batches_per_round,
    pipe_lanes,
    pipe_nbytes,
    plan_pools,
    role_nbytes,
    saved_nbytes,
    states_nbytes,
)
from penstock.plan.build_schedule import step_schedule
from penstock.plan.placement import (
    GPU_PIECE,
    BlockPlacement,
    Home,
    Placement,
    Share,
    SweepSide,
    TransportName,
    stripe,
)
from penstock.plan.schedule import Schedule
from penstock.plan.seats import Ranks, Seat
from penstock.plan.working_memory import WorkingMemory, WorkingMemorySource
from penstock.plan.working_memory_estimate import estimate_working_memory
from penstock.plan.workload import Workload
from penstock.planner.candidate import GROUPS, BlockLocations, Candidate, Location
from penstock.planner.cost import Cost, Rates, StepTimer, estimate
from penstock.planner.drives import DriveWeights, capacity_of
from penstock.planner.staging_pieces import MOST, coarse_piece_elements
from penstock.roles import STATE, TRAINED, Formats, Role
from penstock.tiers import Tier

WEAR = 1e-11
"""Seconds added to a candidate's score per byte stored on NVMe: 100 GB count as one second.

What wears a drive is bytes written. Bytes stored are a proxy that needs no schedule."""

StripeWeights = Mapping[Location, tuple[tuple[Share, float], ...]]
"""For each location, the nodes or paths that it consists of and their weights in a stripe."""


class HbmKey(NamedTuple):
    """What the buffers in HBM depend on."""

    resident: tuple[int, ...]
    """Blocks that are stored in HBM."""

    split: tuple[int, ...]
    """Blocks of which only what is trained is stored in HBM."""

    rounds: int
    """See `Placement.rounds`."""

    slots: int
    """See `Placement.slots`."""

    ahead: int
    """See `Placement.ahead`."""


HbmCache = dict[HbmKey, int]
"""Bytes of buffers in HBM."""


@dataclass(slots=True)
class PlanEvaluator:
    """Evaluates candidates for one model, workload, machine and budget."""

    inventory: Inventory
    """The model."""

    workload: Workload
    """What to train."""

    machine: Machine
    """The machine."""

    budget: Budget
    """How much of each tier may be used."""

    unbounded: bool = False
    """Whether to accept a budget that exceeds the machine's memory. Used to find out which budget
    would be enough."""

    piece_elements: int = MOST
    """See `Placement.piece_elements`."""

    gpu_piece_elements: int = GPU_PIECE
    """See `Placement.gpu_piece_elements`."""

    source: WorkingMemorySource = estimate_working_memory
    """Says how much working memory the model needs."""

    drives: DriveWeights | None = None
    """Weight of each NVMe path in a stripe. By default the budgets, so that all of them can be
    used."""

    seats: tuple[Seat, ...] = ()
    """What each rank of a machine uses; see `Plan.seats`. The budget is that of one rank."""

    transport: TransportName | None = None
    """See `Placement.transport`."""

    memory: WorkingMemory = field(init=False)
    """The model's working memory, from the source."""

    rates: Rates = field(init=False)
    operations_timed: int = field(init=False, default=0)
    """Number of operations of all candidates timed so far."""

    _seconds: dict[Candidate, float] = field(init=False, default_factory=dict)
    _exact_scores: dict[Candidate, float] = field(init=False, default_factory=dict)
    _shortages: dict[Candidate, dict[Tier, int]] = field(init=False, default_factory=dict)
    _stored: dict[Candidate, Counter[Tier]] = field(init=False, default_factory=dict)
    _latest_schedule: tuple[Candidate, Schedule] | None = field(init=False, default=None)
    _sizer: QuickSizer = field(init=False)
    _timer: StepTimer = field(init=False)
    _coarse_elements: int = field(init=False)
    _coarse_states: int = field(init=False)
    _capacities: dict[Tier, int] = field(init=False)
    _blocks: dict[object, BlockPlacement] = field(init=False, default_factory=dict)
    _block_nbytes: dict[tuple[int, BlockLocations, int], Mapping[Tier, int]] = field(
        init=False, default_factory=dict
    )
    _homes: dict[tuple[int, Role, Location, int, bool], Home] = field(
        init=False, default_factory=dict
    )
    _role_sizes: dict[tuple[int, Role, int, bool], int] = field(init=False, default_factory=dict)
    _group_sizes: dict[tuple[int, str, int], int] = field(init=False, default_factory=dict)
    _equal_homes: dict[tuple[int, Role, Location], Home] = field(init=False, default_factory=dict)
    _stripe_weights: StripeWeights = field(init=False)
    _sweep_seconds: dict[tuple[int, BlockLocations, int, bool], tuple[float, float]] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self.inventory = self.workload.stored(self.inventory)
        work, compiled = self.workload, self.workload.numerics.compiled
        self.rates = Rates.of(
            self.machine, work.moments, dtype=work.dtype, compiled=compiled, ranks=self.ranks
        )
        if self.drives is None:
            self.drives = {path.path: float(path.nbytes) for path in self.budget.nvme}
        self._stripe_weights = stripe_weights(self.machine, self.rates, self.drives, self.ranks)
        self._capacities = {tier: self._capacity(tier) for tier in Tier}
        args = (self.inventory, self.workload)
        self.memory = self.source(*args)
        self._sizer = QuickSizer(*args, self.memory, self.context_nbytes, self.placement)
        self._timer = StepTimer(
            *args, self.rates, self.piece_elements, self.gpu_piece_elements, self.ranks
        )
        self._coarse_elements = coarse_piece_elements(self.inventory, self.piece_elements)
        self._coarse_states = coarse_piece_elements(self.inventory, self.gpu_piece_elements)

    @property
    def ranks(self) -> Ranks:
        """The ranks, and which of them share nodes and drives."""
        return Ranks(world=self.workload.world, seats=self.seats)

    # Bytes.

    @property
    def context_nbytes(self) -> int:
        """Bytes of the CUDA context; 0 without a GPU."""
        if not self.machine.gpus:
            return 0
        return CUDA_CONTEXT if self.memory.context is None else self.memory.context

    def capacity(self, tier: Tier) -> int:
        """Return the bytes of a tier that a candidate may use."""
        return self._capacities[tier]

    def with_budget(self, budget: Budget) -> PlanEvaluator:
        """Return an evaluator for another budget that shares results independent of budgets."""
        other = replace(self, budget=budget, drives=None)
        other.use_hbm_cache(self._sizer.hbm_cache)
        other._role_sizes, other._group_sizes = self._role_sizes, self._group_sizes
        return other

    def use_hbm_cache(self, cache: HbmCache) -> None:
        """Use, and add to, a cache of buffer sizes in HBM, which depend on no budget."""
        self._sizer.hbm_cache = cache

    def could_fit(self, rounds: int) -> bool:
        """Return whether all tiers together are large enough for what is stored between steps."""
        groups = [g for g in GROUPS if g not in ("activation", "frozen")]
        blocks = range(len(self.inventory.blocks))
        wanted = sum(self.group_nbytes(i, group, rounds) for i in blocks for group in groups)
        return wanted <= sum(self._capacities.values())

    def _capacity(self, tier: Tier) -> int:
        """Return a tier's budget, or less if a stripe cannot fill every node or drive."""
        limit = self.budget.of(tier)
        if tier is Tier.NVME:
            return min(limit, capacity_of(self.budget, self.drives or {}))
        location = {Tier.CXL: Location.CXL, Tier.DRAM: Location.DRAM}.get(tier)
        if location is not None and not self.unbounded:
            places, ranks = self._stripe_weights[location], self.ranks
            total = sum(weight for _, weight in places)
            for share, weight in places:
                assert share.node is not None
                capacity = ranks.node_capacity(self.machine, share.node)
                limit = min(limit, int(capacity * total / weight))
            return limit if places else 0
        return limit

    def group_nbytes(self, block: int, group: str, rounds: int) -> int:
        """Return the bytes of one group of a block."""
        key = (self.inventory.kinds[block], group, rounds)
        if key not in self._group_sizes:
            roles = GROUPS[group]
            self._group_sizes[key] = sum(self._role_nbytes(block, role, rounds) for role in roles)
        return self._group_sizes[key]

    def stored_nbytes(self, candidate: Candidate) -> Counter[Tier]:
        """Return the bytes stored in each tier, with activations that are not overlaid."""
        if candidate not in self._stored:
            total: Counter[Tier] = Counter()
            for nbytes_by_tier, count in self._nbytes_of_blocks(candidate):
                for tier, nbytes in nbytes_by_tier.items():
                    total[tier] += count * nbytes
            total.update(self._attention_nbytes(candidate))
            total.subtract(self.overlaid_nbytes(candidate))
            self._stored[candidate] = total
        return self._stored[candidate].copy()

    def _attention_nbytes(self, candidate: Candidate) -> Counter[Tier]:
        """Return the bytes of what attention returned, by tier."""
        total: Counter[Tier] = Counter()
        for block in self._block_placements(candidate) if candidate.attention else ():
            home = block.home(Role.ATTENTION)
            for share in home.shares if home else ():
                total[share.tier] += share.nbytes
        return total

    def _nvme_nbytes(self, candidate: Candidate) -> int:
        """Return the bytes stored on NVMe, where no activation is overlaid."""
        blocks = self._nbytes_of_blocks(candidate)
        return sum(count * nbytes.get(Tier.NVME, 0) for nbytes, count in blocks)

    def _nbytes_of_blocks(self, candidate: Candidate) -> Iterator[tuple[Mapping[Tier, int], int]]:
        """Yield the bytes of a block in each tier, and the number of such blocks.

        Blocks of one kind with the same locations need the same bytes.
        """
        alike = Counter(zip(self.inventory.kinds, candidate.placed, strict=True))
        for (kind, locations), count in alike.items():
            yield self._stored_block_nbytes(kind, locations, candidate.rounds), count

    def overlaid_nbytes(self, candidate: Candidate) -> Counter[Tier]:
        """Return the bytes of activations that are stored in the memory of gradients."""
        blocks, rounds = self._block_placements(candidate), candidate.rounds
        return overlaid_nbytes(
            blocks, rounds=rounds, accumulate=self.workload.accumulate,
            in_hbm=self.workload.sums_apart(rounds),
        )  # fmt: skip

    def overlaid_blocks(self, locations: Sequence[BlockLocations], rounds: int) -> set[int]:
        """Return the blocks whose activations are stored in the memory of gradients."""
        blocks = [self._block(i, each, rounds) for i, each in enumerate(locations)]
        overlaid = overlaid_activations(blocks, rounds=rounds, accumulate=self.workload.accumulate)
        return {block for block, _ in overlaid}

    def _stored_block_nbytes(
        self, index: int, locations: BlockLocations, rounds: int
    ) -> Mapping[Tier, int]:
        key = (index, locations, rounds)
        if key not in self._block_nbytes:
            total: Counter[Tier] = Counter()
            for home in self._block(index, locations, rounds).homes:
                for share in home.shares:
                    total[share.tier] += share.nbytes
            self._block_nbytes[key] = dict(total)
        return self._block_nbytes[key]

    def pools(self, candidate: Candidate) -> tuple[BufferPool, ...]:
        """Return the candidate's buffer pools."""
        return plan_pools(
            self.inventory,
            self.workload,
            self.placement(candidate),
            self._schedule(candidate),
            self.memory,
            context_nbytes=self.context_nbytes,
        )

    def _schedule(self, candidate: Candidate) -> Schedule:
        # One entry is enough: the bytes and the cost of a candidate are asked for in succession.
        if self._latest_schedule is None or self._latest_schedule[0] != candidate:
            schedule = step_schedule(self.inventory, self.placement(candidate))
            self._latest_schedule = (candidate, schedule)
        return self._latest_schedule[1]

    def shortage(self, candidate: Candidate) -> dict[Tier, int]:
        """Return, quickly, the bytes by which each tier is too small; empty if it fits."""
        if candidate not in self._shortages:
            short = self._excess(self.stored_nbytes(candidate))
            if not short:
                wanted = self.stored_nbytes(candidate)
                wanted.update(self._sizer.nbytes(candidate))
                short = self._excess(wanted)
            self._shortages[candidate] = short
        return self._shortages[candidate]

    def fits_exactly(self, candidate: Candidate) -> bool:
        """Return whether a candidate fits to the byte."""
        return not (self._excess(self.total_nbytes(candidate)) or self._drive_shortage(candidate))

    def exact_shortage(self, candidate: Candidate) -> dict[Tier, int]:
        """Return the shortage to the byte, and reserve that much from now on.

        A candidate that fits by the quick count may still be a little too large. Lowering the
        capacities by its shortage makes the next search look for a smaller one.
        """
        short = self._excess(self.total_nbytes(candidate))
        on_drives = self._drive_shortage(candidate)
        if on_drives:
            short[Tier.NVME] = max(short.get(Tier.NVME, 0), on_drives)
        if short:
            for tier, nbytes in short.items():
                self._capacities[tier] -= nbytes
            self._shortages.clear()
            self._seconds.clear()
        return short

    def _drive_shortage(self, candidate: Candidate) -> int:
        """Return by how much the bytes on NVMe must shrink until every drive is large enough.

        Stripes consist of whole units, so a drive may get a little more than its part.
        """
        used: Counter[str] = Counter()
        for block in self._block_placements(candidate):
            for home in block.homes:
                for share in home.shares:
                    used[share.path] += share.nbytes
        weights = self.drives or {}
        total = sum(weights.values())
        return max(
            (
                math.ceil((used[path.path] - path.nbytes) * total / weights[path.path])
                for path in self.budget.nvme
                if used[path.path] > path.nbytes
            ),
            default=0,
        )

    def total_nbytes(self, candidate: Candidate) -> Counter[Tier]:
        """Return the bytes that each tier needs, with buffers, to the byte."""
        wanted = self.stored_nbytes(candidate)
        for pool in self.pools(candidate):
            wanted[pool.tier] += pool.nbytes
        return wanted

    def quick_hbm_nbytes(self, candidate: Candidate) -> int:
        """Return, quickly, the bytes of HBM that a candidate needs."""
        return self.stored_nbytes(candidate)[Tier.HBM] + self._sizer.hbm_nbytes(candidate)

    def dram_buffer_nbytes(self, candidate: Candidate) -> int:
        """Return, quickly, the bytes of DRAM for staging and pipes."""
        return self._sizer.nbytes(candidate)[Tier.DRAM]

    def _excess(self, wanted: Mapping[Tier, int]) -> dict[Tier, int]:
        limits = self._capacities
        return {t: wanted[t] - limits[t] for t in Tier if wanted.get(t, 0) > limits[t]}

    # Time.

    def seconds(self, candidate: Candidate) -> float:
        """Return the step time, estimated with coarse pieces; infinite if it does not fit."""
        if candidate not in self._seconds:
            fits = not self.shortage(candidate)
            self._seconds[candidate] = self._time(candidate) if fits else math.inf
        return self._seconds[candidate]

    def _time(self, candidate: Candidate) -> float:
        placement = self._coarse_placement(candidate)
        schedule = step_schedule(self.inventory, placement)
        self.operations_timed += len(schedule.operations)
        return self._timer.seconds(placement, schedule)

    def placement_seconds(self, placement: Placement) -> float:
        """Return the step time of any placement, estimated as `seconds` does it."""
        coarse = self._coarse(placement)
        return self._timer.seconds(coarse, step_schedule(self.inventory, coarse))

    def _coarse_placement(self, candidate: Candidate) -> Placement:
        return self._coarse(self.placement(candidate))

    def _coarse(self, placement: Placement) -> Placement:
        return replace(
            placement,
            piece_elements=self._coarse_elements,
            gpu_piece_elements=self._coarse_states,
        )

    def score(self, candidate: Candidate) -> float:
        """Return the step time plus a little for what is stored on NVMe; lower is better.

        Of two plans that are equally fast, prefer the one that wears the drive less. The bytes
        stored on NVMe stand for the bytes written to it (`WEAR`).
        """
        return self.seconds(candidate) + WEAR * self.stored_nbytes(candidate)[Tier.NVME]

    def score_lower_bound(self, candidate: Candidate) -> float:
        """Return a lower bound of the score without timing the candidate."""
        bound = self._timer.lower_bound(self._coarse_placement(candidate))
        return bound + WEAR * self._nvme_nbytes(candidate)

    def compute_seconds(self, candidate: Candidate) -> float:
        """Return how long the GPU computes. No plan with as many rounds is faster."""
        return self._timer.compute_seconds(self.placement(candidate))

    def sweep_seconds(self, candidate: Candidate, block: int) -> tuple[float, float]:
        """Return how long a sweep of a block takes on the CPU and on the GPU, if alone.

        The block is in host memory.
        """
        locations = candidate.placed[block]
        key = (self.inventory.kinds[block], locations, candidate.rounds, candidate.late)
        if key not in self._sweep_seconds:
            placement = self.placement(replace(candidate, gpu_swept=frozenset()))
            self._sweep_seconds[key] = self._timer.sweep_seconds(placement, block)
        return self._sweep_seconds[key]

    def cost(self, candidate: Candidate) -> Cost:
        """Return the full cost estimate, with pieces of the planned size."""
        placement, schedule = self.placement(candidate), self._schedule(candidate)
        return estimate(
            self.inventory, self.workload, placement, self.rates,
            schedule=schedule, ranks=self.ranks,
        )  # fmt: skip

    def exact_score(self, candidate: Candidate) -> float:
        """Return the score with pieces of the planned size."""
        if candidate not in self._exact_scores:
            seconds = self.cost(candidate).step_seconds
            worn = WEAR * self.stored_nbytes(candidate)[Tier.NVME]
            self._exact_scores[candidate] = seconds + worn
        return self._exact_scores[candidate]

    # From locations to placements.

    def placement(self, candidate: Candidate) -> Placement:
        """Return the candidate as a placement."""
        return Placement(
            rounds=candidate.rounds,
            slots=candidate.slots,
            ahead=candidate.ahead,
            piece_elements=self.piece_elements,
            sweeps_interleaved=candidate.interleaved,
            gpu_piece_elements=self.gpu_piece_elements,
            staging_node=self.rates.staging_node,
            transport=self.transport,
            blocks=self._block_placements(candidate),
        )

    def _block_placements(self, candidate: Candidate) -> tuple[BlockPlacement, ...]:
        rounds = candidate.rounds
        return tuple(
            self._block(
                i, each, rounds, candidate.kept_of(i), i in candidate.gpu_swept,
                candidate.attention_of(i), late=candidate.has_late_moments(i),
            )
            for i, each in enumerate(candidate.placed)
        )  # fmt: skip

    def _block(
        self,
        index: int,
        locations: BlockLocations,
        rounds: int,
        kept: int = 0,
        gpu: bool = False,
        attention: Location | None = None,
        *,
        late: bool = False,
    ) -> BlockPlacement:
        key = (index, locations, rounds, kept, gpu, attention, late)
        if key not in self._blocks:
            block = self._make_block(index, locations, rounds)
            side: SweepSide = "gpu" if gpu else block.sweep
            if kept or late or side != block.sweep:
                block = replace(block, kept=kept, sweep=side, late_moments=late)
            self._blocks[key] = self._with_attention(index, block, rounds, attention)
        return self._blocks[key]

    def _with_attention(
        self, index: int, block: BlockPlacement, rounds: int, location: Location | None
    ) -> BlockPlacement:
        """Return the block with saved results of attention for all passes that are not kept."""
        passes = micro_batches_per_round(self.workload, rounds) - block.kept
        model = self.inventory.blocks[index]
        if location is None or passes < 1 or not model.heads:
            return block
        nbytes = passes * attention_micro_nbytes(model, self.workload)
        home = self._equal_home(nbytes, Role.ATTENTION, location)
        return replace(block, homes=(*block.homes, home), attention=passes)

    def _make_block(self, index: int, locations: BlockLocations, rounds: int) -> BlockPlacement:
        homes: list[Home] = []
        formats = self.workload.formats(rounds)
        for group, location in locations._asdict().items():
            if location is not None:
                split = locations.is_split
                # A layer without norms and biases has no second moments with Muon.
                homes += [
                    self.home(index, role, location, rounds, split=split)
                    for role in GROUPS[group]
                    if formats.has(role) and self._role_nbytes(index, role, rounds, split=split)
                ]
        side: SweepSide = "gpu" if locations.weight is Location.HBM else "cpu"
        if locations.state is None:
            side = "none"
        name = self.inventory.blocks[index].name
        return BlockPlacement(block=name, homes=tuple(homes), sweep=side)

    def home(
        self, block: int, role: Role, location: Location, rounds: int, *, split: bool = False
    ) -> Home:
        """Return the home of a role in a location.

        Without `split`, the weights include those that are frozen.
        Equal homes are one object, because the cost model's caches identify homes by `id`.
        """
        key = (block, role, location, rounds, split)
        if key not in self._homes:
            nbytes = self._role_nbytes(block, role, rounds, split=split)
            if role is Role.WEIGHT and location is Location.HBM:
                nbytes *= self.inventory.shards  # whole on every rank: see `role_nbytes`
            self._homes[key] = self._equal_home(nbytes, role, location)
        return self._homes[key]

    def _equal_home(self, nbytes: int, role: Role, location: Location) -> Home:
        value = (nbytes, role, location)
        if value not in self._equal_homes:
            shares = stripe(nbytes, self._stripe_weights[location])
            self._equal_homes[value] = Home(role=role, shares=shares)
        return self._equal_homes[value]

    def _role_nbytes(self, block: int, role: Role, rounds: int, *, split: bool = False) -> int:
        if role is Role.ACTIVATION:
            return activation_nbytes(self.inventory, self.workload, rounds)
        key = (self.inventory.kinds[block], role, rounds, split)
        if key not in self._role_sizes:
            model, formats = self.inventory.blocks[block], self.workload.formats(rounds)
            nbytes = role_nbytes(model, role, formats, self.piece_elements, split=split)
            self._role_sizes[key] = nbytes
        return self._role_sizes[key]


def stripe_weights(
    machine: Machine, rates: Rates, drives: DriveWeights, ranks: Ranks
) -> StripeWeights:
    """Return the nodes or paths of each location of a rank, with their weights in a stripe."""
    dram, cxl = (
        [(Share(tier=node.tier, nbytes=0, node=node.id), node.id) for node in ranks.nodes(nodes)]
        for nodes in (machine.dram_nodes, machine.cxl_nodes)
    )
    # A node that fewer ranks share is faster for each of them.
    sweep = {id: rates.nodes[id].sweep / ranks.on_node(id) for _, id in [*dram, *cxl]}
    paths = [(Share(tier=Tier.NVME, nbytes=0, path=path), w) for path, w in drives.items()]
    return {
        Location.HBM: ((Share(tier=Tier.HBM, nbytes=0), 1.0),),
        Location.DRAM: tuple((share, sweep[id]) for share, id in dram),
        Location.MIX: tuple((share, sweep[id]) for share, id in [*dram, *cxl]),
        Location.CXL: tuple((share, rates.nodes[id].to_gpu) for share, id in cxl),
        Location.NVME: tuple(paths),
    }


class _PieceRun(NamedTuple):
    """Pieces of one block that pass through staging one after the other."""

    head: tuple[int, ...]
    """Bytes of the first pieces: those that can be in staging together with the previous run."""

    tail: tuple[int, ...]
    """Bytes of the last pieces: those that can be in staging together with the next run."""

    peak: int
    """The most bytes of this run in staging at the same time."""


@dataclass(slots=True)
class QuickSizer:
    """Sizes a candidate's buffers without building its schedule.

    HBM buffers depend on which blocks are streamed, not on the tier they come from, so they are the
    same for most candidates. Pieces pass through staging in sequence, and only a few are there at a
    time. The result is the most bytes alive at any time. Packing may need slightly more.
    """

    inventory: Inventory
    """The model."""

    workload: Workload
    """What to train."""

    memory: WorkingMemory
    """The model's working memory."""

    context_nbytes: int
    """Bytes of the CUDA context."""

    placement: Callable[[Candidate], Placement]
    """Converts a candidate to a placement."""

    hbm_cache: HbmCache = field(default_factory=dict)
    """Sizes of buffers in HBM computed before. They depend on no budget."""

    _runs: dict[object, _PieceRun] = field(init=False, default_factory=dict)

    def nbytes(self, candidate: Candidate) -> dict[Tier, int]:
        """Return the bytes of buffers in HBM and DRAM."""
        placement = self.placement(candidate)
        pipes = len(pipe_lanes(self.workload, placement))
        dram = pipes * pipe_nbytes(self.inventory, self.workload, placement)
        dram += self._staging_nbytes(candidate, placement)
        dram += mailboxes_nbytes(self.inventory, self.workload, placement)
        return {Tier.HBM: self.hbm_nbytes(candidate), Tier.DRAM: dram}

    def hbm_nbytes(self, candidate: Candidate) -> int:
        """Return the bytes of buffers in HBM, as if everything outside HBM were in DRAM.

        Activations have buffers of a fixed size, so it does not matter where they are stored.
        """
        resident = tuple(i for i, each in enumerate(candidate.locations) if each.resident)
        split = tuple(i for i, each in enumerate(candidate.locations) if each.is_split)
        key = HbmKey(resident, split, candidate.rounds, candidate.slots, candidate.ahead)
        if key not in self.hbm_cache:
            locations = tuple(map(_in_hbm_or_dram, candidate.locations))
            others = replace(
                candidate, locations=locations, kept=(), gpu_swept=frozenset(), attention=(),
                late=False, late_on_nvme=frozenset(),
            )  # fmt: skip
            placement = self.placement(others)
            pools = plan_pools(
                self.inventory,
                self.workload,
                placement,
                step_schedule(self.inventory, placement),
                self.memory,
                context_nbytes=self.context_nbytes,
            )
            self.hbm_cache[key] = sum(pool.nbytes for pool in pools if pool.tier is Tier.HBM)
        added = self._kept_nbytes(candidate) + self._states_nbytes(candidate)
        return self.hbm_cache[key] + added + self._attention_slot_nbytes(candidate)

    def _attention_slot_nbytes(self, candidate: Candidate) -> int:
        """Return the bytes of the slot for results of attention that are stored outside HBM."""
        if not candidate.attention:
            return 0
        return attention_slot_nbytes(self.inventory, self.workload, self.placement(candidate))

    def _states_nbytes(self, candidate: Candidate) -> int:
        """Return the bytes of pieces in HBM that the GPU sweeps there."""
        if not candidate.gpu_swept:
            return 0
        placement, formats = self.placement(candidate), self.workload.formats(candidate.rounds)
        pieces = [
            _piece_nbytes(self.inventory.blocks[i], formats, TRAINED, piece)
            for i in candidate.gpu_swept
            for piece in self.inventory.blocks[i].pieces(placement.gpu_piece_elements)
        ]
        packed = min(len(pieces), placement.pieces_staged) * max(pieces)
        return states_nbytes(packed, on_gpu=self.context_nbytes > 0)

    def _kept_nbytes(self, candidate: Candidate) -> int:
        """Return the bytes of saved tensors, and of the streamed weights that they refer to."""
        if not candidate.kept:
            return 0
        placement = self.placement(candidate)
        homes = (
            at.streamed
            for at, each in zip(placement.blocks, candidate.locations, strict=True)
            if at.kept and not each.resident
        )
        sizes = sorted(self.inventory.shards * home.nbytes for home in homes if home is not None)
        # One of them is in a slot in any case.
        return saved_nbytes(self.workload, placement, self.memory) + sum(sizes[:-1])

    def _staging_nbytes(self, candidate: Candidate, placement: Placement) -> int:
        """Return the most bytes in staging: pieces of sweeps in forward, weights in backward."""
        window = placement.pieces_staged
        formats = self.workload.formats(candidate.rounds)
        peak = 0
        before: tuple[int, ...] = ()
        for block, roles in _reads(candidate):
            run = self._run(block, roles, placement, formats)
            peak = max(peak, run.peak, _window_peak(before + run.head, window))
            before = (before + run.tail)[1 - window :]
        return peak

    def _run(
        self, block: int, roles: tuple[Role, ...], placement: Placement, formats: Formats
    ) -> _PieceRun:
        key = (self.inventory.kinds[block], roles, formats.wide_gradient)
        if key not in self._runs:
            model = self.inventory.blocks[block]
            step, window = placement.piece_elements, placement.pieces_staged
            trained = model.pieces(step) if roles != (Role.FROZEN,) else ()
            streamed = Role.WEIGHT in roles or Role.FROZEN in roles
            frozen = model.pieces(step, trainable=False) if streamed else ()
            sizes = [_piece_nbytes(model, formats, roles, piece) for piece in trained]
            sizes += [_piece_nbytes(model, formats, (Role.WEIGHT,), piece) for piece in frozen]
            head, tail = tuple(sizes[: window - 1]), tuple(sizes[1 - window :])
            self._runs[key] = _PieceRun(head, tail, _window_peak(tuple(sizes), window))
        return self._runs[key]


def _reads(candidate: Candidate) -> Iterator[tuple[int, tuple[Role, ...]]]:
    """Yield what is read from NVMe into staging, by block, approximately in step order."""
    for block, locations in enumerate(candidate.locations):
        roles: tuple[Role, ...] = (Role.WEIGHT,) if locations.weight is Location.NVME else ()
        roles += (Role.FROZEN,) if locations.frozen is Location.NVME else ()
        roles += STATE if locations.state is Location.NVME else ()
        roles += (Role.GRADIENT,) if locations.gradient is Location.NVME else ()
        if roles:
            yield block, roles
    for block in range(len(candidate.locations) - 1, -1, -1):
        if candidate.locations[block].weight is Location.NVME:
            yield block, (Role.WEIGHT,)
        elif candidate.locations[block].frozen is Location.NVME:
            yield block, (Role.FROZEN,)


def _in_hbm_or_dram(locations: BlockLocations) -> BlockLocations:
    """Replace every location outside HBM by DRAM, and keep the activation in HBM."""
    place = Location.HBM if locations.weight is Location.HBM else Location.DRAM
    weight, state, gradient, activation, frozen = locations
    return BlockLocations(
        weight=weight and place,
        state=state and place,
        gradient=gradient and place,
        activation=activation and Location.HBM,
        frozen=frozen and Location.DRAM,
    )


def _piece_nbytes(
    block: Block, formats: Formats, roles: tuple[Role, ...], piece: tuple[int, int]
) -> int:
    return sum(formats.at_rest(role, block.role_elements(role, *piece)) for role in roles)


def _window_peak(sizes: tuple[int, ...], window: int) -> int:
    """Return the largest sum of `window` consecutive sizes."""
    return max((sum(sizes[k : k + window]) for k in range(len(sizes))), default=0)
