"""The order of a step keeps its promises for every placement."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.budget import Budget, PathBudget
from penstock.inventory import Inventory
from penstock.lifetimes import gradient_lifetimes, staging_lifetimes, weight_lifetimes
from penstock.packing import pack, peak_nbytes
from penstock.placement_parts import Placement
from penstock.planner.choice import BlockSpots, Choice, Spot
from penstock.planner.desk import Desk
from penstock.roles import Role
from penstock.schedule import COMPUTE, Operation, Schedule, Verb
from penstock.step_facts import StepFacts
from penstock.step_order import step_schedule
from penstock.tiers import Tier
from penstock.units import TiB
from tests.machines import machine
from tests.models import llama, work

HOST = (Spot.DRAM, Spot.CXL, Spot.NVME)


def desk_for(layers: int, tied: bool, batch: int = 4) -> Desk:
    model = llama("tiny", 256, 512, layers, 256, 128, 1000, tied)
    budget = Budget(hbm=TiB, dram=TiB, cxl=TiB, nvme=(PathBudget(path="/mnt/nvme", nbytes=TiB),))
    return Desk(model, work(model, 128, batch, micro_batch=1), machine(), budget)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Desk, Choice]:
    layers = draw(st.integers(1, 6))
    desk = desk_for(layers, draw(st.booleans()))
    spots = []
    for block in desk.inventory.blocks:
        resident = draw(st.booleans())
        host = st.sampled_from(HOST)
        spots.append(
            BlockSpots(
                weight=Spot.HBM if resident else draw(host),
                state=Spot.HBM if resident else draw(st.sampled_from((*HOST, Spot.MIX))),
                gradient=Spot.HBM if resident else draw(host),
                input=draw(st.sampled_from((*HOST, Spot.HBM))) if block.kind == "layer" else None,
            )
        )
    ahead = draw(st.integers(1, 3))
    choice = Choice(
        tuple(spots),
        rounds=draw(st.integers(1, 3)),
        slots=ahead + draw(st.integers(1, 3)),
        ahead=ahead,
    )
    return desk, choice


class Walker:
    """Carries a schedule out on paper, one operation at a time, and complains."""

    def __init__(self, inventory: Inventory, placement: Placement) -> None:
        self.facts = StepFacts.of(inventory, placement)
        self.placement = placement
        self.hbm: set[tuple[int, Role]] = set()
        self.parts: dict[int, int] = {}  # pieces of a block's weights that have come
        self.staged: list[tuple[int, int | None, tuple[Role, ...]]] = []
        self.swept: set[tuple[int, int | None]] = set()
        self.out: set[tuple[int, Role, int]] = set()
        self.computed: list[tuple[Verb, int, int]] = []

    def run(self, schedule: Schedule) -> None:
        for operation in schedule.operations:
            getattr(self, operation.verb.value)(operation)
        assert not self.hbm, "nothing is left in HBM"
        assert not self.staged, "nothing is left in staging"

    def read(self, op: Operation) -> None:
        self.staged.append((op.block, op.piece, op.roles))

    def release(self, op: Operation) -> None:
        self.staged.remove((op.block, op.piece, op.roles))

    def write(self, op: Operation) -> None:
        assert any(op.block == b and op.piece == p for b, p, _ in self.staged), "from staging"

    def sweep(self, op: Operation) -> None:
        assert (op.block, op.piece) not in self.swept, "swept once"
        assert not any(b == op.block for _, b, _ in self.computed), "before it computes"
        if needed := self.facts.staged_roles(op.block):
            assert (op.block, op.piece, needed) in self.staged, "what it needs is in staging"
        self.swept.add((op.block, op.piece))

    def fetch(self, op: Operation) -> None:
        (role,) = op.roles
        if op.piece is not None:
            assert (op.block, op.piece) in self.swept
            self.parts[op.block] = self.parts.get(op.block, 0) + 1
            if self.parts[op.block] < self.facts.pieces[op.block]:
                return
        assert (op.block, role) not in self.hbm, "nothing is fetched twice"
        if role is Role.WEIGHT and self.placement.blocks[op.block].sweep == "cpu":
            assert any(b == op.block for b, _ in self.swept), "only fresh weights"
        if role is Role.INPUT:
            assert (op.block, role, op.round) in self.out, "what went out comes back"
        self.hbm.add((op.block, role))

    def drop(self, op: Operation) -> None:
        self.hbm.discard((op.block, op.roles[0]))

    def drain(self, op: Operation) -> None:
        (role,) = op.roles
        self.out.add((op.block, role, op.round))
        self.hbm.discard((op.block, role))

    def _compute(self, op: Operation) -> None:
        for owner in self.facts.owners(op.block):
            if self.facts.weight_in_hbm(owner):
                assert any(b == owner for b, _ in self.swept), "a resident block is swept first"
            elif not (op.verb is Verb.BACKWARD and op.block == 0):
                assert (owner, Role.WEIGHT) in self.hbm, "nothing computes that is not there"
        if op.verb is Verb.BACKWARD and self.facts.offloads_input(op.block):
            assert (op.block, Role.INPUT) in self.hbm, "its input is back"
        if op.verb is not Verb.FORWARD and op.round and self.facts.gradient_leaves(op.block):
            assert (op.block, Role.GRADIENT) in self.hbm or op.verb is Verb.LOSS
        self.computed.append((op.verb, op.block, op.round))

    forward = loss = backward = _compute


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_step_computes_with_what_is_there_and_leaves_nothing(case: tuple[Desk, Choice]) -> None:
    desk, choice = case
    placement = desk.placement(choice)
    schedule = step_schedule(desk.inventory, placement)
    walker = Walker(desk.inventory, placement)

    walker.run(schedule)

    last = len(desk.inventory.blocks) - 1
    for round in range(choice.rounds):
        done = [(verb, block) for verb, block, r in walker.computed if r == round]
        forth = [(Verb.FORWARD, i) for i in range(last)]
        back = [(Verb.BACKWARD, i) for i in range(last - 1, -1, -1)]
        assert done == [*forth, (Verb.LOSS, last), *back]
    trained = {i for i, b in enumerate(placement.blocks) if b.sweep != "none"}
    assert {block for block, _ in walker.swept} == trained


@settings(max_examples=50, deadline=None)
@given(cases())
def test_no_more_is_in_flight_than_the_pools_hold(case: tuple[Desk, Choice]) -> None:
    desk, choice = case
    placement = desk.placement(choice)
    schedule = step_schedule(desk.inventory, placement)
    formats = desk.workload.formats(choice.rounds)
    args = (desk.inventory, schedule, placement, formats)
    lists = {
        "weight slots": weight_lifetimes(schedule, placement),
        "gradient buffers": gradient_lifetimes(*args),
        "NVMe staging": staging_lifetimes(*args),
    }
    promised = {pool.what: pool.nbytes for pool in desk.pools(choice)}

    for what, lifetimes in lists.items():
        assert promised.get(what, 0) == pack(lifetimes, mendings=0).nbytes
        assert promised.get(what, 0) >= peak_nbytes(lifetimes)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_streamed_layers_never_outnumber_their_slots(case: tuple[Desk, Choice]) -> None:
    desk, choice = case
    facts = StepFacts.of(desk.inventory, desk.placement(choice))
    inside: set[int] = set()
    for op in step_schedule(desk.inventory, desk.placement(choice)).operations:
        if op.roles == (Role.WEIGHT,) and facts.is_layer(op.block):
            if op.verb is Verb.FETCH:
                inside.add(op.block)
            elif op.verb is Verb.DROP:
                inside.discard(op.block)
        assert len(inside) <= choice.slots


def test_blocks_still_in_a_slot_are_not_fetched_again_at_the_turn() -> None:
    desk = desk_for(layers=6, tied=False)
    choice = all_on(desk, Spot.DRAM)
    schedule = step_schedule(desk.inventory, desk.placement(replace(choice, slots=3, ahead=1)))

    again = [
        op.block
        for op in schedule.operations
        if op.verb is Verb.FETCH and op.roles == (Role.WEIGHT,) and op.phase == "backward"
    ]

    assert again == [3, 2, 1]  # layers 4, 5 and 6 were in the three slots


def test_everything_in_hbm_moves_nothing() -> None:
    desk = desk_for(layers=3, tied=True)
    schedule = step_schedule(desk.inventory, desk.placement(all_on(desk, Spot.HBM)))

    assert {op.verb for op in schedule.operations} == {*COMPUTE, Verb.SWEEP}
    assert all(op.gpu for op in schedule.operations if op.verb is Verb.SWEEP)


def test_a_gradient_that_rests_in_hbm_never_leaves_it() -> None:
    desk = desk_for(layers=3, tied=False)
    choice = all_on(desk, Spot.DRAM)
    spots = choice.spots[1]._replace(weight=Spot.HBM, state=Spot.HBM, gradient=Spot.HBM)
    schedule = step_schedule(desk.inventory, desk.placement(choice.moved({1: spots})))

    drained = {op.block for op in schedule.operations if op.roles == (Role.GRADIENT,)}

    assert drained == {0, 2, 3, 4}


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_each_round_streams_the_weights_once_more(rounds: int) -> None:
    desk = desk_for(layers=8, tied=False)
    choice = replace(all_on(desk, Spot.DRAM), rounds=rounds)
    schedule = step_schedule(desk.inventory, desk.placement(choice))

    fetches = [
        op for op in schedule.operations if op.verb is Verb.FETCH and op.roles == (Role.WEIGHT,)
    ]

    # Forth and back, less the two still in a slot at each turn; embedding and head once a round.
    turns = 2 * rounds - 1
    assert len(fetches) == 2 * 8 * rounds - 2 * turns + 2 * rounds


def all_on(desk: Desk, spot: Spot) -> Choice:
    return Choice(
        tuple(
            BlockSpots(spot, spot, spot, spot if block.kind == "layer" else None)
            for block in desk.inventory.blocks
        )
    )


def test_bytes_on_a_tier_follow_the_spot() -> None:
    desk = desk_for(layers=2, tied=False)
    demand = desk.demand(all_on(desk, Spot.NVME))

    assert set(demand) == {Tier.NVME}
