"""A workload that fits nowhere: suggestions that the machine can follow, and only those."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import InfeasibleError
from penstock.machine.machine import Machine
from penstock.plan.budget import Budget, PathBudget, parse_budget, tier_capacity, with_paths
from penstock.plan.workload import Workload
from penstock.planner import advice, fits, make_plan
from penstock.planner.advice import WhatIf, advise
from penstock.planner.search import QUICK
from penstock.tiers import Tier
from penstock.units import GiB, MiB, parse_bytes
from tests.support.machines import machine
from tests.support.models import llama, work

MODEL = llama("small", 1024, 4096, 4, 1024, 256, 32000, False)
NVME = (PathBudget(path="/mnt/nvme", nbytes=64 * GiB),)


def small_machine(*, hbm: int = 3 * GiB, dram: int = GiB, storage: bool = True) -> Machine:
    box = machine(cards=0)
    return replace(
        box,
        nodes=tuple(replace(node, capacity=dram) for node in box.nodes),
        gpus=tuple(replace(gpu, memory=hbm) for gpu in box.gpus),
        storage=box.storage if storage else (),
    )


def refused(workload: Workload, budget: Budget, box: Machine) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        make_plan(MODEL, workload, budget, box, effort=QUICK)
    return caught.value


def test_a_budget_that_the_machine_cannot_have_is_not_suggested() -> None:
    box = small_machine()
    error = refused(work(MODEL, 1024, 4), Budget(hbm=2600 * MiB, dram=512 * MiB), box)

    least = error.least["dram"]
    assert least is not None
    assert least > GiB
    text = str(error)
    assert "it fits with --nvme /mnt/nvme:" in text
    assert "with --dram" not in text
    assert "no --dram on test is enough: that takes" in text
    assert "and it has 1.00 GiB" in text


def test_every_suggestion_fits() -> None:
    box = small_machine(hbm=64 * GiB, dram=64 * GiB)
    workload = work(MODEL, 16384, 4, micro_batch=4)
    budget = Budget(hbm=2300 * MiB, dram=32 * GiB, nvme=NVME)
    error = refused(workload, budget, box)
    found = dict(re.findall(r"with --([a-z-]+) (\S+?)(?=,|;| or more|$)", str(error)))
    assert {"hbm", "context"} <= set(found)

    for name, value in found.items():
        changed, limits = workload, budget
        if name == "context":
            changed = replace(workload, context=int(value))
        elif name == "micro-batch":
            numerics = replace(workload.numerics, micro_batch=int(value))
            changed = replace(workload, numerics=numerics)
        else:
            nbytes = parse_bytes(value.rpartition(":")[2])
            limits = budget.changed(Tier(name), nbytes)
        assert fits(MODEL, changed, limits, box), (name, value)


def test_a_budget_beyond_the_machine_does_not_count_for_suggestions() -> None:
    box = small_machine()
    workload, budget = work(MODEL, 1024, 4), Budget(hbm=2600 * MiB, dram=64 * GiB)
    error = refused(workload, budget, box)

    text = str(error)
    assert "64.0 GiB dram (test has 1.00 GiB)" in text
    least = error.least["hbm"]
    assert least is not None
    assert fits(MODEL, workload, budget.changed(Tier.HBM, least), box)
    assert least > budget.hbm  # what it has is not enough
    assert least <= 3 * GiB or "no --hbm on test is enough" in text


def test_a_machine_without_a_drive_is_told_that_one_would_help() -> None:
    error = refused(
        work(MODEL, 1024, 4), Budget(hbm=2600 * MiB, dram=512 * MiB), small_machine(storage=False)
    )

    assert "it fits with an NVMe drive (--nvme PATH:SIZE)" in str(error)
    assert error.least["nvme"] is None


@pytest.mark.parametrize("storage", [True, False], ids=["a drive", "no drive"])
def test_less_hbm_is_suggested_together_with_nvme(storage: bool) -> None:
    """Neither budget is enough, and NVMe alone does not help."""
    box = small_machine(hbm=64 * GiB, dram=4 * GiB, storage=storage)
    workload, budget = work(MODEL, 1024, 4), Budget(hbm=MiB, dram=512 * MiB)
    error = refused(workload, budget, box)

    found = re.search(r"with --hbm (\S+) and --nvme (\S+):(\S+?)(?=,|;|$)", str(error))
    assert found is not None, str(error)
    hbm, nvme = parse_bytes(found[1]), parse_bytes(found[3])
    assert found[2] == ("/mnt/nvme" if storage else "PATH")
    assert error.least["nvme"] is None
    alone = error.least["hbm"]
    assert alone is not None
    assert hbm < 0.9 * alone
    path = PathBudget(path=found[2], nbytes=nvme)
    both = replace(budget, hbm=hbm, nvme=(path,))
    assert fits(MODEL, workload, both, with_paths(box, both)[0])
    less = replace(both, hbm=int(0.9 * hbm))
    assert not fits(MODEL, workload, less, with_paths(box, less)[0])


def test_the_whole_machine_is_suggested_if_more_of_one_tier_is_not_enough() -> None:
    box = small_machine(hbm=2900 * MiB, dram=4 * GiB)
    error = refused(work(MODEL, 1024, 4), Budget(hbm=MiB, dram=MiB), box)

    assert "it fits with --hbm auto --dram auto --nvme /mnt/nvme:SIZE" in str(error)
    whole = parse_budget(box, nvme=("/mnt/nvme:1TiB",))
    assert fits(MODEL, work(MODEL, 1024, 4), whole, box)
    assert not fits(MODEL, work(MODEL, 1024, 4), parse_budget(box), box)


def test_the_message_says_so_if_nothing_helps() -> None:
    error = refused(work(MODEL, 256, 1), Budget(hbm=MiB, dram=MiB), small_machine(hbm=GiB))

    assert "it fits with" not in str(error)
    assert "train a smaller model" in str(error)


@pytest.mark.parametrize(
    ("box", "tier", "expected"),
    [
        (small_machine(), Tier.HBM, 3 * GiB),
        (replace(small_machine(), gpus=(), transfers=()), Tier.HBM, GiB),
        (small_machine(), Tier.DRAM, GiB),
        (small_machine(), Tier.CXL, 0),
        (small_machine(), Tier.NVME, machine().storage[0].capacity),
        (small_machine(storage=False), Tier.NVME, None),
    ],
)
def test_capacity_of_each_tier(box: Machine, tier: Tier, expected: int | None) -> None:
    assert tier_capacity(box, Budget(hbm=0, dram=0), tier) == expected


# Advice for plans that fit.


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    """The workloads that advice considers."""
    workloads: list[Workload] = []
    for name in ("fits", "quick_step_seconds"):
        original = getattr(advice, name)

        def record(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            workloads.append(args[1])
            return _original(*args, **kwargs)

        monkeypatch.setattr(advice, name, record)
    return workloads


def test_advice_keeps_the_numerics_of_the_plan(asked: list[Workload]) -> None:
    """Compiled layers stay compiled, and a micro-batch that the user set stays."""
    box = machine(cards=0)
    budget = parse_budget(box, hbm="2700MiB", dram="1200MiB", nvme=("/mnt/nvme:64GiB",))
    workload = work(MODEL, 8192, 4)
    numerics = replace(workload.numerics, micro_batch=1, compiled=True, deterministic=True)
    workload = replace(workload, numerics=numerics)
    result = make_plan(MODEL, workload, budget, box, effort=QUICK)
    assert result.plan.peak(Tier.NVME)

    advise(WhatIf(MODEL, workload, budget, box, result))

    assert {each.context for each in asked} > {8192}
    assert {each.numerics for each in asked} == {numerics}
