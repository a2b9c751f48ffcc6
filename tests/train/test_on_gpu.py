"""`penstock train` on a new machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

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
