"""Limits on memory and CPU time: control groups of both versions, containers and `ulimit`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import MemoryLimitError, PlanError
from penstock.machine.discovery import discover
from penstock.machine.limits import (
    check_import_memory,
    cpu_quota,
    host_memory,
    memory_limit,
    memory_limit_for_process,
    usable_threads,
)
from penstock.machine.machine import Machine, MemoryLimit, MemoryNode
from penstock.machine.sysfs import System
from penstock.plan.budget import (
    Budget,
    auto_dram,
    check_budget_memory,
    describe_limit,
    parse_budget,
    with_budget_memory,
)
from penstock.units import GiB, KiB, MiB
from tests.support.fake_sysfs import fake_root

V1_MOUNT = "33 32 0:29 {root} /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory"
V2_MOUNT = "30 23 0:26 {root} {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


def group(path: str, limit: int | str, used: int, *, high: int | str = "max") -> dict[str, str]:
    return {
        f"{path}/memory.max": str(limit),
        f"{path}/memory.high": str(high),
        f"{path}/memory.current": str(used),
    }


def old_group(path: str, limit: int, used: int) -> dict[str, str]:
    return {
        f"{path}/memory.limit_in_bytes": str(limit),
        f"{path}/memory.usage_in_bytes": str(used),
    }


NONE = 2**63 - 4096
TOP = "sys/fs/cgroup"
CASES: dict[str, tuple[dict[str, str], str]] = {
    "v2, limit of a parent": (
        {
            "proc/self/cgroup": "0::/a/b",
            **group(f"{TOP}/a", GiB, 700 * MiB),
            f"{TOP}/a/memory.stat": f"anon 5\ninactive_file {80 * MiB}\nactive_file {40 * MiB}",
            **group(f"{TOP}/a/b", "max", 10 * MiB),
        },
        "/sys/fs/cgroup/a/memory.max",
    ),
    "v2, memory.high": (
        {"proc/self/cgroup": "0::/a", **group(f"{TOP}/a", 2 * GiB, 600 * MiB, high=GiB)},
        "/sys/fs/cgroup/a/memory.high",
    ),
    "v1": (
        {
            "proc/self/cgroup": "4:memory:/a\n0::/",
            **old_group(f"{TOP}/memory", NONE, 5),
            **old_group(f"{TOP}/memory/a", GiB, 700 * MiB),
            # In the kernel's order: first the group alone, then including its child groups.
            f"{TOP}/memory/a/memory.stat": f"inactive_file {5 * MiB}\nactive_file 0\n"
            f"total_inactive_file {100 * MiB}",
        },
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
    ),
    "hybrid: v1 with a v2 tree for systemd": (
        {
            "proc/self/cgroup": "4:cpu,memory:/job\n1:name=systemd:/x\n0::/x",
            "proc/self/mountinfo": V1_MOUNT.format(root="/")
            + "\n"
            + V2_MOUNT.format(root="/", point="/sys/fs/cgroup/unified"),
            **old_group(f"{TOP}/memory/job", GiB, 600 * MiB),
        },
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes",
    ),
    "Docker, v1: the path is that on the host, and the mount shows its end": (
        {
            "proc/self/cgroup": "4:memory:/docker/0123",
            "proc/self/mountinfo": V1_MOUNT.format(root="/docker/0123"),
            **old_group(f"{TOP}/memory", GiB, 600 * MiB),
        },
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ),
    "Kubernetes, v1: the limit of the pod is above the container's root": (
        {
            "proc/self/cgroup": "4:memory:/kubepods/pod1/0123",
            "proc/self/mountinfo": V1_MOUNT.format(root="/kubepods/pod1/0123"),
            **old_group(f"{TOP}/memory", 9 * GiB, 600 * MiB),
            f"{TOP}/memory/memory.stat": f"hierarchical_memory_limit {GiB}",
        },
        "/sys/fs/cgroup/memory/memory.stat: hierarchical_memory_limit",
    ),
    "Docker, v2: a namespace whose root is the container": (
        {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": V2_MOUNT.format(root="/", point="/sys/fs/cgroup"),
            **group(TOP, GiB, 600 * MiB),
        },
        "/sys/fs/cgroup/memory.max",
    ),
    "a process outside the root of its namespace": (
        {"proc/self/cgroup": "0::/../../other", **group(TOP, GiB, 600 * MiB)},
        "/sys/fs/cgroup/memory.max",
    ),
    "Slurm, v2: job, step and task": (
        {
            "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
            **group(f"{TOP}/system.slice/slurmstepd.scope/job_7", GiB, 600 * MiB),
            **group(f"{TOP}/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", "max", 1),
        },
        "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/memory.max",
    ),
    "a mount point with a space": (
        {
            "proc/self/cgroup": "0::/a",
            "proc/self/mountinfo": V2_MOUNT.format(root="/", point="/my\\040groups"),
            **group("my groups/a", GiB, 600 * MiB),
        },
        "/my groups/a/memory.max",
    ),
    "ulimit -v": (
        {
            "proc/self/limits": f"Max address space         {GiB}           unlimited  bytes",
            "proc/self/status": f"VmSize:\t{600 * MiB // KiB} kB",
        },
        "`ulimit -v`",
    ),
}


@pytest.mark.parametrize(("files", "name"), CASES.values(), ids=CASES)
def test_the_limit_that_leaves_the_least_is_found(
    tmp_path: Path, files: dict[str, str], name: str
) -> None:
    limit = memory_limit(fake_root(tmp_path, changes=files))

    assert limit == MemoryLimit(name=name, nbytes=GiB, left=424 * MiB)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": ""},
        {"proc/self/cgroup": "nonsense\n0:\n:::"},
        {"proc/self/cgroup": "0::/a", "proc/self/mountinfo": "nonsense - cgroup2\n- - -"},
        {"proc/self/cgroup": "0::/a", **group(f"{TOP}/a", "max", 5)},
        {"proc/self/cgroup": "4:memory:/a", **old_group(f"{TOP}/memory/a", NONE, 5)},
        {"proc/self/limits": "Max address space         unlimited            unlimited   bytes"},
    ],
    ids=["nothing", "empty", "nonsense", "mounts", "max", "v1 max", "ulimit"],
)
def test_without_a_limit_there_is_none(tmp_path: Path, files: dict[str, str]) -> None:
    assert memory_limit(fake_root(tmp_path, changes=files)) is None


MEMINFO = {"proc/meminfo": f"MemTotal: {24 * MiB} kB\nMemAvailable: {20 * MiB} kB"}


def limited(tmp_path: Path, limit: int, used: int, **files: str) -> System:
    changes = {**MEMINFO, "proc/self/cgroup": "0::/", **group(TOP, limit, used), **files}
    return fake_root(tmp_path, changes=changes)


def test_host_memory_is_that_of_the_nodes_within_the_limit(tmp_path: Path) -> None:
    here = host_memory(limited(tmp_path, GiB, 600 * MiB))
    assert (here.total, here.free) == (GiB, 424 * MiB)

    wide = host_memory(limited(tmp_path, 30 * GiB, 1 * GiB))
    assert (wide.total, wide.free) == (24 * GiB, 20 * GiB)


def test_a_limit_that_is_too_low_to_load_pytorch_is_refused_first(tmp_path: Path) -> None:
    check_import_memory(limited(tmp_path, 300 * MiB, 20 * MiB))

    with pytest.raises(MemoryLimitError, match=r"needed to load PyTorch .* leaves 279 MiB"):
        check_import_memory(limited(tmp_path, 300 * MiB, 21 * MiB))


def test_budgets_do_not_depend_on_what_the_process_has_loaded(tmp_path: Path) -> None:
    """`penstock plan` and `penstock train` import different modules before they ask."""
    status = {"proc/self/status": f"VmRSS: 999 kB\nRssAnon:\t{300 * MiB // KiB} kB"}

    limit = memory_limit_for_process(limited(tmp_path, GiB, 600 * MiB, **status))

    assert limit is not None
    assert limit.left == 724 * MiB


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({}, None, 8),
        ({f"{TOP}/a/cpu.max": "max 100000"}, None, 8),
        ({f"{TOP}/a/cpu.max": "250000 100000"}, 2.5, 3),
        ({f"{TOP}/a/cpu.max": "max 100000", f"{TOP}/cpu.max": "50000 100000"}, 0.5, 1),
        ({f"{TOP}/a/cpu.max": "1600000 100000"}, 16.0, 8),
        ({f"{TOP}/a/cpu.max": "nonsense"}, None, 8),
    ],
)
def test_a_cpu_quota_bounds_the_threads(
    tmp_path: Path, files: dict[str, str], quota: float | None, threads: int
) -> None:
    system = fake_root(tmp_path, changes={"proc/self/cgroup": "0::/a", **files})

    assert cpu_quota(system) == quota
    assert usable_threads(system, 8) == threads
    assert usable_threads(system) <= len(os.sched_getaffinity(0))


def test_a_cpu_quota_of_cgroup_v1_is_found(tmp_path: Path) -> None:
    files = {f"{TOP}/cpu/a/cpu.cfs_quota_us": "150000", f"{TOP}/cpu/a/cpu.cfs_period_us": "100000"}
    files |= {f"{TOP}/cpu/cpu.cfs_quota_us": "-1", f"{TOP}/cpu/cpu.cfs_period_us": "100000"}
    system = fake_root(tmp_path, changes={"proc/self/cgroup": "3:cpu:/a", **files})

    assert cpu_quota(system) == 1.5


def test_nodes_that_the_process_may_not_use_are_not_part_of_its_machine(tmp_path: Path) -> None:
    status = {"proc/self/status": "Mems_allowed_list:\t{}"}

    def found(allowed: str) -> list[tuple[int, str]]:
        changes = {key: text.format(allowed) for key, text in status.items()}
        nodes = discover(fake_root(tmp_path, "numa", changes=changes)).nodes
        return [(node.id, node.kind) for node in nodes]

    everything = found("0-63")
    assert len(everything) == 3
    assert found("0") == [everything[0]]
    (cxl,) = [id for id, kind in everything if kind == "cxl"][:1]
    assert found(str(cxl)) == [(cxl, "dram")]  # all that the process has


def machine(limit: MemoryLimit | None, *, cxl: int = 0) -> Machine:
    nodes = [MemoryNode(id=0, kind="dram", capacity=24 * GiB, free=20 * GiB, cpus=(0,))]
    nodes += [MemoryNode(id=1, kind="cxl", capacity=cxl, free=cxl)] if cxl else []
    return Machine(name="box", nodes=tuple(nodes), memory_limit=limit)


JOB = MemoryLimit(name="/sys/fs/cgroup/job/memory.max", nbytes=2 * GiB, left=2 * GiB)


def test_auto_budgets_stay_below_the_limit() -> None:
    process, reserve = 768 * MiB, int(0.05 * 2 * GiB)
    assert auto_dram(machine(JOB)) == 2 * GiB - process - reserve
    assert auto_dram(machine(None)) > 16 * GiB

    budget = parse_budget(machine(JOB, cxl=8 * GiB))
    assert budget.hbm + budget.dram + budget.cxl <= 2 * GiB - process - reserve
    explicit = parse_budget(machine(JOB, cxl=8 * GiB), hbm="0", dram="1GiB")
    assert explicit.cxl == GiB - process - reserve
    tiny = MemoryLimit(name="x", nbytes=600 * MiB, left=600 * MiB)
    assert parse_budget(machine(tiny)) == Budget(hbm=0, dram=0)


def test_a_budget_above_the_limit_is_refused_by_name() -> None:
    with pytest.raises(
        PlanError, match=r"dram: is 3.00 GiB, and the memory limit .* is 2.00 GiB \(/sys"
    ):
        check_budget_memory(machine(JOB), Budget(hbm=0, dram=3 * GiB))
    check_budget_memory(machine(JOB), Budget(hbm=0, dram=2 * GiB))
    with pytest.raises(PlanError, match=r"this machine has 24.0 GiB"):
        check_budget_memory(machine(None), Budget(hbm=0, dram=25 * GiB))


def test_a_plan_for_a_machine_file_with_a_limit_is_for_a_machine_without_it() -> None:
    larger, (remark,) = with_budget_memory(machine(JOB), Budget(hbm=0, dram=3 * GiB))

    assert larger.memory_limit is None
    assert larger.nodes[0].capacity == 24 * GiB
    assert "box has 2.00 GiB of dram" in remark


def test_the_limit_is_named_only_where_it_bounds_the_budget() -> None:
    assert "2.00 GiB (/sys/fs/cgroup/job/memory.max)" in describe_limit(machine(JOB))
    wide = MemoryLimit(name="x", nbytes=23 * GiB, left=23 * GiB)
    assert describe_limit(machine(wide)) == ""
    assert describe_limit(machine(None)) == ""


def test_a_machine_file_keeps_the_limit(tmp_path: Path) -> None:
    machine(JOB).save(tmp_path / "machine.json")

    assert Machine.load(tmp_path / "machine.json") == machine(JOB)
