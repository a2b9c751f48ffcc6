"""Sizes of the pieces that the optimizer sweep is staged in."""

from __future__ import annotations

import pytest

from penstock.plan.budget import Budget, PathBudget
from penstock.planner import QUICK, make_plan, staging_pieces
from penstock.planner.staging_pieces import LEAST, MOST, piece_sizes
from penstock.units import GiB, MiB, TiB
from tests.support.machines import machine
from tests.support.models import llama, model, work

SMALL = llama("3m", 256, 768, 3, 256, 64, 2048, False)


@pytest.mark.parametrize("dram", [4 * MiB, 64 * MiB, GiB, 8 * GiB, 64 * GiB, TiB])
@pytest.mark.parametrize("inventory", [SMALL, model("llama-3.1-8b")], ids=lambda i: i.model)
def test_three_pieces_take_a_small_share_of_dram(inventory: object, dram: int) -> None:
    workload = work(inventory, 64, 8)  # type: ignore[arg-type]
    preferred, *rest = piece_sizes(inventory, workload, Budget(hbm=GiB, dram=dram))  # type: ignore[arg-type]

    assert preferred.bit_count() == 1
    assert LEAST <= preferred <= MOST
    share = (
        staging_pieces.SMALL_SHARE
        if preferred <= staging_pieces.SMALL
        else staging_pieces.STAGED_SHARE
    )
    assert not rest or (3 * 14 * preferred <= share * dram and rest[0] < preferred)


def test_large_models_use_the_largest_piece_with_any_budget() -> None:
    inventory = model("llama-3.1-70b")
    workload = work(inventory, 4096, 8)
    sizes = [piece_sizes(inventory, workload, Budget(hbm=GiB, dram=d * GiB)) for d in (1, 16, 64)]

    assert {each[-1] for each in sizes} == {MOST}


def test_piece_sizes_depend_on_the_budget() -> None:
    inventory = llama("1b", 2048, 8192, 12, 2048, 512, 32000, False)
    workload = work(inventory, 1024, 4)
    nvme = (PathBudget(path="/mnt/nvme", nbytes=TiB),)
    sizes = set()
    for dram in (440, 480, 640, 1024, 4096):
        budget = Budget(hbm=5 * GiB, dram=dram * MiB, nvme=nvme)
        plan = make_plan(inventory, workload, budget, machine(), effort=QUICK).plan
        assert plan.placement.piece_elements in piece_sizes(inventory, workload, budget)
        sizes.add(plan.placement.piece_elements)

    assert len(sizes) > 1
