"""`penstock train` on a new machine with a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.plan.plan import Plan
from tests.train.runs import Runs, wait_for_exit


@pytest.mark.gpu
def test_a_first_run_needs_no_probe(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    budget = ("--hbm", "8GiB", "--dram", "1GiB")

    result = wait_for_exit(runs.start(tmp_path / "out", *budget, "--steps", "6"))

    assert result.code == 0, result.errors
    assert len(result.losses) == 6
    assert result.losses[6] < result.losses[1]


@pytest.mark.gpu
def test_the_plan_of_a_run_is_the_planned_one(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run measures working memory and may plan again; after it, both files are equal."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = ["--context", "32", "--batch", "4", "--micro-batch", "2", "--steps", "2"]
    flags += ["--hbm", "6GiB", "--dram", "1GiB"]
    data = ["--data", str(runs.data), "--cache", str(tmp_path / "tokens"), "--json"]

    def run(*arguments: str) -> None:
        command = [sys.executable, "-m", "penstock", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    run("train", str(runs.model), *flags, *data, "--out", str(tmp_path / "first"))
    run("plan", str(runs.model), *flags, "-o", str(tmp_path / "plan.json"), "--json")
    run("train", str(runs.model), *flags, *data, "--out", str(tmp_path / "second"))

    planned = (tmp_path / "plan.json").read_bytes()
    assert planned == (tmp_path / "second/plan.json").read_bytes()
    assert Plan.load(tmp_path / "plan.json").workload.numerics.compiled
