"""Sizes of the pieces that the optimizer sweep is staged in."""

from __future__ import annotations

import pytest

from penstock.plan.budget import Budget, PathBudget
from penstock.planner import QUICK, make_plan, staging_pieces
from penstock.planner.staging_pieces import LEAST, MOST, coarse_piece_elements, piece_sizes
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


@pytest.mark.parametrize(
    ("dram", "sizes"),
    [
        # Three pieces of 14 bytes per parameter: an eighth of DRAM, and 1/32 above 2^22 elements.
        (0, (1 << 12,)),
        (42 * 8 * (1 << 12), (1 << 12,)),
        (42 * 8 * (1 << 13), (1 << 13, 1 << 12)),
        (42 * 8 * (1 << 13) - 8, (1 << 12,)),
        (42 * 8 * (1 << 22), (1 << 22, 1 << 12)),
        (42 * 32 * (1 << 22), (1 << 22, 1 << 12)),
        (42 * 32 * (1 << 23), (1 << 23, 1 << 12)),
        (42 * 32 * (1 << 26), (1 << 24, 1 << 12)),
    ],
)
def test_a_piece_is_the_largest_power_of_two_within_its_share(
    dram: int, sizes: tuple[int, ...]
) -> None:
    assert SMALL.parameters(True) // 1024 < 1 << 13
    assert piece_sizes(SMALL, work(SMALL, 64, 8), Budget(hbm=GiB, dram=dram)) == sizes


def test_a_large_model_has_about_a_thousand_pieces() -> None:
    inventory = llama("1b", 2048, 8192, 12, 2048, 512, 32000, False)
    least = piece_sizes(inventory, work(inventory, 64, 8), Budget(hbm=GiB, dram=0))[-1]
    assert inventory.parameters(True) // 2048 < least <= inventory.parameters(True) // 1024


def test_coarse_pieces_are_about_four_for_each_layer() -> None:
    largest = max(block.flat_elements(True) for block in SMALL.layers)
    for piece in (1 << 12, 1 << 16, 1 << 17):
        coarse = coarse_piece_elements(SMALL, piece)
        assert coarse % piece == 0
        assert coarse * 4 >= largest
        assert coarse == piece or coarse * 2 < largest
    assert coarse_piece_elements(SMALL, 1 << 24) == 1 << 24
