"""Placements drawn at random, and a walker that carries schedules out on paper."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from penstock.model.inventory import Block, Inventory
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.placement import Placement
from penstock.plan.schedule import Operation, Schedule, Verb
from penstock.plan.weight_window import PlacementIndex
from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.roles import Role
from penstock.units import TiB
from tests.support.machines import machine
from tests.support.models import llama, work

HOST = (Location.DRAM, Location.CXL, Location.NVME)
WHOLE = 1 << 26
"""A piece that holds any block of these models."""


def evaluator_for(
    layers: int, tied: bool, batch: int = 4, *, frozen: int = 0, piece: int = WHOLE, **more: object
) -> PlanEvaluator:
    """`frozen` has a bit for each tensor of a block, counted round."""
    model = llama("tiny", 256, 512, layers, 256, 128, 1000, tied)
    if frozen:
        model = replace(model, blocks=tuple(freeze(block, frozen) for block in model.blocks))
    budget = Budget(hbm=TiB, dram=TiB, cxl=TiB, nvme=(PathBudget(path="/mnt/nvme", nbytes=TiB),))
    asked = work(model, 128, batch, micro_batch=1, **more)
    return PlanEvaluator(model, asked, machine(), budget, piece_elements=piece)


def freeze(block: Block, mask: int) -> Block:
    tensors = tuple(
        replace(t, trainable=not mask >> (i % 4) & 1) for i, t in enumerate(block.tensors)
    )
    return replace(block, tensors=tensors)


def all_on(evaluator: PlanEvaluator, location: Location) -> Candidate:
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
    evaluator = evaluator_for(
        draw(st.integers(1, 6)),
        draw(st.booleans()),
        frozen=draw(st.sampled_from((0, 0, 1, 6, 15))),
        piece=draw(st.sampled_from((WHOLE, 1 << 18, 1 << 16))),
        accumulate=draw(st.booleans()),
    )
    ahead = draw(st.integers(1, 3))
    candidate = Candidate(
        tuple(draw(spots_of(block)) for block in evaluator.inventory.blocks),
        rounds=draw(st.integers(1, 3)),
        slots=ahead + draw(st.integers(1, 3)),
        ahead=ahead,
    )
    return evaluator, candidate


@st.composite
def spots_of(draw: st.DrawFn, block: Block) -> BlockLocations:
    resident = draw(st.booleans())
    trained = bool(block.parameters(True))
    host = st.sampled_from(HOST)
    state = Location.HBM if resident else draw(st.sampled_from((*HOST, Location.MIX)))
    gradient = Location.HBM if resident else draw(host)
    return BlockLocations(
        weight=(Location.HBM if resident else draw(host)) if block.tensors else None,
        state=state if trained else None,
        gradient=gradient if trained else None,
        input=draw(st.sampled_from((*HOST, Location.HBM))) if block.kind == "layer" else None,
    )


class Walker:
    """Carries a schedule out on paper, one operation at a time, and complains."""

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
        self.parts: dict[int, set[int]] = {}  # pieces of a block's weights that have come
        self.staged: list[tuple[int, int | None, tuple[Role, ...]]] = []
        self.swept: set[tuple[int, int | None]] = set()
        self.written: set[tuple[int, int | None]] = set()
        self.out: set[tuple[int, Role, int]] = set()
        self.computed: list[tuple[Verb, int, int]] = []

    def run(self, schedule: Schedule) -> None:
        for operation in schedule.operations:
            getattr(self, operation.verb.value)(operation)
        assert not self.hbm, "nothing is left in HBM"
        assert not self.staged, "nothing is left in staging"

    def sweeps_of(self, block: int) -> set[tuple[int, int | None]]:
        """Everything that must be swept of a block, in the pieces it is swept in."""
        if not self.pending or self.placement.blocks[block].sweep == "none":
            return set()
        if not self.facts.staged_roles(block):
            return {(block, None)}
        return {(block, piece) for piece in range(self.facts.pieces[block])}

    def read(self, op: Operation) -> None:
        key = (op.block, op.piece)
        if op.roles == (Role.WEIGHT,) and key in self.swept:
            assert key in self.written, "what is read again was written"
        self.staged.append((op.block, op.piece, op.roles))

    def release(self, op: Operation) -> None:
        self.staged.remove((op.block, op.piece, op.roles))

    def write(self, op: Operation) -> None:
        assert (op.block, op.piece) in self.swept, "only what is new is written"
        assert Role.GRADIENT not in op.roles, "the sweep only read it"
        assert any(op.block == b and op.piece == p for b, p, _ in self.staged), "from staging"
        self.written.add((op.block, op.piece))

    def sweep(self, op: Operation) -> None:
        assert self.pending
        assert (op.block, op.piece) in self.sweeps_of(op.block)
        assert (op.block, op.piece) not in self.swept, "swept once"
        assert not any(b == op.block for _, b, _ in self.computed), "before it computes"
        if needed := self.facts.staged_roles(op.block):
            assert (op.block, op.piece, needed) in self.staged, "what it needs is in staging"
        self.swept.add((op.block, op.piece))

    def fetch(self, op: Operation) -> None:
        (role,) = op.roles
        if op.piece is not None and not self._piece_came(op):
            return
        assert (op.block, role) not in self.hbm, "nothing is fetched twice"
        if role is Role.WEIGHT:
            assert self.sweeps_of(op.block) <= self.swept, "only fresh weights"
        if role is Role.INPUT or (role is Role.GRADIENT and not self.adds):
            before = op.round - 1 if role is Role.GRADIENT else op.round
            assert (op.block, role, before) in self.out, "what went out comes back"
        self.hbm.add((op.block, role))

    def _piece_came(self, op: Operation) -> bool:
        """Whether it was the last one."""
        assert op.piece is not None
        held = [r for b, p, r in self.staged if (b, p) == (op.block, op.piece)]
        assert any(Role.WEIGHT in roles for roles in held), "a piece comes from staging"
        if op.piece < self.facts.pieces[op.block] and self.sweeps_of(op.block):
            assert (op.block, op.piece) in self.swept, "only fresh pieces"
        came = self.parts.setdefault(op.block, set())
        assert op.piece not in came, "no piece comes twice"
        came.add(op.piece)
        return len(came) == self.facts.pieces[op.block] + self.facts.frozen_pieces[op.block]

    def drop(self, op: Operation) -> None:
        self.hbm.discard((op.block, op.roles[0]))
        if op.roles == (Role.WEIGHT,):
            self.parts.pop(op.block, None)

    def drain(self, op: Operation) -> None:
        (role,) = op.roles
        self.out.add((op.block, role, op.round))
        self.hbm.discard((op.block, role))

    def _compute(self, op: Operation) -> None:
        for owner in self.facts.owners(op.block):
            if self.facts.weight_in_hbm(owner):
                assert self.sweeps_of(owner) <= self.swept, "a resident block is swept first"
            elif not (op.verb is Verb.BACKWARD and op.block == 0):
                assert (owner, Role.WEIGHT) in self.hbm, "nothing computes that is not there"
        if op.verb is Verb.BACKWARD and self.facts.offloads_input(op.block):
            assert (op.block, Role.INPUT) in self.hbm, "its input is back"
        if op.phase == "backward" and (op.round or self.adds):
            for block in self.facts.adds_to(op.block):
                if self.facts.gradient_leaves(block):
                    assert (block, Role.GRADIENT) in self.hbm, "the sum so far is back"
        self.computed.append((op.verb, op.block, op.round))

    forward = loss = backward = _compute
