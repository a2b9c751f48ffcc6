"""A host that trains on its own processor is planned for, in budgets as small as one likes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import PlanError
from penstock.machine.discovery import discover
from penstock.machine.machine import Gpu, Machine, MemoryNode
from penstock.machine.presets import cpu_machine
from penstock.plan.budget import Budget, PathBudget, auto_dram, parse_budget, with_paths
from penstock.planner import QUICK, make_plan, staging_pieces
from penstock.planner.staging_pieces import LEAST, MOST, piece_sizes
from penstock.tiers import Tier
from penstock.units import GiB, MiB, TiB
from tests.support.machines import machine
from tests.support.models import llama, model, work

SMALL = llama("3m", 256, 768, 3, 256, 64, 2048, False)
BARE = Machine(name="host", nodes=(MemoryNode(id=0, kind="dram", capacity=8 * GiB, cpus=(0, 1)),))


def test_this_very_host_can_be_planned_for() -> None:
    host = cpu_machine(discover())
    budget = parse_budget(host, hbm="24MiB", dram="8MiB", nvme=("/data/scratch:1GiB",))
    host, told = with_paths(host, budget)
    plan = make_plan(SMALL, work(SMALL, 64, 8, micro_batch=2), budget, host, effort=QUICK).plan

    assert "not measured" in told
    assert plan.at_rest(Tier.NVME) > 0.5 * 14 * SMALL.parameters()
    assert plan.peak(Tier.DRAM) <= 8 * MiB
    plan.check(host)


def test_no_cuda_context_is_paid_for_where_the_cpu_computes() -> None:
    budget = Budget(hbm=64 * MiB, dram=64 * MiB)
    planned = make_plan(SMALL, work(SMALL, 64, 8), budget, cpu_machine(BARE), effort=QUICK)

    assert planned.plan.peak(Tier.HBM) < 64 * MiB
    assert "CUDA context" not in [pool.what for pool in planned.plan.pools]
    assert any("cores compute" in text for text in planned.assumed)


def test_a_gpu_of_the_host_is_left_out_and_measured_rates_are_kept() -> None:
    box = machine()
    found = cpu_machine(box)

    assert (found.gpus, found.transfers) == ((), ())
    assert found.nodes == box.nodes
    assert found.storage == box.storage
    assert found.name == "test (CPU)"


def test_hbm_and_dram_of_such_a_host_are_one_memory() -> None:
    host = cpu_machine(BARE)
    budget = parse_budget(host)
    assert budget.hbm + budget.dram == auto_dram(host)
    assert parse_budget(host, hbm="1GiB").dram == auto_dram(host) - GiB

    budget = Budget(hbm=64 * MiB, dram=64 * MiB)
    plan = make_plan(SMALL, work(SMALL, 64, 8), budget, host, effort=QUICK).plan
    both = plan.peak(Tier.HBM) + plan.peak(Tier.DRAM)
    plan.check(replace(host, nodes=(replace(host.nodes[0], capacity=both),)))
    with pytest.raises(PlanError, match=r"^node 0: is to hold"):
        plan.check(replace(host, nodes=(replace(host.nodes[0], capacity=both - 1),)))


def test_a_path_that_was_found_but_not_measured_gets_assumed_rates() -> None:
    bare = replace(machine(), storage=(replace(machine().storage[0], rates=()),))
    budget = Budget(hbm=GiB, dram=GiB, nvme=(PathBudget(path="/mnt/nvme", nbytes=GiB),))

    box, told = with_paths(bare, budget)

    assert "/mnt/nvme: not measured" in told
    assert [storage.path for storage in box.storage] == ["/mnt/nvme"]
    assert box.storage[0].capacity == bare.storage[0].capacity
    assert box.storage[0].rates


# Pieces of a sweep.


@pytest.mark.parametrize("dram", [4 * MiB, 64 * MiB, GiB, 8 * GiB, 64 * GiB, TiB])
@pytest.mark.parametrize("inventory", [SMALL, model("llama-3.1-8b")], ids=lambda i: i.model)
def test_three_pieces_are_a_small_part_of_dram(inventory: object, dram: int) -> None:
    workload = work(inventory, 64, 8)  # type: ignore[arg-type]
    right, *rest = piece_sizes(inventory, workload, Budget(hbm=GiB, dram=dram))  # type: ignore[arg-type]

    assert right.bit_count() == 1
    assert LEAST <= right <= MOST
    share = (
        staging_pieces.SMALL_SHARE if right <= staging_pieces.SMALL else staging_pieces.STAGED_SHARE
    )
    assert not rest or (3 * 14 * right <= share * dram and rest[0] < right)


def test_large_models_have_large_pieces_and_the_least_follows_from_the_model_alone() -> None:
    inventory = model("llama-3.1-70b")
    workload = work(inventory, 4096, 8)
    sizes = [piece_sizes(inventory, workload, Budget(hbm=GiB, dram=d * GiB)) for d in (1, 16, 64)]

    assert {found[-1] for found in sizes} == {MOST}


def test_pieces_follow_the_budget_and_small_budgets_are_planned_for() -> None:
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


def test_a_machine_with_a_gpu_is_planned_for_before_anybody_probed_it() -> None:
    """What `penstock train` has on its first day: a look at the machine, and no speeds."""
    probed = machine(cards=1)
    card = Gpu(index=0, name="NVIDIA H200", memory=139 * GiB, pcie_generation=5, pcie_width=16)
    nodes = tuple(replace(node, rates=()) for node in probed.nodes)
    bare = replace(probed, nodes=nodes, gpus=(card,), transfers=(), storage=())
    budget = Budget(hbm=8 * GiB, dram=8 * GiB)

    planned = make_plan(SMALL, work(SMALL, 64, 8), budget, bare, effort=QUICK)

    planned.plan.check(bare)
    told = "; ".join(planned.assumed)
    assert "node 0: copies at 32 GB/s; `penstock probe` measures it" in told
    assert "node 1: copies at 10 GB/s" in told
    assert "PCIe at" in told
