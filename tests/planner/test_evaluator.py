"""What the search counts and times quickly is what the schedule says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.plan.budget import Budget, PathBudget
from penstock.planner import PlannerCache, find_plan
from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.cost import StepTimer, estimate
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.search import QUICK, search
from penstock.tiers import Tier
from penstock.units import GiB, MiB, TiB
from tests.support.machines import machine
from tests.support.models import llama, work

NVME = (PathBudget(path="/mnt/nvme", nbytes=TiB),)
HOST = (Location.DRAM, Location.CXL, Location.NVME)


def evaluator(*, tied: bool = False, piece: int = 1 << 20, **budget: int) -> PlanEvaluator:
    inventory = llama("six", 512, 2048, 6, 512, 128, 8192, tied)
    sizes = {"hbm": 64 * GiB, "dram": 64 * GiB, "cxl": 64 * GiB, **budget}
    return PlanEvaluator(
        inventory, work(inventory, 256, 8, micro_batch=2), machine(), Budget(nvme=NVME, **sizes),
        piece_elements=piece,
    )  # fmt: skip


def some_choice(draw: random.Random, count: int) -> Candidate:
    def block(layer: bool) -> BlockLocations:
        kept = draw.choice((*HOST, Location.HBM)) if layer else None
        if draw.random() < 0.2:
            return BlockLocations(Location.HBM, Location.HBM, Location.HBM, kept)
        state = draw.choice((*HOST, Location.MIX))
        return BlockLocations(draw.choice(HOST), state, draw.choice(HOST), kept)

    locations = tuple(block(0 < i < count - 1) for i in range(count))
    slots = draw.choice((2, 3, 4))
    return Candidate(
        locations, rounds=draw.choice((1, 2)), slots=slots, ahead=draw.randrange(1, slots)
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_quick_bytes_are_close_and_quick_times_are_a_bound(seed: int, tied: bool) -> None:
    table = evaluator(tied=tied)
    candidate = some_choice(random.Random(seed), len(table.inventory.blocks))
    placement = table.placement(candidate)
    exact = table.total_nbytes(candidate)
    quick = table.stored_nbytes(candidate)
    quick.update(table._sizer.nbytes(candidate))
    watch = StepTimer(table.inventory, table.workload, table.rates)
    cost = table.cost(candidate)

    # Other tiers hold nothing but what rests; buffers pack nearly as tight as they live.
    assert (quick[Tier.CXL], quick[Tier.NVME]) == (exact[Tier.CXL], exact[Tier.NVME])
    assert quick[Tier.HBM] == pytest.approx(exact[Tier.HBM], rel=0.01)
    assert quick[Tier.DRAM] == pytest.approx(exact[Tier.DRAM], rel=0.10)
    assert watch.seconds(placement, cost.schedule) == cost.step_seconds
    assert watch.lower_bound(placement) <= cost.step_seconds * (1 + 1e-9)


def test_a_stopwatch_used_before_says_the_same() -> None:
    table = evaluator()
    draw = random.Random(7)
    choices = [some_choice(draw, len(table.inventory.blocks)) for _ in range(10)]
    watch = StepTimer(table.inventory, table.workload, table.rates)
    for candidate in choices:
        placement, cost = table.placement(candidate), table.cost(candidate)
        assert watch.seconds(placement, cost.schedule) == pytest.approx(cost.step_seconds)


def test_coarse_pieces_tell_the_time_of_fine_ones() -> None:
    fine = evaluator(piece=1 << 16)
    nvme = Location.NVME
    layers = range(1, 7)
    candidate = Candidate(
        tuple(
            BlockLocations(nvme, nvme, nvme, Location.DRAM if i in layers else None)
            for i in range(8)
        )
    )
    placement = fine.placement(candidate)

    assert placement.piece_elements < fine._coarse_elements
    exact = estimate(fine.inventory, fine.workload, placement, fine.rates).step_seconds
    assert fine.seconds(candidate) == pytest.approx(exact, rel=0.05)


def test_what_is_handed_out_fits_to_the_byte_however_tight() -> None:
    found = 0
    for dram in range(60, 140, 8):
        table = evaluator(cxl=0, hbm=1400 * MiB, dram=dram * MiB, piece=1 << 19)
        candidate = search(table, QUICK)
        if candidate is not None:
            found += 1
            budget = {tier: table.budget.of(tier) for tier in Tier}
            assert all(table.total_nbytes(candidate)[tier] <= budget[tier] for tier in Tier)
    assert found > 5


def test_room_that_packing_takes_is_left_free_for_the_next_candidate() -> None:
    table = evaluator()
    candidate = some_choice(random.Random(3), 8)
    exact = table.total_nbytes(candidate)
    table = evaluator(hbm=exact[Tier.HBM] - 1, dram=exact[Tier.DRAM], cxl=64 * GiB)

    assert table.exact_shortage(candidate) == {Tier.HBM: 1}
    assert table.capacity(Tier.HBM) == exact[Tier.HBM] - 2
    assert table.exact_shortage(replace(candidate, slots=candidate.slots)) == {Tier.HBM: 2}


def test_a_question_asked_with_a_memory_has_the_same_answer() -> None:
    table = evaluator()
    args = (table.inventory, table.workload)
    memory: PlannerCache = {}
    for dram in (70, 90, 200):
        budget = Budget(hbm=1400 * MiB, dram=dram * MiB, nvme=NVME)
        fresh = find_plan(*args, budget, machine(cards=0), effort=QUICK)
        again = find_plan(*args, budget, machine(cards=0), effort=QUICK, cache=memory)
        assert fresh == again
    assert any(memory.values())
