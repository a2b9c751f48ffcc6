"""Plans save what attention returns, where that makes steps faster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import PlanError
from penstock.machine.presets import preset
from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget
from penstock.plan.buffers import ATTENTION_SLOT, attention_micro_nbytes
from penstock.plan.build_schedule import step_schedule
from penstock.plan.placement import Placement
from penstock.plan.plan import Plan
from penstock.plan.schedule import Operation, Verb
from penstock.plan.traffic import step_traffic
from penstock.plan.workload import CallerLoss, Workload
from penstock.planner import QUICK, PlanResult, make_plan, saved_attention, search
from penstock.planner.candidate import Candidate, Location
from penstock.planner.cost import StepTimer
from penstock.planner.cost.compute import ComputeTime
from penstock.planner.cost.rates import Rates
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.initial_candidates import FillStrategy, fill
from penstock.planner.plan_view import plan_json, summary
from penstock.planner.saved_attention import most_saved, save_attention, with_attention
from penstock.records import from_json, to_json
from penstock.roles import Role
from penstock.tiers import Tier
from penstock.units import GiB, KiB, MiB
from tests.planner.test_kept_layers import MEMORY, unknown
from tests.support.machines import machine as cxl_machine
from tests.support.models import llama, work

MODEL = replace(llama("1b", 2048, 8192, 12, 2048, 512, 32000, False), plain_attention=True)
MACHINE = preset("h200")
LONG = 65536
RATES = Rates.of(MACHINE, "fp32", dtype="bf16", compiled=True)


def attended(context: int = LONG, batch: int = 1, **more: object) -> Workload:
    """Return a workload with Penstock's attention kernels."""
    workload = work(MODEL, context, batch, **more)
    return replace(workload, numerics=replace(workload.numerics, attention="varlen"))


def planned(
    hbm: int, dram: int = 64 * GiB, workload: Workload | None = None, model: Inventory = MODEL
) -> PlanResult:
    """Plan with working memory that keeps no whole layers, so that only attention is saved."""
    workload = workload or attended()
    budget = Budget(hbm=hbm, dram=dram)
    memory = unknown()
    return make_plan(model, workload, budget, MACHINE, effort=QUICK, source=lambda *_: memory)


def saved(plan: Plan) -> list[int]:
    return [block.attention for block in plan.placement.blocks]


def plain(workload: Workload) -> Workload:
    return replace(workload, numerics=replace(workload.numerics, attention="sdpa"))


def evaluator_of(workload: Workload, hbm: int = 40 * GiB) -> tuple[PlanEvaluator, Candidate]:
    budget = Budget(hbm=hbm, dram=200 * GiB)
    evaluator = PlanEvaluator(MODEL, workload, MACHINE, budget, source=lambda *_: MEMORY)
    candidate = fill(evaluator, FillStrategy())
    assert candidate is not None
    return evaluator, candidate


# What is chosen.


def test_a_long_context_saves_all_results_and_steps_take_as_much_less_as_attention_takes() -> None:
    result, without = planned(24 * GiB), planned(24 * GiB, workload=plain(attended()))

    assert saved(result.plan) == [0, *[1] * 12, 0]
    assert saved(without.plan) == [0] * 14
    attention = 12 * 4 * 2048 * (LONG / 2) * LONG / RATES.attention_flops
    gained = without.cost.step_seconds - result.cost.step_seconds
    assert gained == pytest.approx(attention, rel=0.02)
    assert gained > 0.1 * without.cost.step_seconds


def test_the_summary_and_json_say_how_many_layers_save_and_where() -> None:
    result = planned(24 * GiB)
    by_tier = plan_json(result)["recompute"]["saved_attention"]
    places = ", ".join(f"{count} in {tier.upper()}" for tier, count in by_tier.items())

    assert sum(by_tier.values()) == 12
    assert f"attention: results of 12 of 12 layers saved ({places})" in summary(result, MACHINE)
    assert "attention:" not in summary(planned(24 * GiB, workload=plain(attended())), MACHINE)


