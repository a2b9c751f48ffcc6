"""Refusals of the kernel and the resulting errors. Each test runs in a separate process."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.faults.refuse import SYSCALLS
from tests.support import fork_server

needs_seccomp = pytest.mark.skipif(not SYSCALLS, reason="no system call numbers for this processor")

PREAMBLE = """
import errno, gc, os, resource, warnings
import torch
import penstock as ps
from penstock.errors import *
from penstock.machine.sysfs import System
from tests.faults.refuse import refuse
NODE = System().allowed_nodes()[0]

def mapped():
    return sum(1 for _ in open("/proc/self/maps"))

def raised(kind, call):
    try:
        call()
    except kind as error:
        return error.with_traceback(None)
    raise SystemExit(f"no {kind.__name__}")

def refused(kind, call):
    raised(kind, call)  # the first call also initializes lazy state
    before = mapped()
    for _ in range(5):
        error = raised(kind, call)
    gc.collect()
    assert mapped() <= before, f"{mapped() - before} mappings are left"
    return error
"""


def in_child(body: str) -> subprocess.CompletedProcess[str]:
    run = fork_server.run(["-c", PREAMBLE + textwrap.dedent(body)])
    assert run.returncode == 0, run.stdout + run.stderr
    return run


@needs_seccomp
def test_a_container_that_forbids_mbind_is_reported_with_advice() -> None:
    in_child("""
        ps.empty(4096, place=ps.Node(NODE))  # works, and initializes lazy state
        refuse("mbind")
        error = refused(PlacementPermissionError, lambda: ps.empty(4096, place=ps.Node(NODE)))
        assert isinstance(error, PermissionError) and error.errno == errno.EPERM
        assert "mbind is not permitted" in str(error) and "SYS_NICE" in str(error)
        refused(PlacementPermissionError, lambda: ps.empty(4096, place=ps.Stripe([NODE])))
        refused(PlacementPermissionError, lambda: ps.Arena(4096, ps.Interleave([NODE])))
        assert ps.empty(10).shape == (10,)  # without a place, mbind is not called
        """)


@needs_seccomp
def test_a_move_that_mbind_refuses_leaves_the_tensor_intact() -> None:
    in_child("""
        tensor = ps.full(5000, 7.0, place=ps.Node(NODE))
        refuse("mbind")
        refused(PlacementPermissionError, lambda: ps.move(tensor, ps.Node(NODE)))
        assert bool((tensor == 7).all())
        """)


@needs_seccomp
def test_a_move_that_move_pages_refuses_is_reported() -> None:
    in_child("""
        tensor = torch.ones(1 << 20)
        ps.move(tensor, ps.Node(NODE))
        refuse("move_pages")
        refused(PlacementPermissionError, lambda: ps.move(tensor, ps.Node(NODE)))
        """)


@needs_seccomp
def test_a_kernel_without_numa_support_is_reported_with_advice() -> None:
    in_child("""
        refuse("mbind", errno.ENOSYS)
        error = refused(MapError, lambda: ps.empty(4096, place=ps.Node(NODE)))
        assert "omit `place`" in str(error)
        """)


@needs_seccomp
def test_memory_that_cannot_be_locked_stays_pageable_with_one_warning() -> None:
    in_child("""
        refuse("mlock")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tensors = [ps.zeros(4096, pinned=True) for _ in range(3)]
        if torch.cuda.is_available():
            raise SystemExit  # registered instead
        assert len(caught) == 1 and "ulimit -l" in str(caught[0].message), caught
        assert all(bool((t == 0).all()) for t in tensors)
        """)


def test_running_out_of_address_space_reports_the_size() -> None:
    in_child("""
        ps.empty(4096)
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        _, hard = resource.getrlimit(resource.RLIMIT_AS)  # only root may raise it
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
        limited = refused(MemoryLimitError, lambda: ps.empty(1 << 30, dtype=torch.uint8))
        assert "ulimit -v" in str(limited)
        mapped_only = lambda: ps.empty(1 << 30, dtype=torch.uint8, prefault=False)
        for error in (limited, refused(MapError, mapped_only)):
            assert error.wanted == 1 << 30 and "1.00 GiB" in str(error)
            assert isinstance(error, MemoryError)
        """)


def test_more_memory_than_a_node_has_is_refused_before_the_oom_killer_acts() -> None:
    in_child("""
        wanted = System().node_bytes(NODE).total * 2
        error = refused(
            NodeFullError, lambda: ps.empty(wanted, dtype=torch.uint8, place=ps.Node(NODE))
        )
        assert error.node == NODE and error.wanted == wanted and 0 < error.free < wanted
        """)


def test_a_forked_child_does_not_affect_its_parents_memory() -> None:
    in_child("""
        tensor = ps.full(1 << 20, 5.0, place=ps.Node(NODE), pinned=True)
        child = os.fork()
        if child == 0:
            # One element at a time: torch's threads did not survive the fork.
            assert float(tensor[-1]) == 5
            tensor[0] = 6
            del tensor
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert bool((tensor == 5).all())
        """)


def test_a_process_that_exits_with_live_tensors_prints_nothing() -> None:
    run = in_child(
        "keep = ps.zeros(4096, place=ps.Node(NODE), pinned=True); arena = ps.Arena(4096)"
    )

    assert run.stderr == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to create a control group")
def test_more_memory_than_the_control_group_allows_is_refused() -> None:
    with memory_group(512 << 20) as join:
        group = join[2].split('"')[1]
        in_child(f"""
            open("{group}", "w").write(str(os.getpid()))
            error = refused(MemoryLimitError, lambda: ps.empty(1 << 30, dtype=torch.uint8))
            assert error.limit == 512 << 20 and error.free < error.wanted == 1 << 30
            assert ps.empty(1 << 20).shape == (1 << 20,)
            """)


class memory_group:  # noqa: N801
    """A control group with a memory limit. Entering it returns a command prefix that joins it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> list[str]:
        v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        is_v2 = (v2 / "cgroup.controllers").exists()
        if not is_v2 and not v1.exists():
            pytest.skip("needs memory control groups")
        parent = v2 if is_v2 else v1 / self._own_v1_group()
        self.path = parent / f"penstock-test-{os.getpid()}"
        self.switched_on: Path | None = None
        try:
            control = v2 / "cgroup.subtree_control"
            if is_v2 and "memory" not in control.read_text().split():
                control.write_text("+memory")
                self.switched_on = control
            self.path.mkdir()
            name = "memory.max" if is_v2 else "memory.limit_in_bytes"
            (self.path / name).write_text(str(self.limit))
        except OSError as error:
            pytest.skip(f"cannot create a control group: {error}")
        return ["sh", "-c", f'echo $$ > "{self.path}/cgroup.procs" && exec "$@"', "join"]

    def __exit__(self, *exc: object) -> None:
        self.path.rmdir()
        if self.switched_on is not None:
            self.switched_on.write_text("-memory")

    @staticmethod
    def _own_v1_group() -> str:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                return path.lstrip("/")
        return ""
