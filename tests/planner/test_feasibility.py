"""What fits in a budget fits in a larger one, and the least budget in an error is the least."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.errors import InfeasibleError
from penstock.machine.machine import Machine
from penstock.model.inventory import Inventory
from penstock.model.known_models import KNOWN_MODELS
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.workload import Workload
from penstock.planner import QUICK, THOROUGH, SearchEffort, find_plan, fits, make_plan
from penstock.tiers import Tier
from penstock.units import GiB, KiB, MiB
from tests.support.machines import machine
from tests.support.models import work

MODELS = ("qwen3-0.6b", "llama-3.2-1b", "qwen2.5-3b", "gemma-3-4b", "llama-3.1-8b", "gemma-2-9b")
PATH = "/mnt/nvme"

Case = tuple[Inventory, Workload, Budget, Machine]


def random_case(seed: int) -> tuple[Case, random.Random]:
    """Return a model that is larger than HBM, and budgets near what it needs."""
    rng = random.Random(seed)
    name = rng.choice(MODELS)
    inventory = KNOWN_MODELS[name].inventory(name)
    context, batch = rng.choice((512, 4096, 8192, 32768)), rng.choice((1, 2, 4, 8, 16))
    context = min(context, inventory.max_context or context)  # Gemma 2 covers 8,192 tokens
    cards = rng.choice((0, 0, 1, 2))
    states = 16 * inventory.parameters()
    activations = 2 * batch * context * inventory.hidden * len(inventory.layers)
    nvme = rng.choice((0, 1, 1)) * int(rng.uniform(0.1, 1.3) * (states + activations))
    budget = Budget(
        hbm=int(rng.uniform(0.02, 0.4) * states + rng.uniform(1, 6) * GiB),
        dram=int(rng.choice((0.05, 1.1)) * rng.uniform(0.05, 1) * (states + activations)),
        cxl=int(rng.uniform(0.05, 0.7) * states) if cards else 0,
        nvme=(PathBudget(path=PATH, nbytes=nvme),) if nvme else (),
    )
    workload = work(inventory, context, batch, micro_batch=rng.choice((1, min(2, batch))))
    return (inventory, workload, budget, machine(cards=cards)), rng


def refusal(case: Case, effort: SearchEffort) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        make_plan(*case, effort=effort)
    return caught.value


def with_budget(case: Case, tier: Tier, nbytes: int) -> Case:
    inventory, workload, budget, box = case
    if tier is Tier.NVME:
        nvme = (PathBudget(path=PATH, nbytes=nbytes),)
        return inventory, workload, replace(budget, nvme=nvme), box
    return inventory, workload, budget.changed(tier, nbytes), box


def check_monotone(seed: int, efforts: tuple[SearchEffort, ...]) -> None:
    """Check larger budgets if the case fits, and the least budgets of the error if it does not."""
    case, rng = random_case(seed)
    if not fits(*case):
        least = refusal(case, QUICK).least
        boundaries = [(Tier(name), nbytes) for name, nbytes in least.items() if nbytes]
        for tier, nbytes in boundaries:
            less = nbytes - max(64 * KiB, min(64 * MiB, nbytes // 32))
            assert not fits(*with_budget(case, tier, less)), (seed, tier, nbytes)
            assert find_plan(*with_budget(case, tier, less), effort=QUICK) is None, (seed, tier)
    else:
        boundaries = [(tier, case[2].of(tier)) for tier in Tier if case[2].of(tier)]
    for tier, nbytes in boundaries:
        for factor in (1, rng.uniform(1, 1.1), rng.uniform(1, 3)):
            larger = with_budget(case, tier, int(nbytes * factor))
            assert fits(*larger), (seed, tier, factor)
        for effort in efforts:
            assert find_plan(*larger, effort=effort) is not None, (seed, tier, factor)


@pytest.mark.parametrize("seed", [1, 4])  # the budgets of the second one are too small
def test_more_memory_never_loses_a_plan(seed: int) -> None:
    check_monotone(seed, (QUICK,))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_more_memory_never_loses_a_plan_of_many(seed: int) -> None:
    check_monotone(seed, (QUICK, THOROUGH))


@pytest.mark.parametrize(
    "dram", [57, 118, *(pytest.param(dram, marks=pytest.mark.long) for dram in (100, 110, 125))]
)
def test_staging_is_reserved_whatever_is_left_of_dram(dram: int) -> None:
    """Groups of 0.8 to 13 GiB leave more or less of DRAM free, and staging needs 0.75 GiB of it."""
    inventory = KNOWN_MODELS["gemma-3-27b"].inventory("gemma-3-27b")
    nvme = (PathBudget(path=PATH, nbytes=900 * GiB),)
    budget = Budget(hbm=int(23.5 * GiB), dram=dram * GiB, nvme=nvme)
    case = (inventory, work(inventory, 4096, 8), budget, machine(cards=0))

    assert fits(*case)
    assert find_plan(*case, effort=QUICK) is not None
