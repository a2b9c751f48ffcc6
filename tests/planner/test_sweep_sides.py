"""Plans divide optimizer sweeps between the CPU and the GPU, where that makes steps faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.machine.machine import Figure, Machine, MemoryRate
from penstock.machine.presets import preset
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.buffers import STATES
from penstock.plan.plan import Plan
from penstock.plan.schedule import Verb
from penstock.plan.workload import Workload
from penstock.planner import QUICK, PlanResult, SearchEffort, make_plan
from penstock.planner.cost.jobs import JobBuilder
from penstock.planner.cost.rates import Rates
from penstock.planner.plan_view import explain, plan_json, summary
from penstock.planner.planner import least_budget, quick_step_seconds
from penstock.records import from_json, to_json
from penstock.roles import MOMENTS
from penstock.tiers import Tier
from penstock.units import GiB
from tests.planner.test_kept_layers import MEMORY
from tests.support.models import llama, work

MODEL = llama("1b", 2048, 8192, 12, 2048, 512, 32000, False)
MACHINE = preset("h200")


def shared_at(rate: float, machine: Machine = MACHINE) -> Machine:
    """Return a machine on which a sweep and copies together reach a rate, in bytes per second."""
    node = machine.nodes[0]
    rates = (*node.rates, MemoryRate(operation="shared", bytes_per_second=Figure.from_number(rate)))
    return replace(machine, nodes=(replace(node, rates=rates), *machine.nodes[1:]))


ONE_PASS = replace(QUICK, late_moments=False)
"""Every sweep updates weights and moments together."""


def planned(
    machine: Machine, hbm: float = 5, effort: SearchEffort = ONE_PASS, **work_changes: Any
) -> PlanResult:
    workload: Workload = work(MODEL, 2048, 4, **work_changes)
    budget = Budget(hbm=int(hbm * GiB), dram=64 * GiB)
    return make_plan(MODEL, workload, budget, machine, effort=effort)


def on_gpu(plan: Plan) -> list[int]:
    return [i for i, block in enumerate(plan.placement.blocks) if block.streams_states]


def test_with_memory_faster_than_the_cpu_sweeps_the_gpu_sweeps_some_blocks() -> None:
    alone, both = planned(MACHINE), planned(shared_at(300e9))

    assert on_gpu(alone.plan) == [], "the CPU sweep alone uses all of the memory's rate"
    assert 2 <= len(on_gpu(both.plan)) <= 10
    assert both.cost.step_seconds < 0.92 * alone.cost.step_seconds
    both.plan.check_model(MODEL)
    assert both.plan.peak(Tier.HBM) <= 5 * GiB
    assert dict(both.plan.parts(Tier.HBM))[STATES] > 0
    assert STATES not in dict(alone.plan.parts(Tier.HBM))


def test_the_gpu_sweeps_some_blocks_and_the_moments_of_all_are_updated_late() -> None:
    fast = shared_at(300e9)
    both = planned(fast, effort=QUICK)
    late = [i for i, block in enumerate(both.plan.placement.blocks) if block.late_moments]

    assert on_gpu(both.plan)
    assert set(on_gpu(both.plan)) < set(late)
    others = planned(MACHINE, effort=QUICK), planned(fast)  # without the one, without the other
    assert both.cost.step_seconds < 0.97 * min(each.cost.step_seconds for each in others)


def test_the_moments_of_every_block_take_the_cpu_equally_long() -> None:
    """Whether the CPU has updated a block's weights before, or the GPU."""
    machine = shared_at(300e9)
    result = planned(machine, effort=QUICK)
    plan, stored = result.plan, result.plan.workload.stored(MODEL)
    rates = Rates.of(machine, "fp32", dtype="bf16", compiled=plan.workload.numerics.compiled)
    schedule = result.cost.schedule
    jobs = JobBuilder(stored, plan.workload, plan.placement, rates).jobs(schedule)
    seconds = {
        op.block: job.demands["sweep@0"] / stored.blocks[op.block].parameters(True)
        for op, job in zip(schedule.operations, jobs, strict=True)
        if op.verb is Verb.SWEEP and op.roles == MOMENTS
    }

    assert set(on_gpu(plan)) < set(seconds)
    assert max(seconds.values()) < 1.01 * min(seconds.values())


def test_allowing_late_moments_does_not_make_a_plan_slower() -> None:
    """Without them, the GPU takes over more of these sweeps."""
    drive = (PathBudget(path="/mnt/nvme", nbytes=100 * GiB),)
    budget = Budget(hbm=int(4.5 * GiB), dram=6 * GiB, nvme=drive)
    model = replace(MODEL, plain_attention=True)
    workload: Workload = work(model, 2048, 4, moments="int8")
    workload = replace(workload, numerics=replace(workload.numerics, attention="varlen"))
    machine = shared_at(220e9)
    seconds = [
        make_plan(
            model, workload, budget, machine, effort=effort, source=lambda *_: MEMORY
        ).cost.step_seconds
        for effort in (QUICK, ONE_PASS)
    ]

    assert seconds[0] <= seconds[1]


