"""Plan files, and checks of a plan against its budget, the model and the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import PlanError
from penstock.machine.presets import cpu_machine
from penstock.plan.budget import CPU_PROCESS, GPU_PROCESS, Budget, PathBudget
from penstock.plan.cuda_allocator import PAGE, SMALL_PAGE
from penstock.plan.plan import Plan
from penstock.plan.working_memory import PartMemory, WorkingMemory
from penstock.planner import QUICK, make_plan
from penstock.tiers import Tier
from penstock.units import GiB, MiB, TiB
from tests.support.machines import machine
from tests.support.models import llama, work

MODEL = llama("small", 1024, 4096, 4, 1024, 256, 32000, False)
NVME = (PathBudget(path="/mnt/nvme", nbytes=TiB),)


@pytest.fixture(scope="module")
def plan() -> Plan:
    budget = Budget(hbm=2400 * MiB, dram=GiB, cxl=GiB, nvme=NVME)
    return make_plan(MODEL, work(MODEL, 1024, 4), budget, machine(), effort=QUICK).plan


def test_a_saved_plan_loads_unchanged(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == plan


def save_altered(plan: Plan, tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_a_newer_file_version_is_rejected(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="version: is 2, but this Penstock reads versions up to 1"):
        Plan.load(save_altered(plan, tmp_path, version=2))


def test_a_plan_larger_than_its_budget_is_rejected(plan: Plan, tmp_path: Path) -> None:
    budget = {"hbm": "1GiB", "dram": "1GiB", "cxl": "1GiB"}
    with pytest.raises(PlanError, match=r"budget\.hbm: is 1\.00 GiB, but the plan needs"):
        Plan.load(save_altered(plan, tmp_path, budget=budget))


def test_a_plan_without_the_memory_of_the_process_is_still_read(plan: Plan, tmp_path: Path) -> None:
    old = json.loads(save_altered(plan, tmp_path).read_text())
    assert old.pop("process_memory") == plan.process_memory > 0
    (tmp_path / "old.json").write_text(json.dumps(old))

    loaded = Plan.load(tmp_path / "old.json")

    assert loaded == replace(plan, process_memory=0)
    assert loaded.host_nbytes == plan.host_nbytes - plan.process_memory


def test_host_memory_includes_the_hbm_tier_only_without_a_gpu(plan: Plan) -> None:
    host = plan.peak(Tier.DRAM) + plan.peak(Tier.CXL)
    assert plan.host_nbytes == host + GPU_PROCESS

    on_cpu = make_plan(MODEL, plan.workload, plan.budget, cpu_machine(machine()), effort=QUICK).plan

    assert on_cpu.host_nbytes == sum(on_cpu.peak(tier) for tier in Tier) + CPU_PROCESS


def test_a_plan_for_another_model_is_rejected(plan: Plan) -> None:
    other = llama("other", 1024, 4096, 5, 1024, 256, 32000, False)

    plan.check_model(MODEL)
    with pytest.raises(PlanError, match=f"^fingerprint: is {MODEL.fingerprint} .small., but other"):
        plan.check_model(other)


def test_a_machine_with_too_little_memory_is_rejected(plan: Plan) -> None:
    box = machine()
    plan.check(box)

    small = replace(box.nodes[0], capacity=256 * MiB)
    with pytest.raises(PlanError, match=r"^node 0: needs .* but node 0 has 256 MiB"):
        plan.check(replace(box, nodes=(small, *box.nodes[1:])))
    with pytest.raises(PlanError, match=r"^hbm: needs .* the GPU has 1\.00 GiB"):
        plan.check(replace(box, gpus=(replace(box.gpus[0], memory=GiB),)))


def test_a_machine_must_have_the_memory_and_the_gpus_of_all_ranks() -> None:
    box = machine()
    workload = work(MODEL, 1024, 4, micro_batch=1, world=2)
    two = replace(box, gpus=(box.gpus[0], replace(box.gpus[0], index=1)))
    plan = make_plan(MODEL, workload, Budget(hbm=2200 * MiB, dram=8 * GiB), two, effort=QUICK).plan
    with pytest.raises(PlanError, match=r"^gpus: is 2, but test has 1"):
        make_plan(MODEL, workload, Budget(hbm=2200 * MiB, dram=8 * GiB), box, effort=QUICK)

    plan.check_model(MODEL)
    plan.check(two)
    with pytest.raises(PlanError, match=r"^workload.world: is 2, .* has 1"):
        plan.check(box)
    used = plan.peak(Tier.DRAM)
    assert used
    for factor, fits in ((1.5, False), (2, True)):
        node = replace(two.nodes[0], capacity=int(factor * used))
        small = replace(two, nodes=(node, *two.nodes[1:]))
        if fits:
            plan.check(small)
        else:
            with pytest.raises(PlanError, match=r"^node 0: needs "):
                plan.check(small)


def test_a_path_that_the_machine_lacks_is_rejected() -> None:
    budget = Budget(hbm=2400 * MiB, dram=1200 * MiB, nvme=NVME)
    plan = make_plan(MODEL, work(MODEL, 1024, 4), budget, machine(), effort=QUICK).plan
    assert plan.peak(Tier.NVME)

    with pytest.raises(PlanError, match=r"^nvme: /mnt/nvme is not on this machine; it has none"):
        plan.check(replace(machine(), storage=()))
    (disk,), used = machine().storage, plan.peak(Tier.NVME)
    for room in ({"free": used}, {"free": None, "capacity": used}, {"free": None}):
        plan.check(replace(machine(), storage=(replace(disk, **room),)))
    for room in ({"free": used - 1}, {"free": None, "capacity": used - 1}):
        with pytest.raises(PlanError, match=r"^nvme: needs .*, but /mnt/nvme has"):
            plan.check(replace(machine(), storage=(replace(disk, **room),)))


def test_the_parts_of_a_tier_add_up_to_its_peak(plan: Plan) -> None:
    for tier in Tier:
        parts = dict(plan.parts(tier))
        assert sum(parts.values()) == plan.peak(tier)
        assert all(parts.values())
    assert "working memory" in dict(plan.parts(Tier.HBM))
    assert {"weight", "second"} <= {n for tier in Tier for n, _ in plan.parts(tier)}


def test_another_working_memory_changes_its_pools_only(plan: Plan) -> None:
    before = {pool.what: pool.nbytes for pool in plan.pools}
    memory = WorkingMemory(
        parts=(PartMemory(name="layer", forward=MiB, backward=3 * MiB),), libraries=5 * MiB
    )
    after = {pool.what: pool.nbytes for pool in plan.with_memory(memory).pools}

    assert after["working memory"] == memory.peak
    assert after["library buffers"] == 5 * MiB
    assert after["CUDA context"] == before["CUDA context"]
    kept = ("weight slots", "gradient buffers", "hidden states in flight", "NVMe staging")
    assert {k: after.get(k) for k in kept} == {k: before.get(k) for k in kept}
    measured = plan.with_memory(replace(memory, context=100 * MiB))
    assert measured.context_nbytes == 100 * MiB


def test_without_a_gpu_there_is_no_context_whatever_was_measured(plan: Plan) -> None:
    on_cpu = make_plan(MODEL, plan.workload, plan.budget, cpu_machine(machine()), effort=QUICK).plan
    memory = WorkingMemory(
        parts=(PartMemory(name="layer", forward=MiB, backward=MiB),), context=100 * MiB
    )
    assert on_cpu.context_nbytes == 0
    assert on_cpu.with_memory(memory).context_nbytes == 0
    assert on_cpu.allocator_nbytes == on_cpu.budget.hbm
    assert plan.allocator_nbytes == plan.budget.hbm - plan.context_nbytes - PAGE - SMALL_PAGE


def test_memory_of_the_cpu_that_stands_in_for_a_gpu_is_checked(plan: Plan) -> None:
    box = cpu_machine(machine(cards=0))
    budget = Budget(hbm=2400 * MiB, dram=GiB, nvme=NVME)
    on_cpu = make_plan(MODEL, plan.workload, budget, box, effort=QUICK).plan
    needed = on_cpu.peak(Tier.HBM) + on_cpu.peak(Tier.DRAM)
    enough, short = (
        replace(box, nodes=(replace(box.nodes[0], capacity=nbytes),))
        for nbytes in (needed, needed - 1)
    )
    on_cpu.check(enough)
    with pytest.raises(PlanError, match=r"^node 0: needs"):
        on_cpu.check(short)