def test_memory_that_states_on_their_way_to_the_gpu_leave_is_used_for_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block leaves HBM to make room for states, which need less than a whole block."""
    result = planned(5 * GiB, workload=attended(2048, 4))

    def only_before(evaluator: PlanEvaluator, found: Candidate, *, exact: bool) -> Candidate:
        shared = any(block.streams_states for block in evaluator.placement(found).blocks)
        return found if shared else save_attention(evaluator, found, exact=exact)

    monkeypatch.setattr(search, "save_attention", only_before)
    without = planned(5 * GiB, workload=attended(2048, 4))

    assert any(block.streams_states for block in without.plan.placement.blocks)
    assert sum(saved(result.plan)) > sum(saved(without.plan))
    assert result.cost.step_seconds < without.cost.step_seconds


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dram", [17, 19, 40])
@pytest.mark.parametrize("hbm", [4, 6, 9, 14, 22])
def test_budgets_hold_to_the_byte_and_saving_never_makes_steps_slower(
    hbm: int, dram: int, batch: int
) -> None:
    workload = attended(16384, batch)
    result = planned(hbm * GiB, dram * GiB, workload)
    plan = result.plan

    assert plan.peak(Tier.HBM) <= hbm * GiB
    assert plan.peak(Tier.DRAM) <= dram * GiB
    plan.check_model(MODEL)
    slower = planned(hbm * GiB, dram * GiB, plain(workload)).cost.step_seconds
    assert result.cost.step_seconds <= slower * (1 + 1e-9)
    each = attention_micro_nbytes(MODEL.blocks[1], workload)
    for block in plan.placement.blocks:
        home = block.home(Role.ATTENTION)
        assert (home.nbytes if home else 0) == block.attention * each
    leaves = any(
        block.attention and not block.all_on(Role.ATTENTION, Tier.HBM)
        for block in plan.placement.blocks
    )
    assert dict(plan.parts(Tier.HBM)).get(ATTENTION_SLOT, 0) == (each if leaves else 0)


@pytest.mark.parametrize(("context", "place"), [(2048, None), (65536, Location.DRAM)])
def test_results_go_to_host_memory_only_for_a_gain_that_shows(
    context: int, place: Location | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In host memory, copies cost time that is not in the cost model."""
    workload = attended(context, 65536 // context)
    evaluator, candidate = evaluator_of(workload)
    monkeypatch.setattr(saved_attention, "most_saved", without_hbm)

    found = save_attention(evaluator, candidate, exact=False)
    monkeypatch.setattr(saved_attention, "GAIN_OUTSIDE", 0.9999)
    eager = save_attention(evaluator, candidate, exact=False)

    assert set(found.attention[1:-1]) == ({place} if place else set())
    assert Location.DRAM in eager.attention, "it would be faster, as far as the cost model knows"
    if place is None:
        assert evaluator.score(eager) > saved_attention.GAIN * 0.98 * evaluator.score(candidate)


def without_hbm(
    evaluator: PlanEvaluator, base: Candidate, layers: list[int], place: Location
) -> Candidate:
    """Save as much as fits outside HBM, and nothing in it."""
    return base if place is Location.HBM else most_saved(evaluator, base, layers, place)


@pytest.mark.parametrize("why", ["sdpa", "earlier numerics", "no attention", "own loss"])
def test_nothing_is_saved_where_it_cannot_be(why: str) -> None:
    workload, model = attended(4096, 16, micro_batch=4), MODEL
    if why == "sdpa":
        workload = plain(workload)
    if why == "earlier numerics":
        workload = replace(workload, numerics=replace(workload.numerics, forward="inference"))
    if why == "no attention":
        model = replace(MODEL, blocks=tuple(replace(b, heads=0) for b in MODEL.blocks))
    if why == "own loss":
        workload = replace(workload, accumulate=True, caller_loss=CallerLoss())

    assert not any(saved(planned(40 * GiB, workload=workload, model=model).plan))


def test_layers_without_attention_and_with_a_short_window_are_left_out_first() -> None:
    blocks = list(MODEL.blocks)
    for number in range(1, 13):
        if number % 3 == 0:
            blocks[number] = replace(blocks[number], heads=0, query_width=0)
        elif number % 3 == 1:
            blocks[number] = replace(blocks[number], window=1024)
    model = replace(MODEL, blocks=tuple(blocks))

    plan = planned(24 * GiB, model=model).plan

    assert all(plan.placement.blocks[number].attention for number in range(2, 13, 3))
    assert not any(plan.placement.blocks[number].attention for number in range(3, 13, 3))


def test_results_go_to_cxl_memory_if_hbm_and_dram_are_full() -> None:
    workload = attended(accumulate=True)  # gradients exist all the time: their memory is not free
    args = (MODEL, workload, cxl_machine())
    roomy = Budget(hbm=40 * GiB, dram=200 * GiB, cxl=8 * GiB)
    evaluator = PlanEvaluator(*args, roomy, source=lambda *_: unknown())
    candidate = fill(evaluator, FillStrategy())
    assert candidate is not None
    needed = evaluator.total_nbytes(candidate)
    slot = attention_micro_nbytes(MODEL.blocks[1], workload)
    full = Budget(hbm=needed[Tier.HBM] + slot, dram=needed[Tier.DRAM], cxl=8 * GiB)
    evaluator = PlanEvaluator(*args, full, source=lambda *_: unknown())

    found = save_attention(evaluator, candidate, exact=True)

    assert found.attention == (None, *[Location.CXL] * 12, None)
    assert evaluator.total_nbytes(found)[Tier.CXL] == needed[Tier.CXL] + 12 * slot


def test_nothing_is_saved_if_there_is_no_room() -> None:
    workload = attended()
    evaluator, candidate = evaluator_of(workload)
    needed = evaluator.total_nbytes(candidate)
    tight = Budget(hbm=needed[Tier.HBM] + 64 * KiB, dram=needed[Tier.DRAM])
    evaluator = PlanEvaluator(MODEL, workload, MACHINE, tight, source=lambda *_: MEMORY)
    layers = list(range(1, 13))

    for place in (Location.HBM, Location.DRAM):
        assert most_saved(evaluator, candidate, layers, place).attention == ()


# Bytes.


@pytest.mark.parametrize("place", [Location.HBM, Location.DRAM])
def test_as_many_as_fit_are_saved_and_the_quick_count_is_exact(place: Location) -> None:
    workload = attended()
    evaluator, candidate = evaluator_of(workload)
    layers = list(range(1, 13))
    five = evaluator.total_nbytes(with_attention(candidate, layers[:5], place))
    budget = Budget(hbm=five[Tier.HBM], dram=five[Tier.DRAM])
    evaluator = PlanEvaluator(MODEL, workload, MACHINE, budget, source=lambda *_: MEMORY)

    most = most_saved(evaluator, candidate, layers, place)

    assert [i for i, each in enumerate(most.attention) if each is place] == layers[:5]
    assert evaluator.quick_hbm_nbytes(most) == evaluator.total_nbytes(most)[Tier.HBM]


def test_kept_passes_need_no_results() -> None:
    evaluator, candidate = evaluator_of(attended(4096, 8, micro_batch=2))
    candidate = with_attention(candidate, range(1, 13), Location.DRAM)
    candidate = replace(candidate, kept=(0, *[0] * 10, 3, 4, 0))

    blocks = evaluator.placement(candidate).blocks

    assert [block.attention for block in blocks] == [0, *[4] * 10, 1, 0, 0]
    assert blocks[11].attended == range(3, 4)
    assert blocks[12].home(Role.ATTENTION) is None


def test_results_cross_the_link_once_in_each_direction() -> None:
    evaluator, candidate = evaluator_of(attended(4096, 6, micro_batch=4))
    both = [
        replace(candidate, attention=()),
        with_attention(candidate, range(1, 13), Location.DRAM),
        with_attention(candidate, range(1, 13), Location.HBM),
    ]
    without, outside, inside = (traffic_of(evaluator, each) for each in both)

    # Six rows of 4,096 tokens, 2,048 numbers in bf16, and 16 log-sum-exps in fp32.
    moved = 12 * 6 * 4096 * (2 * 2048 + 4 * 16)
    assert inside == without
    for link in ("h2d", "d2h"):
        assert outside[link] - without[link] == moved


def traffic_of(evaluator: PlanEvaluator, candidate: Candidate) -> dict[str, int]:
    placement = evaluator.placement(candidate)
    schedule = step_schedule(MODEL, placement)
    return step_traffic(MODEL, evaluator.workload, placement, schedule)


# Time.


def test_a_backward_takes_as_much_less_as_attention_takes_forward() -> None:
    workload = attended(8192, 7, micro_batch=2)  # the last of four micro-batches is half as large
    evaluator, candidate = evaluator_of(workload, hbm=100 * GiB)
    forward = 4 * 2048 * (8192 / 2) / RATES.attention_flops  # per token

    def seconds(placement: Placement) -> float:
        operation = Operation(Verb.BACKWARD, 5, (), "backward")
        return ComputeTime(MODEL, workload, placement, RATES).seconds(operation)

    def with_passes(passes: int, kept: int) -> Placement:
        placement = evaluator.placement(candidate)
        blocks = list(placement.blocks)
        blocks[5] = replace(blocks[5], attention=passes, kept=kept)
        return replace(placement, blocks=tuple(blocks))

    for kept in (0, 1):
        base = seconds(with_passes(0, kept))
        for passes, rows in ((1, 2), (2, 4), (3, 6 if not kept else 5)):
            gained = base - seconds(with_passes(passes, kept))
            assert gained == pytest.approx(rows * 8192 * forward)


@pytest.mark.parametrize("place", [Location.HBM, Location.DRAM])
@pytest.mark.parametrize("rounds", [1, 2])
def test_the_lower_bound_is_no_more_than_the_time_of_a_step(place: Location, rounds: int) -> None:
    workload = attended(4096, 4, micro_batch=1)
    evaluator, candidate = evaluator_of(workload)
    candidate = with_attention(replace(candidate, rounds=rounds), range(1, 13), place)
    timer = StepTimer(evaluator.inventory, workload, evaluator.rates)
    placement = evaluator.placement(candidate)

    bound = timer.lower_bound(placement)

    assert 0 < bound <= timer.seconds(placement, step_schedule(MODEL, placement)) * (1 + 1e-9)


# Files.


def test_a_plan_with_saved_results_is_read_back_and_plans_without_the_field_still_load(
    tmp_path: Path,
) -> None:
    plan = planned(24 * GiB).plan
    assert any(saved(plan))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan

    old = planned(24 * GiB, workload=plain(attended())).plan
    data = json.loads(json.dumps(to_json(old)))
    for block in data["placement"]["blocks"]:
        block.pop("attention", None)
    assert from_json(Plan, data, error=PlanError) == old


def test_a_result_of_attention_has_the_bytes_of_output_and_log_sums() -> None:
    assert attention_micro_nbytes(MODEL.blocks[1], attended()) == LONG * (2 * 2048 + 4 * 16)
    assert attention_micro_nbytes(MODEL.blocks[1], attended()) == 260 * MiB
