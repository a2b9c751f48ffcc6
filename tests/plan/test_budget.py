"""Budgets as users type them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import PlanError
from penstock.machine.presets import cpu_machine, preset
from penstock.plan.budget import (
    GPU_PROCESS,
    HBM_GRAIN,
    HOST_GRAIN,
    Budget,
    PathBudget,
    auto_dram,
    auto_hbm,
    check_budget_memory,
    check_paths,
    parse_budget,
    split_path_budget,
    tier_capacity,
    with_budget_memory,
)
from penstock.tiers import Tier
from penstock.units import GiB
from tests.support.machines import machine


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dram": "lots"}, "^dram: 'lots' is not a size"),
        ({"hbm": "-3GiB"}, "^hbm: must be 0 or more, got -3GiB"),
        ({"nvme": ("/mnt/nvme:1GiB", "/mnt/nvme:2GiB")}, "^nvme: names a path twice"),
        ({"nvme": ("/mnt/nvme:huge",)}, "^nvme: must be PATH or PATH:SIZE"),
        ({"cxl": -1}, "^cxl: must be 0 or more, got -1"),
        ({"cxl": 10**30}, "^cxl: a number of 100 bits is more than any memory or drive has"),
        ({"dram": 1.5}, "^dram: 1.5 is not a size"),
        ({"hbm": None}, "^hbm: None is not a size"),
    ],
)
def test_an_invalid_size_names_the_tier(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_budget(machine(), **given)


def test_a_budget_may_be_a_number_of_bytes() -> None:
    budget = parse_budget(machine(), hbm=3 * GiB, dram=5000, cxl=0)
    assert (budget.hbm, budget.dram, budget.cxl) == (3 * GiB, 5000, 0)


def test_auto_is_the_free_memory_less_a_reserve_and_the_process() -> None:
    box = preset("desktop-24gb")
    budget = parse_budget(box)

    assert 23 * GiB < budget.hbm < (box.gpus[0].memory or 0)
    reserve = GiB + int(0.05 * 64 * GiB)
    assert budget.dram == 64 * GiB - reserve - GPU_PROCESS
    measured = replace(box, process_memory=3 * GiB)
    assert parse_budget(measured).dram == 64 * GiB - reserve - 3 * GiB
    assert budget.of(Tier.NVME) == 0
    assert parse_budget(box, nvme=("400GiB",)).nvme[0].path == "/mnt/nvme"


def test_auto_stays_the_same_while_free_memory_changes_a_little() -> None:
    box = preset("desktop-24gb")
    node, gpu = box.nodes[0], replace(box.gpus[0], memory=24 * GiB)

    def budgets(host: int, device: int) -> tuple[int, int]:
        found = replace(
            box,
            nodes=(replace(node, free=node.capacity - host), *box.nodes[1:]),
            gpus=(replace(gpu, free=24 * GiB - device),),
        )
        budget = parse_budget(found)
        return budget.hbm, budget.dram

    grain = int(HOST_GRAIN * node.capacity)
    base = budgets(10 * grain, 10 * HBM_GRAIN)
    assert budgets(9 * grain + 1, 9 * HBM_GRAIN + 1) == base
    assert budgets(9 * grain, 9 * HBM_GRAIN) == (base[0] + HBM_GRAIN, base[1] + grain)


def test_a_path_without_a_size_is_all_that_is_free_there() -> None:
    box = machine()
    storage = replace(box.storage[0], path="/mnt/nvme", free=7 * GiB)
    box = replace(box, storage=(storage,))

    for text in ("/mnt/nvme", "/mnt/nvme:auto"):
        (path,) = parse_budget(box, nvme=(text,)).nvme
        assert (path.path, path.nbytes) == ("/mnt/nvme", 7 * GiB)
    assert split_path_budget("4GiB") == ("", "4GiB")
    assert split_path_budget("nvme") == ("nvme", "auto")
    with pytest.raises(
        PlanError, match=r"nvme: must say how much of /data to use, such as --nvme /data:"
    ):
        parse_budget(box, nvme=("/data",))
    for text in ("1GiB", ":1GiB"):
        with pytest.raises(PlanError, match=r'must name a path, such as "/mnt/nvme:1GiB"$'):
            parse_budget(replace(box, storage=()), nvme=(text,))
    with pytest.raises(PlanError, match=r"nvme: must be PATH or PATH:SIZE, .* got /mnt/nvme:much"):
        parse_budget(box, nvme=("/mnt/nvme:much",))


def test_a_changed_budget_differs_in_one_tier_and_keeps_the_proportions_of_paths() -> None:
    paths = (PathBudget(path="/a", nbytes=300), PathBudget(path="/b", nbytes=100))
    budget = Budget(hbm=1, dram=2, cxl=3, nvme=paths)

    for tier in Tier:
        changed = budget.changed(tier, 1000)
        assert {t: changed.of(t) for t in Tier if t is not tier} == {
            t: budget.of(t) for t in Tier if t is not tier
        }
        assert changed.of(tier) == 1000
    assert [path.nbytes for path in budget.changed(Tier.NVME, 1000).nvme] == [750, 250]


def test_a_gpu_without_a_known_size_has_no_automatic_budget() -> None:
    box = machine()

    assert auto_hbm(replace(box, gpus=(replace(box.gpus[0], memory=None),))) == 0


def test_without_a_gpu_a_quarter_of_free_dram_is_device_memory() -> None:
    box = replace(machine(), gpus=(), transfers=())

    assert auto_hbm(box) == int(0.25 * auto_dram(box)) > 0
    budget = parse_budget(box)
    assert (budget.hbm, budget.dram) == (auto_hbm(box), auto_dram(box) - auto_hbm(box))


@pytest.mark.parametrize("tier", ["hbm", "dram", "cxl"])
def test_a_negative_budget_is_refused(tier: str) -> None:
    with pytest.raises(PlanError, match=f"^{tier}: must be 0 or more, got -1"):
        Budget(**{"hbm": 0, "dram": 0, "cxl": 0, tier: -1})


def test_a_machine_like_this_one_has_the_memory_of_the_budget() -> None:
    box = machine(cards=3)
    nodes = tuple(replace(node, capacity=(node.id + 1) * GiB) for node in box.nodes)
    box = replace(box, nodes=nodes)
    budget = Budget(hbm=500 * GiB, dram=10 * GiB, cxl=90 * GiB)
    larger, remarks = with_budget_memory(box, budget)

    assert [remark.split(" of ")[1][:3] for remark in remarks] == ["hbm", "dra", "cxl"]
    assert larger.gpus[0].memory == 500 * GiB
    assert larger.nodes[0].capacity == 10 * GiB + GPU_PROCESS
    assert [node.capacity for node in larger.nodes[1:]] == [20 * GiB, 30 * GiB, 40 * GiB]
    assert with_budget_memory(larger, budget) == (larger, ())
    with pytest.raises(PlanError, match=r"^hbm: is 500 GiB, and this machine has 192 GiB"):
        check_budget_memory(box, budget)
    check_budget_memory(larger, budget)


def test_only_the_tier_that_is_too_small_grows() -> None:
    box = machine(cards=1)
    for tier, budget in (
        (Tier.HBM, Budget(hbm=193 * GiB, dram=GiB)),
        (Tier.DRAM, Budget(hbm=GiB, dram=2048 * GiB)),
        (Tier.CXL, Budget(hbm=GiB, dram=GiB, cxl=1025 * GiB)),
    ):
        larger, (remark,) = with_budget_memory(box, budget)
        assert tier.value in remark
        assert (larger.gpus != box.gpus) == (tier is Tier.HBM)
        assert (larger.nodes[0] != box.nodes[0]) == (tier is Tier.DRAM)
        assert (larger.nodes[1] != box.nodes[1]) == (tier is Tier.CXL)


def test_a_tier_that_the_machine_lacks_cannot_grow() -> None:
    with pytest.raises(PlanError, match=r"^cxl: is 1\.00 GiB, but test has no CXL memory"):
        with_budget_memory(machine(cards=0), Budget(hbm=GiB, dram=GiB, cxl=GiB))
    with pytest.raises(
        PlanError, match=r"^cxl: .* this machine has no CXL memory; leave --cxl out"
    ):
        check_budget_memory(machine(cards=0), Budget(hbm=GiB, dram=GiB, cxl=GiB))


def test_without_a_gpu_the_hbm_budget_is_memory_of_the_host() -> None:
    box = cpu_machine(machine(cards=0))
    larger, (remark,) = with_budget_memory(box, Budget(hbm=2048 * GiB, dram=GiB))
    assert "of hbm" in remark
    assert larger.nodes[0].capacity >= 2048 * GiB


def test_a_path_that_the_machine_does_not_list_is_named() -> None:
    box = machine()
    check_paths(box, Budget(hbm=0, dram=0, nvme=(PathBudget(path="/mnt/nvme", nbytes=1),)))
    other = Budget(hbm=0, dram=0, nvme=(PathBudget(path="/mnt/other", nbytes=1),))
    with pytest.raises(PlanError, match=r"/mnt/other is not in .*\(/mnt/nvme\)"):
        check_paths(box, other)
    with pytest.raises(PlanError, match=r"\(none\)"):
        check_paths(replace(box, storage=()), other)


def test_a_full_disk_has_no_capacity() -> None:
    box = machine()
    full = replace(box, storage=(replace(box.storage[0], free=0),))
    assert tier_capacity(full, Budget(hbm=0, dram=0), Tier.NVME) == 0
    free = replace(box, storage=(replace(box.storage[0], free=5 * GiB),))
    assert tier_capacity(free, Budget(hbm=0, dram=0), Tier.NVME) == 5 * GiB