def test_slow_formats_are_shared_even_if_memory_was_not_measured_with_copies() -> None:
    """With int8 moments the CPU is limited by arithmetic, and leaves bandwidth to the link."""
    result = planned(MACHINE, moments="int8")

    assert on_gpu(result.plan)
    assert from_json(Plan, to_json(result.plan)) == result.plan


@pytest.mark.parametrize(
    ("machine", "changes"),
    [
        (shared_at(300e9), {"optimizer": "adafactor"}),
        (shared_at(300e9), {"world": 2, "micro_batch": 2}),
        (replace(shared_at(300e9), gpus=(), transfers=()), {}),
        (shared_at(300e9), {"hbm": 60}),
    ],
    ids=["whole tensors", "two ranks", "no GPU", "all in HBM"],
)
def test_the_cpu_sweeps_what_the_gpu_cannot_or_need_not(
    machine: Machine, changes: dict[str, Any]
) -> None:
    if "world" in changes:
        machine = replace(machine, gpus=(machine.gpus[0], replace(machine.gpus[0], index=1)))

    assert on_gpu(planned(machine, **changes).plan) == []


def test_a_search_without_sweeps_on_the_gpu_makes_none() -> None:
    effort = replace(QUICK, gpu_sweeps=False)
    budget = Budget(hbm=5 * GiB, dram=64 * GiB)

    result = make_plan(MODEL, work(MODEL, 2048, 4), budget, shared_at(300e9), effort=effort)

    assert on_gpu(result.plan) == []


def test_states_on_disk_are_swept_by_the_cpu() -> None:
    machine = shared_at(300e9)
    budget = Budget(
        hbm=4 * GiB, dram=6 * GiB, nvme=(PathBudget(path="/mnt/nvme", nbytes=100 * GiB),)
    )

    result = make_plan(MODEL, work(MODEL, 2048, 4), budget, machine, effort=QUICK)

    for block in result.plan.placement.blocks:
        on_disk = any(home.on(Tier.NVME) for home in block.homes if home.role != "input")
        assert not (on_disk and block.streams_states)
    result.plan.check_model(MODEL)


def test_the_least_hbm_is_the_same_as_without_sweeps_on_the_gpu() -> None:
    args = (MODEL, work(MODEL, 2048, 4), Budget(hbm=5 * GiB, dram=64 * GiB))
    least = least_budget(*args, shared_at(300e9))["hbm"]

    assert least == least_budget(*args, MACHINE)["hbm"]
    assert least is not None
    assert planned(shared_at(300e9), least / GiB).plan.peak(Tier.HBM) <= least


def test_a_quick_estimate_counts_shared_sweeps() -> None:
    args = (MODEL, work(MODEL, 2048, 4), Budget(hbm=5 * GiB, dram=64 * GiB))
    both, alone = quick_step_seconds(*args, shared_at(300e9)), quick_step_seconds(*args, MACHINE)
    in_one_pass = planned(MACHINE).cost.step_seconds

    assert both is not None
    assert alone is not None
    assert both < 0.995 * alone < 0.98 * in_one_pass


def test_plans_say_how_sweeps_are_divided() -> None:
    machine = shared_at(300e9)
    result, without = planned(machine), planned(MACHINE)
    found, swept = plan_json(result)["sweep"], on_gpu(result.plan)

    assert (found["gpu_blocks"], found["cpu_blocks"] + len(swept) + found["resident_blocks"]) == (
        len(swept), len(MODEL.blocks)
    )  # fmt: skip
    assert 0 < found["gpu_seconds"] < result.cost.step_seconds
    assert 0 < found["cpu_seconds"] < plan_json(without)["sweep"]["cpu_seconds"]
    words = summary(result, machine)
    assert f"optimizer sweep: {len(swept)} of " in words
    assert "optimizer sweep: " not in summary(without, MACHINE)
    assert f"{found['resident_blocks']} of 14 blocks resident" in words
    assert explain(result, MODEL, MODEL.blocks[swept[0]].name)


def test_a_plan_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    plan = planned(MACHINE).plan
    stored = to_json(plan)
    del stored["placement"]["gpu_piece_elements"]

    assert from_json(Plan, stored) == plan


def test_memory_measured_with_copies_raises_what_all_readers_may_reach() -> None:
    """Cores read 115 GB/s, and memory has more for cores and copies together."""
    node = MACHINE.nodes[0]
    read = MemoryRate(operation="read", bytes_per_second=Figure.from_number(115e9))
    machine = replace(MACHINE, nodes=(replace(node, rates=(*node.rates, read)),))
    before, after = (Rates.of(each).nodes[0] for each in (machine, shared_at(312e9, machine)))

    assert (before.total, before.read) == (168e9, 115e9)
    assert (after.total, after.sweep) == (312e9, before.sweep)
    assert after.read == pytest.approx(234e9)
