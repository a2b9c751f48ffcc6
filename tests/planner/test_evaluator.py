"""Quick estimates of bytes and time agree with those from the schedule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.plan.budget import Budget, PathBudget
from penstock.planner import PlannerCache, find_plan
from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.cost import StepTimer, estimate
from penstock.planner.evaluator import PlanEvaluator, _window_peak
from penstock.planner.search import QUICK, search
from penstock.roles import Role
from penstock.tiers import Tier
from penstock.units import GiB, MiB, TiB
from tests.support.machines import machine
from tests.support.models import llama, work
from tests.support.schedule_checker import may_pass_through_hbm

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
    rounds, ahead = draw.choice((1, 2)), draw.randrange(1, slots)
    passing = (i for i, each in enumerate(locations) if may_pass_through_hbm(each))
    swept = frozenset(i for i in passing if draw.random() < 0.5)
    return Candidate(locations, rounds=rounds, slots=slots, ahead=ahead, gpu_swept=swept)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 25))]
)
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


def all_in(evaluator: PlanEvaluator, location: Location, **fields: int) -> Candidate:
    blocks = [
        BlockLocations(location, location, location, location if b.kind == "layer" else None)
        for b in evaluator.inventory.blocks
    ]
    return Candidate(tuple(blocks), **fields)


@pytest.mark.parametrize("seed", range(6))
def test_stored_bytes_are_the_sum_of_all_homes_without_overlaid_activations(seed: int) -> None:
    evaluator = make_evaluator()
    candidate = random_candidate(random.Random(seed), len(evaluator.inventory.blocks))
    placement = evaluator.placement(candidate)
    overlaid = evaluator.overlaid_blocks(candidate.locations, candidate.rounds)
    expected = dict.fromkeys(Tier, 0)
    for index, block in enumerate(placement.blocks):
        for home in block.homes:
            if home.role is Role.ACTIVATION and index in overlaid:
                continue
            for share in home.shares:
                expected[share.tier] += share.nbytes
    assert {tier: evaluator.stored_nbytes(candidate)[tier] for tier in Tier} == expected
    assert evaluator._nvme_nbytes(candidate) == expected[Tier.NVME]
    pools = evaluator.pools(candidate)
    total = {t: expected[t] + sum(p.nbytes for p in pools if p.tier is t) for t in Tier}
    assert {t: evaluator.total_nbytes(candidate)[t] for t in Tier} == total


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.DRAM, Tier.CXL, Tier.NVME])
def test_a_tier_that_is_one_byte_too_small_is_short_of_one_byte(tier: Tier) -> None:
    location = Location(tier.value)
    wanted = make_evaluator().total_nbytes(all_in(make_evaluator(), location))[tier]

    def with_bytes(nbytes: int) -> PlanEvaluator:
        evaluator = make_evaluator()
        evaluator._capacities[tier] = nbytes
        return evaluator

    enough, short = with_bytes(wanted), with_bytes(wanted - 1)
    candidate = all_in(enough, location)
    assert enough.exact_shortage(candidate) == {}
    assert enough.capacity(tier) == wanted
    assert short.exact_shortage(candidate) == {tier: 1}
    assert short.capacity(tier) == wanted - 2, "the next search looks for a smaller one"


def test_a_candidate_that_does_not_fit_takes_forever_and_is_not_timed() -> None:
    evaluator = make_evaluator(dram=GiB // 16)
    candidate = all_in(evaluator, Location.DRAM)
    assert evaluator.seconds(candidate) == float("inf")
    assert evaluator.operations_timed == 0
    assert evaluator.shortage(candidate)[Tier.DRAM] > 0
    fits = all_in(evaluator, Location.NVME)
    assert evaluator.shortage(fits) == {}
    assert 0 < evaluator.seconds(fits) < 10
    timed = evaluator.operations_timed
    assert timed > 0
    evaluator.seconds(fits)
    assert evaluator.operations_timed == timed, "it is timed once"


def test_the_score_adds_a_second_for_every_hundred_gigabytes_on_nvme() -> None:
    evaluator = make_evaluator()
    for location in (Location.NVME, Location.DRAM):
        candidate = all_in(evaluator, location)
        on_nvme = evaluator.stored_nbytes(candidate)[Tier.NVME]
        assert (on_nvme > 0) == (location is Location.NVME)
        wear = on_nvme / 100e9
        assert evaluator.score(candidate) == pytest.approx(evaluator.seconds(candidate) + wear)
        exact = evaluator.cost(candidate).step_seconds + wear
        assert evaluator.exact_score(candidate) == pytest.approx(exact)
        assert evaluator.score_lower_bound(candidate) <= evaluator.score(candidate)


def test_what_all_tiers_together_cannot_hold_could_not_fit() -> None:
    roomy = make_evaluator()
    groups = ("weight", "state", "gradient")
    blocks = range(len(roomy.inventory.blocks))
    wanted = sum(roomy.group_nbytes(i, group, 1) for i in blocks for group in groups)
    for nbytes, fits in ((wanted, True), (wanted - 1, False)):
        evaluator = make_evaluator()
        evaluator._capacities = {Tier.HBM: nbytes - 5, Tier.DRAM: 3, Tier.CXL: 2, Tier.NVME: 0}
        assert evaluator.could_fit(1) is fits


def test_a_striped_tier_is_full_when_its_smallest_node_is() -> None:
    """Bytes are divided by speed, so a node that is too small for its share limits the tier."""
    box = machine(cards=2)
    nodes = (box.nodes[0], box.nodes[1], replace(box.nodes[2], capacity=3 * GiB))
    inventory = llama("six", 512, 2048, 6, 512, 128, 8192, False)
    budget = Budget(hbm=GiB, dram=GiB, cxl=64 * GiB)
    made = {
        unbounded: PlanEvaluator(
            inventory, work(inventory, 256, 8), replace(box, nodes=nodes), budget,
            unbounded=unbounded,
        )
        for unbounded in (False, True)
    }  # fmt: skip
    assert made[False].capacity(Tier.CXL) == pytest.approx(6 * GiB, rel=1e-6)
    assert made[True].capacity(Tier.CXL) == 64 * GiB
    without = PlanEvaluator(inventory, work(inventory, 256, 8), machine(cards=0), budget)
    assert without.capacity(Tier.CXL) == 0


def test_drives_are_short_by_the_share_of_the_fullest_one() -> None:
    inventory = llama("six", 512, 2048, 6, 512, 128, 8192, False)
    box = machine()
    other = replace(box.storage[0], path="/mnt/other")
    box = replace(box, storage=(*box.storage, other))
    nvme = (
        PathBudget(path="/mnt/nvme", nbytes=64 * MiB),
        PathBudget(path="/mnt/other", nbytes=TiB),
    )
    evaluator = PlanEvaluator(
        inventory, work(inventory, 256, 8), box, Budget(hbm=GiB, dram=GiB, nvme=nvme),
        drives={"/mnt/nvme": 1.0, "/mnt/other": 3.0}, piece_elements=1 << 20,
    )  # fmt: skip
    candidate = all_in(evaluator, Location.NVME)
    used = {"/mnt/nvme": 0, "/mnt/other": 0}
    for block in evaluator.placement(candidate).blocks:
        for home in block.homes:
            for share in home.shares:
                used[share.path] += share.nbytes
    assert used["/mnt/other"] / used["/mnt/nvme"] == pytest.approx(3, rel=0.1)
    short = evaluator._drive_shortage(candidate)
    assert short == 4 * (used["/mnt/nvme"] - 64 * MiB) > 0
    assert evaluator.capacity(Tier.NVME) == 4 * 64 * MiB
    assert evaluator.exact_shortage(candidate)[Tier.NVME] >= short


@pytest.mark.parametrize(
    ("sizes", "window", "peak"),
    [((), 3, 0), ((5,), 3, 5), ((1, 2, 3, 4), 1, 4), ((4, 1, 1, 3, 3), 2, 6), ((1, 9, 1), 3, 11)],
)
def test_the_peak_of_a_window_is_its_largest_sum(
    sizes: tuple[int, ...], window: int, peak: int
) -> None:
    assert _window_peak(sizes, window) == peak


def test_buffers_in_hbm_are_a_key_of_all_that_changes_them() -> None:
    evaluator = make_evaluator()
    base = all_in(evaluator, Location.DRAM)
    sizes = {
        evaluator.quick_hbm_nbytes(candidate)
        for candidate in (base, all_in(evaluator, Location.DRAM, slots=4),
                          all_in(evaluator, Location.DRAM, rounds=2))
    }  # fmt: skip
    assert len(sizes) == 3
    other = evaluator.with_budget(replace(evaluator.budget, dram=GiB))
    assert other._sizer.hbm_cache is evaluator._sizer.hbm_cache
    assert other.capacity(Tier.DRAM) == GiB
    nvme = all_in(evaluator, Location.NVME)
    assert evaluator.quick_hbm_nbytes(nvme) == evaluator._sizer.hbm_nbytes(base)
    pools = {p.what: p.nbytes for p in evaluator.pools(nvme)}
    assert evaluator.dram_buffer_nbytes(nvme) == pools["NVMe staging"] + pools["NVMe pipes"]
    assert evaluator.dram_buffer_nbytes(base) == 0
