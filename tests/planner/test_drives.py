"""Stripes follow the speed of drives, and a slow drive is left out if that is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.machine.machine import Machine
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.plan import Plan
from penstock.planner import make_plan
from penstock.planner.cost import Rates
from penstock.planner.cost.rates import DiskRates
from penstock.planner.drives import (
    capacity_of,
    drive_sets,
    drive_speed,
    weights_by_speed,
    weights_to_hold,
)
from penstock.tiers import Tier
from penstock.units import GiB, TiB
from tests.support.machines import machine, rate
from tests.support.models import llama, work

MODEL = llama("1b", 2048, 8192, 12, 2048, 512, 32000, False)


def with_drives(**speeds: float) -> Machine:
    """Return a machine with a drive of each name and speed in bytes per second."""
    box = machine(cards=0)
    first = box.storage[0]
    return replace(
        box,
        storage=tuple(
            replace(
                first,
                path=f"/mnt/{name}",
                rates=tuple(replace(r, bytes_per_second=rate(speed)) for r in first.rates),
            )
            for name, speed in speeds.items()
        ),
    )


@pytest.mark.parametrize(
    ("read", "write", "both", "speed"),
    [(6.0, 3.0, None, 2.0), (6.0, 3.0, 5.0, 2.5), (6.0, 1.0, 5.0, 1.0), (2.0, 3.0, 5.0, 2.0)],
)
def test_a_drive_is_as_fast_as_it_reads_and_writes_back(
    read: float, write: float, both: float | None, speed: float
) -> None:
    rates = replace(Rates.of(machine()), disks={"/a": DiskRates(read=read, write=write, both=both)})

    assert drive_speed(rates, "/a") == pytest.approx(speed)


def budget(**sizes: int) -> Budget:
    nvme = tuple(PathBudget(path=f"/mnt/{name}", nbytes=size) for name, size in sizes.items())
    return Budget(hbm=6 * GiB, dram=6 * GiB, nvme=nvme)


def stored(plan: Plan) -> dict[str, int]:
    """Return the bytes on each path that the plan uses."""
    totals: dict[str, int] = {}
    for block in plan.placement.blocks:
        for home in block.homes:
            for share in home.shares:
                if share.path:
                    totals[share.path] = totals.get(share.path, 0) + share.nbytes
    return totals


def test_a_slow_drive_does_not_make_a_plan_slower() -> None:
    box, workload = with_drives(fast=5e9, slow=0.45e9), work(MODEL, 1024, 4)
    alone = make_plan(MODEL, workload, budget(fast=TiB), box)
    both = make_plan(MODEL, workload, budget(fast=TiB, slow=TiB), box)

    assert alone.plan.peak(Tier.NVME)
    assert both.cost.step_seconds <= alone.cost.step_seconds


def test_a_drive_that_is_too_slow_to_help_is_left_out() -> None:
    box, workload = with_drives(slow=1e6, fast=5e9), work(MODEL, 1024, 4)

    result = make_plan(MODEL, workload, budget(slow=TiB, fast=TiB), box)

    assert set(stored(result.plan)) == {"/mnt/fast"}
    assert set(result.disk_writes) == {"/mnt/fast"}


def test_a_stripe_follows_speed_not_budgets() -> None:
    box, workload = with_drives(fast=6e9, slow=2e9), work(MODEL, 1024, 4)

    result = make_plan(MODEL, workload, budget(fast=TiB, slow=4 * TiB), box)

    used = stored(result.plan)
    assert used["/mnt/fast"] / used["/mnt/slow"] == pytest.approx(3, rel=0.05)
    alone = make_plan(MODEL, workload, budget(fast=TiB), box)
    assert result.cost.step_seconds < 0.9 * alone.cost.step_seconds


def test_a_small_fast_drive_is_filled_and_the_slow_one_holds_the_rest() -> None:
    box, workload = with_drives(fast=6e9, slow=2e9), work(MODEL, 1024, 4)
    limits = replace(budget(fast=2 * GiB, slow=TiB), dram=4 * GiB)

    result = make_plan(MODEL, workload, limits, box)

    used = stored(result.plan)
    assert used["/mnt/slow"] > used["/mnt/fast"]
    assert 0.9 * 2 * GiB < used["/mnt/fast"] <= 2 * GiB
    alone = make_plan(MODEL, workload, replace(budget(slow=TiB), dram=4 * GiB), box)
    assert result.cost.step_seconds <= alone.cost.step_seconds


@pytest.mark.parametrize(
    "fast", [1 * GiB, *(pytest.param(size, marks=pytest.mark.long) for size in (3 * GiB, TiB))]
)
def test_no_drive_holds_more_than_its_budget(fast: int) -> None:
    box, workload = with_drives(fast=6e9, slow=1e9), work(MODEL, 1024, 4)
    limits = budget(fast=fast, slow=TiB)

    used = stored(make_plan(MODEL, workload, limits, box).plan)

    for path in limits.nvme:
        assert used.get(path.path, 0) <= path.nbytes


def test_the_sets_to_try_contain_the_fastest_drives_and_all_but_each() -> None:
    box = with_drives(a=1e9, b=3e9, c=2e9)
    rates = Rates.of(box)

    sets = [set(s) for s in drive_sets(budget(a=GiB, b=GiB, c=GiB), rates)]

    names = [{name.removeprefix("/mnt/") for name in paths} for paths in sets]
    assert names == [{"a", "b", "c"}, {"b", "c"}, {"b"}, {"a", "c"}, {"a", "b"}]


def test_weights_are_speeds_until_a_drive_is_full() -> None:
    rates = Rates.of(with_drives(a=1e9, b=3e9))
    limits, paths = budget(a=10 * GiB, b=6 * GiB), ("/mnt/a", "/mnt/b")

    assert drive_speed(rates, "/mnt/b") == pytest.approx(3 * drive_speed(rates, "/mnt/a"))
    by_speed = weights_by_speed(limits, rates, paths)
    assert capacity_of(limits, by_speed) == pytest.approx(8 * GiB)
    held = weights_to_hold(limits, rates, paths, 4 * GiB)
    assert held == {"/mnt/a": pytest.approx(GiB), "/mnt/b": pytest.approx(3 * GiB)}
    held = weights_to_hold(limits, rates, paths, 12 * GiB)
    assert held == {"/mnt/a": pytest.approx(6 * GiB), "/mnt/b": pytest.approx(6 * GiB)}
    assert capacity_of(limits, held) == pytest.approx(12 * GiB)
