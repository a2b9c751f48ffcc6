"""Runs under a control group's memory limit finish or are refused; none is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.units import MiB
from tests.faults.test_placement_faults import memory_group
from tests.train.runs import Runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def train(runs: Runs, out: Path, limit: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """Train in a child process whose control group has a limit.

    It has a cache of its own: what another test measured of this process would change the plan.
    """
    with memory_group(limit) as join:
        return subprocess.run(
            [*join, sys.executable, "-m", "penstock", *runs.flags(out, "--steps", "3", *flags)],
            capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": f"{out}-cache"},
        )  # fmt: skip


@pytest.mark.long  # tests/machine/test_limits.py has the budgets under a limit
def test_auto_budgets_are_for_the_limit_and_not_for_the_machine(runs: Runs, tmp_path: Path) -> None:
    done = train(runs, tmp_path / "out", 1300 * MiB)

    assert done.returncode == 0, done.stderr
    assert "Memory limit of this process: 1.27 GiB (/sys/fs/cgroup/" in done.stderr
    assert "Budgets in host memory can use 44" in done.stderr  # in MiB


@pytest.mark.long
@pytest.mark.parametrize("limit", [250, 300, 400, 500, 600, 700, 850, 1000, 1150, 1300, 1600])
@pytest.mark.parametrize(
    "flags",
    [(), ("--hbm", "64MiB", "--dram", "256MiB"), ("--hbm", "64MiB", "--dram", "1GiB"), ("nvme",)],
    ids=["auto", "320 MiB", "1 GiB", "NVMe"],
)
def test_a_run_under_any_limit_finishes_or_is_refused(
    runs: Runs, tmp_path: Path, limit: int, flags: tuple[str, ...]
) -> None:
    chosen = runs.tight() if flags == ("nvme",) else flags
    done = train(runs, tmp_path / "out", limit * MiB, *chosen)

    assert done.returncode in (0, 1), done.stderr
    assert "emory limit of this process" in done.stderr
