"""The reconstruction of MemAscend's memory figures matches the paper, and Penstock needs less."""

from __future__ import annotations

from statistics import mean

import pytest

from bench.baselines.memascend import exact_pool, memascend, slotted_pool, zero_infinity
from penstock.plan.budget import Budget, PathBudget
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.feasibility import first_fit
from penstock.tiers import Tier
from penstock.units import GiB, TiB
from tests.support.machines import machine
from tests.support.models import model, work

# Baseline pool and exact need in GiB, and waste in %.
PUBLISHED = {
    "llama-3.1-8b": (8.81, 2.36, 73.16),
    "qwen2.5-7b": (9.14, 2.46, 73.03),
    "qwen2.5-14b": (13.05, 3.41, 73.85),
    "qwen2.5-32b": (13.05, 3.81, 70.82),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_pool_sizes_match_the_published_ones(name: str) -> None:
    inventory = model(name)
    pool, need, waste = PUBLISHED[name]

    assert slotted_pool(inventory) / GiB == pytest.approx(pool, abs=0.005)
    assert exact_pool(inventory) / GiB == pytest.approx(need, abs=0.005)
    assert 100 * (1 - exact_pool(inventory) / slotted_pool(inventory)) == pytest.approx(
        waste, abs=0.05
    )


def test_average_savings_match_the_published_ones() -> None:
    def saving(name: str, *, fp16: bool) -> float:
        inventory = model(name)
        return 1 - memascend(inventory).total / zero_infinity(inventory, fp16=fp16).total

    assert mean(saving(name, fp16=True) for name in PUBLISHED) == pytest.approx(0.557, abs=0.01)
    assert mean(saving(name, fp16=False) for name in PUBLISHED) == pytest.approx(0.2519, abs=0.03)


@pytest.mark.parametrize("name", PUBLISHED)
def test_penstock_needs_less_host_memory(name: str) -> None:
    inventory = model(name)
    paper = memascend(inventory)
    nvme = (PathBudget(path="/mnt/nvme", nbytes=4 * TiB),)
    budget = Budget(hbm=40 * GiB, dram=4 * GiB, nvme=nvme)
    evaluator = PlanEvaluator(inventory, work(inventory, 4096, 4), machine(cards=0), budget)

    # Everything is stored on NVMe, so DRAM holds only staging buffers.
    candidate = first_fit(evaluator)

    assert candidate is not None
    assert evaluator.total_nbytes(candidate)[Tier.DRAM] < (paper.total - paper.common) / 7
