"""Text and tables that `penstock plan` prints."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from penstock.machine.machine import Machine
from penstock.planner import PlanResult
from penstock.planner.candidate import Location
from penstock.planner.plan_view import SHADES, explain, plan_view, summary, wear
from penstock.planner.planner import plan_result
from penstock.planner.resource_names import long_name
from penstock.tiers import Tier
from penstock.units import GiB, format_bytes
from tests.support.machines import machine
from tests.support.schedule_checker import all_on, evaluator_for


@pytest.fixture(scope="module")
def result() -> PlanResult:
    evaluator = evaluator_for(layers=3, tied=False)
    return plan_result(evaluator, all_on(evaluator, Location.NVME))


def machine_with_endurance(rated_writes: int | None) -> Machine:
    box = machine()
    return replace(box, storage=(replace(box.storage[0], rated_writes=rated_writes),))


def with_steps(result: PlanResult, steps: int) -> PlanResult:
    workload = replace(result.plan.workload, steps=steps)
    return replace(result, plan=replace(result.plan, workload=workload))


def test_wear_is_left_out_if_nothing_is_written(result: PlanResult) -> None:
    assert wear(replace(result, disk_writes={}), machine()) == []


def test_wear_is_relative_to_the_rated_endurance(result: PlanResult) -> None:
    rated, unrated = machine_with_endurance(600 * 10**12), machine_with_endurance(None)
    writing = replace(result, disk_writes={"/mnt/nvme": 30 * 10**9})

    assert wear(writing, unrated) == ["30 GB written to NVMe per step"]
    assert wear(writing, rated) == [
        "30 GB written to NVMe per step; the rated endurance (600 TB) is 20,000 steps"
    ]
    assert wear(with_steps(writing, 10_000), rated) == [
        "30 GB written to NVMe per step, 300.0 TB in 10,000 steps: "
        "50% of the rated endurance (600 TB)"
    ]


def test_wear_is_that_of_the_drive_that_wears_out_first(result: PlanResult) -> None:
    box = machine_with_endurance(600 * 10**12)
    first = box.storage[0]
    small = replace(first, path="/mnt/small", rated_writes=100 * 10**12)
    unused = replace(first, path="/mnt/unused", rated_writes=9000 * 10**12)
    box = replace(box, storage=(first, small, unused))
    writes = {"/mnt/nvme": 20 * 10**9, "/mnt/small": 10 * 10**9}
    writing = replace(result, disk_writes=writes)

    assert wear(writing, box) == [
        "30 GB written to NVMe per step; the rated endurance of /mnt/small (100 TB) is 10,000 steps"
    ]
    assert wear(with_steps(writing, 1_000), box) == [
        "30 GB written to NVMe per step, 30.0 TB in 1,000 steps: "
        "10% of the rated endurance of /mnt/small (100 TB)"
    ]


def test_small_writes_keep_two_digits(result: PlanResult) -> None:
    writing, unrated = (
        replace(result, disk_writes={"/mnt/nvme": 42_000_000}),
        machine_with_endurance(None),
    )

    assert wear(writing, unrated) == ["0.042 GB written to NVMe per step"]
    assert wear(with_steps(writing, 200), unrated) == [
        "0.042 GB written to NVMe per step, 8.4 GB in 200 steps"
    ]


def test_the_summary_names_what_limits_the_step(result: PlanResult) -> None:
    limit = next(iter(result.cost.bounds))

    assert f"limited by {long_name(limit, machine())} (" in summary(result, machine())


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_summary_says_if_a_run_cannot_be_reproduced(
    deterministic: bool, result: PlanResult
) -> None:
    work = result.plan.workload
    numerics = replace(work.numerics, deterministic=deterministic)
    plan = replace(result.plan, workload=replace(work, numerics=numerics))

    text = summary(replace(result, plan=plan), machine())

    assert ("not reproducible" in text) is not deterministic


def test_tables_use_plain_names(result: PlanResult) -> None:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(plan_view(result, machine()))
        name = result.plan.placement.blocks[1].block
        console.print(explain(result, evaluator_for(layers=3, tied=False).inventory, name))
    text = capture.get()

    for words in ("master weights", "activations", "CPU optimizer sweep", "offload", "NVMe writes"):
        assert words in text


def printed(result: PlanResult, box: Machine, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(plan_view(result, box))
    return console.export_text()


def test_bars_of_the_timeline_fit_in_one_line(result: PlanResult) -> None:
    def bars(width: int) -> list[str]:
        lines = printed(result, machine(), width).splitlines()
        return [line for line in lines if any(shade in line for shade in SHADES[1:])]

    assert len(bars(80)) == len(bars(200))
    assert all(line.rstrip().endswith("%") for line in bars(80))


def test_the_table_has_the_memory_of_the_process(result: PlanResult) -> None:
    plan, text = result.plan, printed(result, machine())

    (row,) = (line for line in text.splitlines() if line.startswith("process"))
    assert row.split()[1:5] == ["-", "-", "2.50", "GiB"]
    assert "Python, PyTorch, CUDA, compiler: outside the budgets" in row
    assert f"host memory in all {format_bytes(plan.peak(Tier.DRAM) + 5 * GiB // 2)}" in row
    assert "2.50 GiB for the process itself" in text  # an assumption
    measured = replace(result, plan=replace(plan, process_memory=GiB), assumed=())
    assert "for the process itself" not in printed(measured, machine())


def test_a_machine_without_memory_for_the_process_is_reported(result: PlanResult) -> None:
    box, needed = machine(cards=0), result.plan.host_nbytes
    exact = replace(box, nodes=(replace(box.nodes[0], capacity=needed),))
    small = replace(box, nodes=(replace(box.nodes[0], capacity=needed - 1),))

    assert "choose a smaller --dram" not in printed(result, exact)
    assert "choose a smaller --dram" in printed(result, small)


def test_every_resource_has_a_name_for_people() -> None:
    box = machine()

    assert long_name("gpu", box) == "GPU compute"
    assert long_name("gpu", replace(box, gpus=(), transfers=())) == "CPU compute"
    assert long_name("sweep@0", box) == "the CPU optimizer sweep on node 0 (dram)"
    assert long_name("memory@1", box) == "memory bandwidth of node 1 (cxl)"
    assert long_name("writes@/mnt/nvme", box) == "NVMe writes at /mnt/nvme"
