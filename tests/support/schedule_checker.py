"""Random placements for hypothesis, and a checker that executes schedules symbolically."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from penstock.model.inventory import Block, Inventory
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.placement import Placement
from penstock.plan.placement_index import PlacementIndex
from penstock.plan.schedule import Operation, Schedule, Verb
from penstock.plan.workload import Attention
from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.roles import MOMENTS, PASSING, TRAINED, WEIGHTS, Role
from penstock.units import TiB
from tests.support.machines import machine
from tests.support.models import llama, work

HOST = (Location.DRAM, Location.CXL, Location.NVME)
ATTENTION = (None, None, Location.HBM, Location.DRAM, Location.CXL)
WHOLE = 1 << 26
"""A piece size in elements that is larger than any block of these models."""


def evaluator_for(
    layers: int,
    tied: bool,
    batch: int = 4,
    *,
    frozen: int = 0,
    piece: int = WHOLE,
    gpu_piece: int = WHOLE,
    linear: bool = True,
    attention: Attention = "sdpa",
    **more: object,
) -> PlanEvaluator:
    """Return an evaluator for a tiny model.

    `frozen` is a mask of four bits: tensor i of each block is frozen if bit i modulo 4 is set.
    Unless `linear`, the backward of the embedding needs its weights.
    """
    model = llama("tiny", 256, 512, layers, 256, 128, 1000, tied)
    model = replace(model, linear_embedding=linear)
    if frozen:
        model = replace(model, blocks=tuple(freeze(block, frozen) for block in model.blocks))
    budget = Budget(hbm=TiB, dram=TiB, cxl=TiB, nvme=(PathBudget(path="/mnt/nvme", nbytes=TiB),))
    workload = work(model, 128, batch, micro_batch=1, **more)
    workload = replace(workload, numerics=replace(workload.numerics, attention=attention))
    return PlanEvaluator(
        model, workload, machine(), budget, piece_elements=piece, gpu_piece_elements=gpu_piece
    )


def freeze(block: Block, mask: int) -> Block:
    """Freeze the tensors of a block whose bit in `mask` is set."""
    tensors = tuple(
        replace(t, trainable=not mask >> (i % 4) & 1) for i, t in enumerate(block.tensors)
    )
    return replace(block, tensors=tensors)


def all_on(evaluator: PlanEvaluator, location: Location) -> Candidate:
    """Place every role of every block on one location."""
    return Candidate(
        tuple(
            BlockLocations(
                location, location, location, location if block.kind == "layer" else None
            )
            for block in evaluator.inventory.blocks
        )
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[PlanEvaluator, Candidate]:
    """Draw a model, a workload and a placement."""
    evaluator = evaluator_for(
        draw(st.integers(1, 6)),
        draw(st.booleans()),
        frozen=draw(st.sampled_from((0, 0, 1, 6, 15))),
        piece=draw(st.sampled_from((WHOLE, 1 << 18, 1 << 16))),
        gpu_piece=draw(st.sampled_from((WHOLE, 1 << 17, 1 << 16))),
        accumulate=draw(st.booleans()),
        linear=draw(st.booleans()),
        world=draw(st.sampled_from((1, 1, 2, 3))),
        attention="varlen",
    )
    ahead = draw(st.integers(1, 3))
    locations = tuple(draw(locations_of(block)) for block in evaluator.inventory.blocks)
    candidate = Candidate(
        locations,
        rounds=draw(st.integers(1, 3)),
        slots=ahead + draw(st.integers(1, 3)),
        ahead=ahead,
        gpu_swept=frozenset(
            i
            for i, each in enumerate(locations)
            if evaluator.inventory.shards == 1
            and may_pass_through_hbm(each)
            and draw(st.booleans())
        ),
        attention=tuple(
            draw(st.sampled_from(ATTENTION)) if block.kind == "layer" else None
            for block in evaluator.inventory.blocks
        ),
        interleaved=(interleaved := draw(st.booleans())),
        late=not interleaved and evaluator.inventory.shards == 1 and draw(st.booleans()),
        late_on_nvme=frozenset(
            i
            for i, each in enumerate(locations)
            if evaluator.inventory.shards == 1
            and each.state is Location.NVME
            and draw(st.booleans())
        ),
    )
    return evaluator, candidate


def may_pass_through_hbm(locations: BlockLocations) -> bool:
    """Return whether the GPU may sweep a block that is stored in host memory."""
    trained = {locations.weight, locations.state, locations.gradient}
    return trained <= {Location.DRAM, Location.CXL, Location.MIX}


@st.composite
def locations_of(draw: st.DrawFn, block: Block) -> BlockLocations:
    """Draw the locations of one block: entirely in HBM, or streamed from any mix of tiers.

    Of a block with an adapter, HBM may have what is trained.
    """
    trained = bool(block.parameters(True))
    host = st.sampled_from(HOST)
    split = trained and bool(block.parameters(False)) and block.shards == 1 and draw(st.booleans())
    resident = split or draw(st.booleans())
    state = Location.HBM if resident else draw(st.sampled_from((*HOST, Location.MIX)))
    gradient = Location.HBM if resident else draw(host)
    return BlockLocations(
        weight=(Location.HBM if resident else draw(host)) if block.tensors else None,
        state=state if trained else None,
        gradient=gradient if trained else None,
        activation=draw(st.sampled_from((*HOST, Location.HBM))) if block.kind == "layer" else None,
        frozen=draw(host) if split else None,
    )


class ScheduleChecker:
    """Execute a schedule symbolically, one operation at a time, and assert that it is correct.

    The checker tracks which roles are in HBM and in staging, which pieces were swept and written,
    and what was offloaded. It moves no bytes. There is one method per verb of the schedule.
    """

    def __init__(
        self,
        inventory: Inventory,
        placement: Placement,
        *,
        pending: bool = True,
        adds: bool = False,
    ) -> None:
        self.facts = PlacementIndex.of(inventory, placement)
        self.placement, self.pending, self.adds = placement, pending, adds
        self.hbm: set[tuple[int, Role]] = set()
        self.parts: dict[int, set[int]] = {}  # pieces of a block's weights fetched so far
        self.staged: list[tuple[int, int | None, tuple[Role, ...]]] = []
        self.passing: set[tuple[int, int | None]] = set()  # pieces in HBM that the GPU sweeps
        self.swept: set[tuple[int, int | None]] = set()
        self.late: set[tuple[int, int | None]] = set()  # swept without their moments
        self.swept_in_parts: set[tuple[int, int | None]] = set()  # the same, and moments later
        self.written: set[tuple[int, int | None]] = set()
        self.moments_written: set[tuple[int, int | None]] = set()
        self.out: set[tuple[int, Role, int]] = set()
        self.ranks = inventory.shards
        self.gathered: set[int] = set()  # blocks with the weights of all ranks in HBM
        self.sent: set[tuple[int, int]] = set()  # gradients of micro-batches, by block and round
        self.exchanged: set[tuple[int, int]] = set()
        self.met = False
        self.computed: list[tuple[Verb, int, int]] = []
        self.listed_order = False

    def run(self, schedule: Schedule) -> None:
        self.listed_order = True
        self.run_operations(schedule.operations)

    def run_operations(self, operations: Sequence[Operation]) -> None:
        """Execute operations in another order than that of the schedule."""
        self.trains = any(operation.verb is Verb.BACKWARD for operation in operations)
        for operation in operations:
            assert operation.phase in ("forward", "backward"), operation
            assert 0 <= operation.round < self.placement.rounds, operation
            getattr(self, operation.verb.name.lower())(operation)
        assert not self.hbm, "HBM is empty at the end"
        assert not self.staged, "staging is empty at the end"
        assert not self.passing, "no states are in HBM at the end"
        assert not self.late, "all moments are updated at the end"
        for block in range(self.facts.count):
            if set(self.facts.staged_roles(block)) & set(MOMENTS):
                swept = {key for key in self.swept if key[0] == block}
                assert swept <= self.moments_written, "all moments on NVMe are written"
        assert not self.sent, "nothing waits to be sent at the end"
        assert self.met == (self.ranks > 1 and bool(self.computed)), "ranks meet once"

    def sweeps_of(self, block: int) -> set[tuple[int, int | None]]:
        """Return the sweeps that a block needs: one, or one per piece if it is in pieces."""
        if not self.pending or self.placement.blocks[block].sweep == "none":
            return set()
        in_pieces = self.facts.streams_states(block) or self.facts.interleaves(block)
        if not self.facts.staged_roles(block) and not in_pieces:
            return {(block, None)}
        return {(block, piece) for piece in range(self.facts.pieces[block])}

    def read(self, op: Operation) -> None:
        key = (op.block, op.piece)
        if op.roles == (Role.WEIGHT,) and key in self.swept:
            assert key in self.written, "weights are read again only after they were written"
        self.staged.append((op.block, op.piece, op.roles))
        if self.listed_order:
            assert len(self.staged) <= self.placement.pieces_staged, "staging holds so many pieces"

    def release(self, op: Operation) -> None:
        self.staged.remove((op.block, op.piece, op.roles))

    def write(self, op: Operation) -> None:
        key = (op.block, op.piece)
        assert key in self.swept, "only swept pieces are written"
        assert Role.GRADIENT not in op.roles, "the sweep does not change gradients"
        assert any(key == (b, p) and set(op.roles) <= set(roles) for b, p, roles in self.staged), (
            "a write needs staged bytes"
        )
        if set(op.roles) & set(MOMENTS):
            assert key not in self.late, "moments are written after their sweep"
        changed = set(TRAINED)
        if key in self.swept_in_parts:
            changed = set(WEIGHTS if op.phase == "forward" else MOMENTS)
        staged = set(self.facts.staged_roles(op.block)) - {Role.GRADIENT}
        assert set(op.roles) == staged & changed, "all that a sweep changes is written"
        self.moments_written |= {key} if set(MOMENTS) & set(op.roles) else set()
        self.written.add(key)

    def sweep(self, op: Operation) -> None:
        assert self.pending
        if op.roles == MOMENTS:
            self._sweep_moments(op)
            return
        assert (op.block, op.piece) in self.sweeps_of(op.block)
        assert (op.block, op.piece) not in self.swept, "a piece is swept only once"
        assert not any(b == op.block for _, b, _ in self.computed), (
            "a block is swept before it computes"
        )
        if needed := self.facts.staged_roles(op.block):
            assert (op.block, op.piece, needed) in self.staged, "the sweep's inputs are in staging"
        if self.facts.streams_states(op.block):
            assert op.gpu
            assert (op.block, op.piece) in self.passing, "the sweep's inputs are in HBM"
        self.swept.add((op.block, op.piece))
        if op.roles == WEIGHTS:
            self.late.add((op.block, op.piece))
            self.swept_in_parts.add((op.block, op.piece))
        else:
            assert op.roles == TRAINED, "a sweep updates everything, or the weights first"

    def _sweep_moments(self, op: Operation) -> None:
        assert (op.block, op.piece) in self.late, "moments are updated once, after the weights"
        if self.facts.streams_states(op.block):
            assert self.sweeps_of(op.block) <= self.written, "swept weights are in host memory"
        if staged := self.facts.staged_roles(op.block):
            needed = tuple(role for role in staged if role not in WEIGHTS)
            assert (op.block, op.piece, needed) in self.staged, "moments are in staging"
        assert not any((op.block, Role.GRADIENT, r) in self.out for r in range(op.round + 1)), (
            "moments are updated before the gradient is replaced"
        )
        self.late.remove((op.block, op.piece))

    def fetch(self, op: Operation) -> None:
        if op.gpu:
            assert op.roles == TRAINED, "a sweep needs everything that is trained"
            assert (op.block, op.piece) not in self.swept | self.passing, "a piece is swept once"
            self.passing.add((op.block, op.piece))
            if self.listed_order:
                assert len(self.passing) <= self.placement.pieces_staged, "HBM has so many pieces"
            return
        (role,) = op.roles
        if op.piece is not None and not self._fetch_piece(op):
            return
        assert (op.block, role) not in self.hbm, "nothing is fetched twice"
        if role is Role.WEIGHT and not self.facts.is_split(op.block):
            assert self.sweeps_of(op.block) <= self.swept, (
                "weights are fetched only after the sweep"
            )
            if self.facts.streams_states(op.block):
                assert self.sweeps_of(op.block) <= self.written, "swept weights are in host memory"
        if role in PASSING or (role is Role.GRADIENT and not self.adds):
            before = op.round - 1 if role is Role.GRADIENT else op.round
            assert (op.block, role, before) in self.out, "only offloaded bytes are fetched"
        if role in PASSING and op.block + 2 < self.facts.count:
            backward = {(b, r) for verb, b, r in self.computed if verb is not Verb.FORWARD}
            assert (op.block + 2, op.round) in backward, "its buffer is that of two blocks before"
        self.hbm.add((op.block, role))

    def _fetch_piece(self, op: Operation) -> bool:
        """Record that a piece of the weights was fetched; return whether it was the last one."""
        assert op.piece is not None
        staged = [r for b, p, r in self.staged if (b, p) == (op.block, op.piece)]
        assert any(Role.WEIGHT in roles for roles in staged), "a piece is fetched from staging"
        if op.piece < self.facts.pieces[op.block] and self.sweeps_of(op.block):
            assert (op.block, op.piece) in self.swept, "a piece is fetched only after its sweep"
        fetched = self.parts.setdefault(op.block, set())
        assert op.piece not in fetched, "no piece is fetched twice"
        fetched.add(op.piece)
        trained = 0 if self.facts.is_split(op.block) else self.facts.pieces[op.block]
        return len(fetched) == trained + self.facts.frozen_pieces[op.block]

    def drop(self, op: Operation) -> None:
        if op.gpu:
            assert (op.block, op.piece) in self.written, "a swept piece is offloaded first"
            self.passing.remove((op.block, op.piece))
            return
        if not op.roles:
            assert (op.block, op.round) in self.exchanged, "what is sent is dropped afterwards"
            self.sent.remove((op.block, op.round))
            return
        self.hbm.discard((op.block, op.roles[0]))
        if op.roles == (Role.WEIGHT,):
            self.parts.pop(op.block, None)
            self.gathered.discard(op.block)

    def gather(self, op: Operation) -> None:
        assert self.ranks > 1
        if self.facts.weight_in_hbm(op.block):
            assert self.sweeps_of(op.block) <= self.swept, "a shard is swept before it is gathered"
        else:
            assert (op.block, Role.WEIGHT) in self.hbm, "a shard is fetched before it is gathered"
        assert op.block not in self.gathered, "nothing is gathered twice"
        self.gathered.add(op.block)

    def exchange(self, op: Operation) -> None:
        assert (op.block, op.round) in self.sent, "gradients are computed before they are sent"
        self._check_sums(op)
        self.exchanged.add((op.block, op.round))

    def meet(self, op: Operation) -> None:
        assert not self.met
        assert self.sent == self.exchanged & self.sent, "ranks meet when all gradients are summed"
        self.met = True

    def offload(self, op: Operation) -> None:
        if op.gpu:
            assert (op.block, op.piece) in self.swept & self.passing, "only swept pieces leave"
            if self.facts.has_late_moments(op.block):
                assert op.roles == WEIGHTS, "moments stay as they are until the CPU updates them"
                self.late.add((op.block, None))
            else:
                assert set(op.roles) == set(TRAINED) - {Role.GRADIENT}, "all that a sweep changes"
            self.written.add((op.block, op.piece))
            return
        (role,) = op.roles
        if role is Role.GRADIENT and self.ranks > 1:
            assert (op.block, op.round) in self.exchanged, "gradients are summed by their owners"
        self.out.add((op.block, role, op.round))
        self.hbm.discard((op.block, role))

    def _compute(self, op: Operation) -> None:
        backward = op.verb is Verb.BACKWARD
        owners = self.facts.owned_in_backward if backward else self.facts.owned
        for owner in owners[op.block]:
            if self.facts.weight_in_hbm(owner) or self.facts.is_split(owner):
                assert self.sweeps_of(owner) <= self.swept, "a resident block is swept first"
            if not self.facts.weight_in_hbm(owner):
                assert (owner, Role.WEIGHT) in self.hbm, (
                    "weights are in HBM before a block computes"
                )
            if self.ranks > 1 and (self.sweeps_of(owner) or not self.facts.weight_in_hbm(owner)):
                assert owner in self.gathered, "a block computes with the weights of all ranks"
        before = op.block - 1
        leaves = self.trains and before >= 0 and self.facts.offloads_activation(before)
        if op.verb is Verb.FORWARD and leaves:
            # The output of a block is written over the input of the block before it.
            assert (before, Role.ACTIVATION, op.round) in self.out, "an activation leaves in time"
        if op.verb is Verb.FORWARD and before > 0 and self.trains:
            # Results of attention have one slot.
            leaves = self.facts.offloads_attention(before - 1)
            out = (before - 1, Role.ATTENTION, op.round) in self.out
            assert out or not leaves, "results of attention leave in time"
        if op.verb is Verb.BACKWARD and self.facts.offloads_attention(op.block):
            assert (op.block, Role.ATTENTION) in self.hbm, (
                "results of attention are in HBM before backward"
            )
        if op.verb is Verb.BACKWARD and self.facts.offloads_activation(op.block):
            assert (op.block, Role.ACTIVATION) in self.hbm, (
                "the activation is in HBM before backward"
            )
        if op.phase == "backward" and self.ranks == 1:
            self._check_sums(op)
        if op.phase == "backward" and self.ranks > 1 and self.facts.adds_to(op.block):
            self.sent.add((op.block, op.round))
        self.computed.append((op.verb, op.block, op.round))

    def _check_sums(self, op: Operation) -> None:
        for block in self.facts.adds_to(op.block) if op.round or self.adds else ():
            if self.facts.gradient_leaves(block):
                assert (block, Role.GRADIENT) in self.hbm, "the gradient sum so far is in HBM"

    forward = loss = backward = _compute
