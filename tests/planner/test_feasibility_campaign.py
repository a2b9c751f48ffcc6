"""Random models, machines and budgets: what fits, what the search finds, and the least budgets.

Budgets are between 60 and 125 % of what the model needs, so that about half of the cases fit and
most are near the boundary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.machine.machine import Machine
from penstock.machine.presets import preset, preset_names
from penstock.model.inventory import Inventory
from penstock.model.known_models import KNOWN_MODELS
from penstock.plan.budget import Budget, PathBudget, tier_capacity, with_paths
from penstock.plan.workload import Workload
from penstock.planner import QUICK, find_plan, fits, least_budget
from penstock.tiers import Tier
from penstock.units import GiB, KiB, MiB
from tests.support.machines import machine
from tests.support.models import work

PATH = "/mnt/nvme"

Case = tuple[Inventory, Workload, Budget, Machine]


def random_case(rng: random.Random) -> Case:
    name = rng.choice(tuple(KNOWN_MODELS))
    inventory = KNOWN_MODELS[name].inventory(name)
    boxes = [machine(cards=cards) for cards in range(3)] + [preset(n) for n in preset_names()]
    box = rng.choice(boxes)
    context = min(rng.choice((512, 2048, 4096, 8192, 32768)), inventory.max_context or 32768)
    batch = rng.choice((1, 2, 4, 8, 16))
    states = 16 * inventory.parameters()
    activations = 2 * batch * context * inventory.hidden * len(inventory.layers)
    hbm = int(rng.uniform(0.02, 0.3) * states + rng.uniform(1, 8) * GiB)
    host = int(rng.uniform(0.6, 1.25) * max(0, states + activations - hbm))
    parts = [rng.random(), rng.random() * bool(box.cxl_nodes), rng.random() * (rng.random() < 0.6)]
    dram, cxl, nvme = (int(host * part / sum(parts)) for part in parts)
    paths = (PathBudget(path=PATH, nbytes=nvme),) if nvme else ()
    # Staging needs DRAM, too, however little of it there is for the model.
    budget = Budget(hbm=hbm, dram=dram + rng.choice((0, 1, 2)) * GiB, cxl=cxl, nvme=paths)
    micro_batch = rng.choice((1, min(2, batch)))
    workload = work(inventory, context, batch, micro_batch=micro_batch)
    return inventory, workload, budget, with_paths(box, budget)[0]


def with_budget(case: Case, tier: Tier, nbytes: int) -> Case:
    inventory, workload, budget, box = case
    if tier is Tier.NVME:
        path = PATH if budget.nvme else box.storage[0].path
        budget = replace(budget, nvme=(PathBudget(path=path, nbytes=nbytes),))
        return inventory, workload, budget, with_paths(box, budget)[0]
    return inventory, workload, budget.changed(tier, nbytes), box


def problems(seed: int) -> Iterator[str]:
    """Yield what is wrong with one case."""
    rng = random.Random(seed)
    case = random_case(rng)
    label = f"seed {seed}: {case[0].model} on {case[3].name}"
    fit = fits(*case)
    if seed % 3 == 0 and (find_plan(*case, effort=QUICK) is not None) != fit:
        yield f"{label}: fits says {fit}, and the search disagrees"
    if fit:
        for tier in filter(case[2].of, Tier):
            for factor in (rng.uniform(1, 1.02), rng.uniform(1, 1.3), rng.uniform(1, 4)):
                if not fits(*with_budget(case, tier, int(case[2].of(tier) * factor))):
                    yield f"{label}: {factor:.3f} times as much {tier} does not fit"
    elif seed % 2:
        yield from _least_problems(case, rng, label)


def _least_problems(case: Case, rng: random.Random, label: str) -> Iterator[str]:
    for name, least in least_budget(*case).items():
        if least is None:
            continue
        tier, grain = Tier(name), max(64 * KiB, min(64 * MiB, least // 32))
        capacity = None if tier is Tier.NVME else tier_capacity(case[3], case[2], tier)
        for factor in (1, rng.uniform(1, 1.1), rng.uniform(1, 2)):
            enough = int(least * factor)
            # A least budget may be more than the machine has; then nothing fits there.
            if (capacity is None or enough <= capacity) and not fits(
                *with_budget(case, tier, enough)
            ):
                yield f"{label}: {enough} of {tier} is not enough, and {least} is the least"
        for less in (least - grain, int(least * rng.uniform(0.8, 1)) - grain):
            if less > 0 and fits(*with_budget(case, tier, less)):
                yield f"{label}: {less} of {tier} is enough, and {least} is the least"


def test_a_sample_of_random_budgets() -> None:
    assert [problem for seed in range(3) for problem in problems(seed)] == []


@pytest.mark.long
@pytest.mark.parametrize("start", range(3, 303, 25))
def test_random_budgets(start: int) -> None:
    """300 cases, in about four minutes of CPU time."""
    assert [problem for seed in range(start, start + 25) for problem in problems(seed)] == []
