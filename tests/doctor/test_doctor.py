"""Checks of the kernel's files: each problem is reported with its reason and a fix."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from penstock import doctor
from penstock.doctor import CHECKS, Finding, devices, examine, limits, memory, render, to_json
from penstock.machine.sysfs import System
from penstock.units import GiB
from tests.support.fake_sysfs import fake_root

Check = Callable[[System], Finding]

STATUS = "CapEff:\t{caps:016x}\nSeccomp:\t0\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}"
PCI = "sys/bus/pci/devices/0000:17:00.0"
HUGE = "sys/kernel/mm/hugepages/hugepages-2048kB"
DAX = "sys/bus/dax/devices/dax0.0"
REGION = "sys/bus/cxl/devices/region0"


def status(caps: int = 0, cpus: str = "0-1", mems: str = "0") -> Mapping[str, str | None]:
    return {"proc/self/status": STATUS.format(caps=caps, cpus=cpus, mems=mems)}


BAD: list[tuple[Check, tuple[str, ...], Mapping[str, str | None], str, str, str]] = [
    # check, listings, changes, status, part of the finding, part of the fix
    (
        limits.check_memlock, ("healthy",),
        {"proc/self/limits": "Max locked memory         8388608    8388608    bytes"},
        "warn", "8.00 MiB may be locked", "ulimit -l unlimited",
    ),
    (
        limits.check_sys_nice, ("healthy",), status(),
        "note", "no CAP_SYS_NICE", "--cap-add SYS_NICE",
    ),
    (
        limits.check_cpuset, ("healthy",), status(cpus="1"),
        "note", "1 of 1 nodes, 1 of 2 CPUs", "cpuset.cpus",
    ),
    (
        limits.check_cpuset, ("healthy", "numa"), status(mems="0-1"),
        "warn", "2 of 3 nodes, 2 of 2 CPUs", "cpuset.mems",
    ),
    (
        limits.check_memory_limit, ("healthy",),
        {
            "proc/self/cgroup": "0::/box",
            "sys/fs/cgroup/box/memory.max": str(8 * GiB),
            "sys/fs/cgroup/box/memory.current": str(2 * GiB),
        },
        "note", "8.00 GiB of 16.0 GiB (/sys/fs/cgroup/box/memory.max), 6.00 GiB left", "MemoryMax",
    ),
    (
        limits.check_memory_limit, ("healthy",),
        {
            "proc/self/cgroup": "0::/box",
            "sys/fs/cgroup/box/memory.max": str(GiB),
            "sys/fs/cgroup/box/memory.current": str(GiB // 2),
        },
        "warn", "512 MiB left", "docker run --memory",
    ),
    (
        limits.check_cpu_quota, ("healthy",),
        {"proc/self/cgroup": "0::/box", "sys/fs/cgroup/box/cpu.max": "50000 100000"},
        "note", "the time of 0.5 CPUs, of ", "cpu.max",
    ),
    (
        limits.check_wsl, ("healthy",),
        {"proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2"},
        "warn", "Windows Subsystem for Linux", ".wslconfig",
    ),
    (
        memory.check_transparent_huge_pages, ("healthy",),
        {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"},
        "warn", "never", "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    ),
    (
        memory.check_transparent_huge_pages, ("healthy",),
        {"sys/kernel/mm/transparent_hugepage/enabled": None},
        "warn", "not supported by the kernel", "madvise",
    ),
    (
        memory.check_reserved_huge_pages, ("healthy",),
        {f"{HUGE}/nr_hugepages": "1024", f"{HUGE}/free_hugepages": "512"},
        "note", "1024 of 2 MiB, 512 free", "vm.nr_hugepages=0",
    ),
    (
        memory.check_overcommit, ("healthy",), {"proc/sys/vm/overcommit_memory": "2"},
        "warn", "vm.overcommit_memory=2", "sysctl vm.overcommit_memory=0",
    ),
    (
        memory.check_map_count, ("healthy",), {"proc/sys/vm/max_map_count": "1000"},
        "warn", "vm.max_map_count=1000", "sysctl vm.max_map_count=1048480",
    ),
    (
        memory.check_balancing, ("healthy", "numa"), {"proc/sys/kernel/numa_balancing": "1"},
        "note", "kernel.numa_balancing=1", "sysctl kernel.numa_balancing=0",
    ),
    (
        memory.check_nodes, (), {"proc/meminfo": "MemTotal: 1048576 kB"},
        "note", "node 0 dram 1.00 GiB; the kernel reports no NUMA nodes", "CONFIG_NUMA",
    ),
    (
        memory.check_cxl, ("cxl",),
        {
            DAX: None, f"{DAX}/driver": None, f"{DAX}/target_node": None,
            f"{REGION}/target0": None, f"{REGION}/resource": None,
        },
        "warn", "mem0 1.00 GiB not on a node", "cxl create-region -t ram -d decoder0.0 -m mem0",
    ),
    (
        memory.check_cxl, ("cxl",),
        {DAX: None, f"{DAX}/driver": None, f"{DAX}/target_node": None},
        "warn", "mem0 1.00 GiB not on a node", "cxl enable-region region0",
    ),
    (
        memory.check_cxl, ("cxl",),
        {
            f"{DAX}/driver": "-> ../../../../bus/dax/drivers/device_dax",
            "sys/devices/system/node/has_memory": "0-1",
        },
        "warn", "mem0 1.00 GiB for node 2", "daxctl reconfigure-device --mode=system-ram --no-m",
    ),
    (
        memory.check_cxl, ("cxl",), {"sys/devices/system/node/has_memory": "0-1"},
        "warn", "mem0 1.00 GiB for node 2", "daxctl online-memory --no-movable dax0.0",
    ),
    (
        memory.check_movable, ("cxl",), {"sys/devices/system/node/has_normal_memory": "0-1"},
        "warn", "node 2: only movable memory", "daxctl online-memory --no-movable dax0.0",
    ),
    (
        devices.check_pcie_links, ("healthy",), {f"{PCI}/current_link_width": "8"},
        "warn", "gen 5 x8 of gen 5 x16", "lspci -vv -s 0000:17:00.0",
    ),
    (
        devices.check_pcie_links, ("healthy",), {f"{PCI}/current_link_speed": "2.5 GT/s PCIe"},
        "note", "gen 1 x16 of gen 5 x16", "under load",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("check", "listings", "changes", "status", "found", "fix"), BAD)
def test_a_problem_is_reported_with_its_fix(
    tmp_path: Path, check: Check, listings: tuple[str, ...], changes: Mapping[str, str | None],
    status: str, found: str, fix: str,
) -> None:  # fmt: skip
    finding = check(fake_root(tmp_path, *listings, changes=changes))
    assert (finding.status, found in finding.found, fix in finding.fix) == (status, True, True), (
        finding
    )


def kernel_file_checks() -> list[Check]:
    """Return the checks that only read the kernel files (test_stubbed_checks.py has the rest)."""
    return list(dict.fromkeys(check for check, *_ in BAD))


@pytest.mark.parametrize("check", kernel_file_checks())
def test_a_healthy_machine_has_nothing_to_fix(tmp_path: Path, check: Check) -> None:
    assert check(fake_root(tmp_path, "healthy")).status == "ok"


def test_a_cxl_device_that_is_online_is_ok(tmp_path: Path) -> None:
    finding = memory.check_cxl(fake_root(tmp_path, "cxl_cdat"))
    assert (finding.status, finding.found) == ("ok", "mem0 1.00 GiB for node 3")


def test_the_node_list_shows_which_nodes_have_no_cpus(tmp_path: Path) -> None:
    found = memory.check_nodes(fake_root(tmp_path, "cxl_cdat")).found
    assert "node 0 dram 2.89 GiB, " in found
    assert "node 3 cxl 1.00 GiB (no CPUs)" in found


def test_cap_ipc_lock_overrides_the_memlock_limit(tmp_path: Path) -> None:
    low = {"proc/self/limits": "Max locked memory   65536   65536   bytes"}
    changes = {**low, **status(caps=0x4000)}
    assert limits.check_memlock(fake_root(tmp_path, "healthy", changes=changes)).status == "ok"


@pytest.mark.parametrize(
    ("uid_map", "status_"), [("0 0 4294967295", "ok"), ("0 1000 1", "warn"), (None, "ok")]
)
def test_cap_ipc_lock_in_a_user_namespace_does_not_lift_the_limit(
    tmp_path: Path, uid_map: str | None, status_: str
) -> None:
    changes = {
        "proc/self/limits": "Max locked memory   65536   65536   bytes",
        "proc/self/uid_map": uid_map,
        **status(caps=0x4000),
    }
    finding = limits.check_memlock(fake_root(tmp_path, "healthy", changes=changes))
    assert finding.status == status_
    assert ("64.0 KiB may be locked; CAP_IPC_LOCK in a user" in finding.found) == (status_ != "ok")


def test_numa_balancing_with_one_node_is_ok(tmp_path: Path) -> None:
    changes = {"proc/sys/kernel/numa_balancing": "1"}
    assert memory.check_balancing(fake_root(tmp_path, "healthy", changes=changes)).status == "ok"


def test_every_check_has_a_test_that_makes_it_fail() -> None:
    stubbed_checks = {
        limits.check_python, limits.check_byte_code, limits.check_instruction_sets,
        memory.check_binding, devices.check_io_uring, devices.check_free_space,
        devices.check_shared_memory, devices.check_driver, devices.check_torch,
        devices.check_cuda_versions,
    }  # fmt: skip
    assert set(CHECKS.values()) == stubbed_checks | set(kernel_file_checks())


def test_every_check_runs_on_this_machine() -> None:
    findings = examine()
    assert [finding.check for finding in findings] == list(CHECKS)
    by_name = {finding.check: finding for finding in findings}
    assert by_name["python"].status == "ok"
    assert by_name["torch"].found.startswith("torch ")
    assert json.loads(json.dumps(to_json(findings)))[0]["check"] == findings[0].check


def test_a_check_that_raises_is_reported_and_the_others_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: System) -> Finding:
        raise PermissionError(errno.EACCES, "Permission denied", "/proc/odd")

    monkeypatch.setattr(doctor, "CHECKS", {**CHECKS, "cxl": broken})
    findings = {finding.check: finding for finding in examine(fake_root(tmp_path, "healthy"))}
    assert list(findings) == list(CHECKS)
    assert findings["cxl"].status == "warn"
    assert "the check failed: PermissionError: [Errno 13]" in findings["cxl"].found
    assert "/proc/odd" in findings["cxl"].found
    assert findings["overcommit"].status == "ok"


def test_render_keeps_brackets_and_is_readable_without_color() -> None:
    page = io.StringIO()
    findings = [
        Finding(check="a", status="ok", found="[madvise] always"),
        Finding(check="b", status="bad", found="broken", why="it matters", fix="`fix it`"),
    ]
    render(findings, Console(file=page, width=80, no_color=True))
    text = page.getvalue()
    assert "[madvise] always" in text
    for words in ("bad", "broken", "it matters", "-> `fix it`", "1 ok, 0 note, 0 warn, 1 bad"):
        assert words in text


def test_a_problem_without_a_fix_cannot_be_created() -> None:
    with pytest.raises(AssertionError, match="lacks a reason or a fix"):
        Finding(check="a", status="warn", found="broken", why="it matters")
