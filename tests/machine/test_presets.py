"""Planning for a host without a GPU, or with one that was not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import PlanError
from penstock.machine.discovery import discover
from penstock.machine.machine import Gpu, Machine, MemoryNode
from penstock.machine.presets import cpu_machine
from penstock.plan.budget import (
    CPU_PROCESS,
    Budget,
    PathBudget,
    auto_dram,
    parse_budget,
    process_memory,
    with_paths,
)
from penstock.planner import QUICK, make_plan
from penstock.tiers import Tier
from penstock.units import GiB, MiB
from tests.support.machines import machine
from tests.support.models import llama, work

SMALL = llama("3m", 256, 768, 3, 256, 64, 2048, False)
BARE = Machine(name="host", nodes=(MemoryNode(id=0, kind="dram", capacity=8 * GiB, cpus=(0, 1)),))


def test_a_plan_can_be_made_for_this_host() -> None:
    host = cpu_machine(discover())
    budget = parse_budget(host, hbm="24MiB", dram="8MiB", nvme=("/data/scratch:1GiB",))
    host, note = with_paths(host, budget)
    plan = make_plan(SMALL, work(SMALL, 64, 8, micro_batch=2), budget, host, effort=QUICK).plan

    assert "not measured" in note
    assert plan.at_rest(Tier.NVME) > 0.5 * 14 * SMALL.parameters()
    assert plan.peak(Tier.DRAM) <= 8 * MiB
    plan.check(host)


def test_a_plan_for_the_cpu_has_no_cuda_context() -> None:
    budget = Budget(hbm=64 * MiB, dram=64 * MiB)
    planned = make_plan(SMALL, work(SMALL, 64, 8), budget, cpu_machine(BARE), effort=QUICK)

    assert planned.plan.peak(Tier.HBM) < 64 * MiB
    assert "CUDA context" not in [pool.what for pool in planned.plan.pools]
    assert any("cores compute" in text for text in planned.assumed)


def test_cpu_machine_drops_gpus_and_keeps_measured_rates() -> None:
    box = machine()
    found = cpu_machine(box)

    assert (found.gpus, found.transfers) == ((), ())
    assert found.nodes == box.nodes
    assert found.storage == box.storage
    assert found.name == "test (CPU)"


def test_a_cpu_machine_does_not_need_the_memory_of_cuda() -> None:
    with_cuda = replace(machine(), process_memory=4 * GiB)
    without = replace(with_cuda, gpus=(), transfers=())

    assert process_memory(with_cuda) == 4 * GiB
    assert process_memory(cpu_machine(with_cuda)) == CPU_PROCESS
    assert process_memory(cpu_machine(without)) == 4 * GiB


def test_hbm_and_dram_of_a_cpu_machine_share_one_memory() -> None:
    host = cpu_machine(BARE)
    budget = parse_budget(host)
    assert budget.hbm + budget.dram == auto_dram(host)
    assert parse_budget(host, hbm="1GiB").dram == auto_dram(host) - GiB

    budget = Budget(hbm=64 * MiB, dram=64 * MiB)
    plan = make_plan(SMALL, work(SMALL, 64, 8), budget, host, effort=QUICK).plan
    both = plan.peak(Tier.HBM) + plan.peak(Tier.DRAM)
    plan.check(replace(host, nodes=(replace(host.nodes[0], capacity=both),)))
    with pytest.raises(PlanError, match=r"^node 0: needs"):
        plan.check(replace(host, nodes=(replace(host.nodes[0], capacity=both - 1),)))


def test_a_storage_path_without_measurements_gets_assumed_rates() -> None:
    bare = replace(machine(), storage=(replace(machine().storage[0], rates=()),))
    budget = Budget(hbm=GiB, dram=GiB, nvme=(PathBudget(path="/mnt/nvme", nbytes=GiB),))

    box, note = with_paths(bare, budget)

    assert "/mnt/nvme: not measured" in note
    assert [storage.path for storage in box.storage] == ["/mnt/nvme"]
    assert box.storage[0].capacity == bare.storage[0].capacity
    assert box.storage[0].rates


def test_a_plan_can_be_made_for_a_gpu_that_was_not_probed() -> None:
    """`penstock train` starts like this on a new machine: discovered, without measured speeds."""
    probed = machine(cards=1)
    card = Gpu(index=0, name="NVIDIA H200", memory=139 * GiB, pcie_generation=5, pcie_width=16)
    nodes = tuple(replace(node, rates=()) for node in probed.nodes)
    bare = replace(probed, nodes=nodes, gpus=(card,), transfers=(), storage=())
    budget = Budget(hbm=8 * GiB, dram=8 * GiB)

    planned = make_plan(SMALL, work(SMALL, 64, 8), budget, bare, effort=QUICK)

    planned.plan.check(bare)
    assumptions = "; ".join(planned.assumed)
    assert "node 0: copies at 32 GB/s; `penstock probe` measures it" in assumptions
    assert "node 1: copies at 10 GB/s" in assumptions
    assert "PCIe: 55 GB/s" in assumptions
