"""Quick estimates of bytes and time agree with those from the schedule."""

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


def make_evaluator(*, tied: bool = False, piece: int = 1 << 20, **budget: int) -> PlanEvaluator:
    inventory = llama("six", 512, 2048, 6, 512, 128, 8192, tied)
    sizes = {"hbm": 64 * GiB, "dram": 64 * GiB, "cxl": 64 * GiB, **budget}
    return PlanEvaluator(
        inventory, work(inventory, 256, 8, micro_batch=2), machine(), Budget(nvme=NVME, **sizes),
        piece_elements=piece,
    )  # fmt: skip


def random_candidate(draw: random.Random, count: int) -> Candidate:
    def block(layer: bool) -> BlockLocations:
        input_location = draw.choice((*HOST, Location.HBM)) if layer else None
        if draw.random() < 0.2:
            return BlockLocations(Location.HBM, Location.HBM, Location.HBM, input_location)
        state = draw.choice((*HOST, Location.MIX))
        return BlockLocations(draw.choice(HOST), state, draw.choice(HOST), input_location)

    locations = tuple(block(0 < i < count - 1) for i in range(count))
    slots = draw.choice((2, 3, 4))
    return Candidate(
        locations, rounds=draw.choice((1, 2)), slots=slots, ahead=draw.randrange(1, slots)
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_quick_sizes_are_close_and_the_lower_bound_holds(seed: int, tied: bool) -> None:
    evaluator = make_evaluator(tied=tied)
    candidate = random_candidate(random.Random(seed), len(evaluator.inventory.blocks))
    placement = evaluator.placement(candidate)
    exact = evaluator.total_nbytes(candidate)
    quick = evaluator.stored_nbytes(candidate)
    quick.update(evaluator._sizer.nbytes(candidate))
    timer = StepTimer(evaluator.inventory, evaluator.workload, evaluator.rates)
    cost = evaluator.cost(candidate)

    # CXL and NVMe hold no buffers. Packed buffers are nearly as small as the peak of live bytes.
    assert (quick[Tier.CXL], quick[Tier.NVME]) == (exact[Tier.CXL], exact[Tier.NVME])
    assert quick[Tier.HBM] == pytest.approx(exact[Tier.HBM], rel=0.01)
    assert quick[Tier.DRAM] == pytest.approx(exact[Tier.DRAM], rel=0.10)
    assert timer.seconds(placement, cost.schedule) == cost.step_seconds
    assert timer.lower_bound(placement) <= cost.step_seconds * (1 + 1e-9)
    assert evaluator.score_lower_bound(candidate) <= evaluator.score(candidate) * (1 + 1e-9)


@pytest.mark.parametrize("piece", [1 << 16, 1 << 20, 1 << 26])
def test_quick_staging_covers_pieces_of_two_blocks_at_their_border(piece: int) -> None:
    evaluator = make_evaluator(piece=piece)
    everything = BlockLocations(*[Location.NVME] * 4)
    candidate = Candidate((everything,) * len(evaluator.inventory.blocks))
    pools = {pool.what: pool.nbytes for pool in evaluator.pools(candidate)}
    placement = evaluator.placement(candidate)

    quick = evaluator._sizer._staging_nbytes(candidate, placement)

    assert quick == pytest.approx(pools["NVMe staging"], rel=0.10)


def test_a_plan_without_nvme_needs_no_staging() -> None:
    evaluator = make_evaluator()
    everything = BlockLocations(*[Location.DRAM] * 4)
    candidate = Candidate((everything,) * len(evaluator.inventory.blocks))

    assert evaluator._sizer._staging_nbytes(candidate, evaluator.placement(candidate)) == 0


@pytest.mark.parametrize("location", HOST)
def test_the_lower_bound_is_close_if_one_resource_limits_each_half_of_the_step(
    location: Location,
) -> None:
    evaluator = make_evaluator()
    block = BlockLocations(location, location, location, None)
    layer = block._replace(activation=location)
    candidate = Candidate((block, *[layer] * 6, block))

    assert evaluator.score_lower_bound(candidate) > 0.85 * evaluator.score(candidate)


def test_buffers_in_hbm_are_sized_once_for_all_locations_outside_of_it() -> None:
    evaluator = make_evaluator()
    sizes = set()
    for location in HOST:
        block = BlockLocations(location, location, location, None)
        layers = [block._replace(activation=place) for place in (location, Location.HBM)]
        candidate = Candidate((block, *layers * 3, block))
        sizes.add(evaluator._sizer.hbm_nbytes(candidate))

    assert len(sizes) == len(evaluator._sizer.hbm_cache) == 1


def test_a_timer_gives_the_same_result_after_other_placements() -> None:
    evaluator = make_evaluator()
    draw = random.Random(7)
    candidates = [random_candidate(draw, len(evaluator.inventory.blocks)) for _ in range(10)]
    timer = StepTimer(evaluator.inventory, evaluator.workload, evaluator.rates)
    for candidate in candidates:
        placement, cost = evaluator.placement(candidate), evaluator.cost(candidate)
        assert timer.seconds(placement, cost.schedule) == pytest.approx(cost.step_seconds)


def test_coarse_pieces_give_nearly_the_time_of_fine_ones() -> None:
    fine = make_evaluator(piece=1 << 16)
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


def test_every_returned_candidate_fits_to_the_byte() -> None:
    fitting = 0
    for dram in range(60, 140, 8):
        evaluator = make_evaluator(cxl=0, hbm=1400 * MiB, dram=dram * MiB, piece=1 << 19)
        candidate = search(evaluator, QUICK)
        if candidate is not None:
            fitting += 1
            budget = {tier: evaluator.budget.of(tier) for tier in Tier}
            assert all(evaluator.total_nbytes(candidate)[tier] <= budget[tier] for tier in Tier)
    assert fitting > 5


def test_an_exact_shortage_lowers_the_capacity_for_the_next_candidate() -> None:
    evaluator = make_evaluator()
    candidate = random_candidate(random.Random(3), 8)
    exact = evaluator.total_nbytes(candidate)
    evaluator = make_evaluator(hbm=exact[Tier.HBM] - 1, dram=exact[Tier.DRAM], cxl=64 * GiB)

    assert evaluator.exact_shortage(candidate) == {Tier.HBM: 1}
    assert evaluator.capacity(Tier.HBM) == exact[Tier.HBM] - 2
    assert evaluator.exact_shortage(replace(candidate, slots=candidate.slots)) == {Tier.HBM: 2}


def test_a_shared_cache_does_not_change_the_plan() -> None:
    evaluator = make_evaluator()
    args = (evaluator.inventory, evaluator.workload)
    cache: PlannerCache = {}
    for dram in (70, 90, 200):
        budget = Budget(hbm=1400 * MiB, dram=dram * MiB, nvme=NVME)
        fresh = find_plan(*args, budget, machine(cards=0), effort=QUICK)
        cached = find_plan(*args, budget, machine(cards=0), effort=QUICK, cache=cache)
        assert fresh == cached
    assert any(cache.values())


def test_of_two_equally_fast_plans_the_one_with_less_on_nvme_is_better() -> None:
    """100 GB on NVMe count as one second. The lower bound counts them as well."""
    evaluator = make_evaluator()
    block = BlockLocations(Location.DRAM, Location.NVME, Location.DRAM, None)
    candidate = Candidate((block, *[block._replace(activation=Location.DRAM)] * 6, block))
    stored = evaluator.stored_nbytes(candidate)[Tier.NVME]
    assert stored > 100e6
    timer = StepTimer(evaluator.inventory, evaluator.workload, evaluator.rates)

    extra = [
        evaluator.score(candidate) - evaluator.seconds(candidate),
        evaluator.exact_score(candidate) - evaluator.cost(candidate).step_seconds,
        evaluator.score_lower_bound(candidate)
        - timer.lower_bound(evaluator._coarse_placement(candidate)),
    ]

    assert extra == pytest.approx([stored / 100e9] * 3, rel=1e-6)
