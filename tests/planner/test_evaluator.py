"""What the search counts and times quickly is what the schedule says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.plan.budget import Budget, PathBudget
from penstock.planner import Memory, find_plan
from penstock.planner.choice import BlockSpots, Choice, Spot
from penstock.planner.cost import Stopwatch, estimate
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.search import QUICK, search
from penstock.tiers import Tier
from penstock.units import GiB, MiB, TiB
from tests.support.machines import machine
from tests.support.models import llama, work

NVME = (PathBudget(path="/mnt/nvme", nbytes=TiB),)
HOST = (Spot.DRAM, Spot.CXL, Spot.NVME)


def desk(*, tied: bool = False, piece: int = 1 << 20, **budget: int) -> PlanEvaluator:
    inventory = llama("six", 512, 2048, 6, 512, 128, 8192, tied)
    sizes = {"hbm": 64 * GiB, "dram": 64 * GiB, "cxl": 64 * GiB, **budget}
    return PlanEvaluator(
        inventory, work(inventory, 256, 8, micro_batch=2), machine(), Budget(nvme=NVME, **sizes),
        piece_elements=piece,
    )  # fmt: skip


def some_choice(draw: random.Random, count: int) -> Choice:
    def block(layer: bool) -> BlockSpots:
        kept = draw.choice((*HOST, Spot.HBM)) if layer else None
        if draw.random() < 0.2:
            return BlockSpots(Spot.HBM, Spot.HBM, Spot.HBM, kept)
        state = draw.choice((*HOST, Spot.MIX))
        return BlockSpots(draw.choice(HOST), state, draw.choice(HOST), kept)

    spots = tuple(block(0 < i < count - 1) for i in range(count))
    slots = draw.choice((2, 3, 4))
    return Choice(spots, rounds=draw.choice((1, 2)), slots=slots, ahead=draw.randrange(1, slots))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_quick_bytes_are_close_and_quick_times_are_a_bound(seed: int, tied: bool) -> None:
    table = desk(tied=tied)
    choice = some_choice(random.Random(seed), len(table.inventory.blocks))
    placement = table.placement(choice)
    exact = table.needs(choice)
    quick = table.demand(choice)
    quick.update(table._quick.of(choice))
    watch = Stopwatch(table.inventory, table.workload, table.rates)
    cost = table.cost(choice)

    # Other tiers hold nothing but what rests; buffers pack nearly as tight as they live.
    assert (quick[Tier.CXL], quick[Tier.NVME]) == (exact[Tier.CXL], exact[Tier.NVME])
    assert quick[Tier.HBM] == pytest.approx(exact[Tier.HBM], rel=0.01)
    assert quick[Tier.DRAM] == pytest.approx(exact[Tier.DRAM], rel=0.10)
    assert watch.seconds(placement, cost.schedule) == cost.step_seconds
    assert watch.at_least(placement) <= cost.step_seconds * (1 + 1e-9)


def test_a_stopwatch_used_before_says_the_same() -> None:
    table = desk()
    draw = random.Random(7)
    choices = [some_choice(draw, len(table.inventory.blocks)) for _ in range(10)]
    watch = Stopwatch(table.inventory, table.workload, table.rates)
    for choice in choices:
        placement, cost = table.placement(choice), table.cost(choice)
        assert watch.seconds(placement, cost.schedule) == pytest.approx(cost.step_seconds)


def test_coarse_pieces_tell_the_time_of_fine_ones() -> None:
    fine = desk(piece=1 << 16)
    choice = Choice(tuple(
        BlockSpots(Spot.NVME, Spot.NVME, Spot.NVME, Spot.DRAM if 0 < i < 7 else None)
        for i in range(8)
    ))  # fmt: skip
    placement = fine.placement(choice)

    assert placement.piece_elements < fine._coarse
    exact = estimate(fine.inventory, fine.workload, placement, fine.rates).step_seconds
    assert fine.seconds(choice) == pytest.approx(exact, rel=0.05)


def test_what_is_handed_out_fits_to_the_byte_however_tight() -> None:
    found = 0
    for dram in range(60, 140, 8):
        table = desk(cxl=0, hbm=1400 * MiB, dram=dram * MiB, piece=1 << 19)
        choice = search(table, QUICK)
        if choice is not None:
            found += 1
            budget = {tier: table.budget.of(tier) for tier in Tier}
            assert all(table.needs(choice)[tier] <= budget[tier] for tier in Tier)
    assert found > 5


def test_room_that_packing_takes_is_left_free_for_the_next_candidate() -> None:
    table = desk()
    choice = some_choice(random.Random(3), 8)
    exact = table.needs(choice)
    table = desk(hbm=exact[Tier.HBM] - 1, dram=exact[Tier.DRAM], cxl=64 * GiB)

    assert table.lacks(choice) == {Tier.HBM: 1}
    assert table.capacity(Tier.HBM) == exact[Tier.HBM] - 2
    assert table.lacks(replace(choice, slots=choice.slots)) == {Tier.HBM: 2}


def test_a_question_asked_with_a_memory_has_the_same_answer() -> None:
    table = desk()
    args = (table.inventory, table.workload)
    memory: Memory = {}
    for dram in (70, 90, 200):
        budget = Budget(hbm=1400 * MiB, dram=dram * MiB, nvme=NVME)
        fresh = find_plan(*args, budget, machine(cards=0), effort=QUICK)
        again = find_plan(*args, budget, machine(cards=0), effort=QUICK, memory=memory)
        assert fresh == again
    assert any(memory.values())
