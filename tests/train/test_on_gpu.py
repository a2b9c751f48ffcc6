"""The command's first day on a machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runs import Runs, ended


@pytest.mark.gpu
def test_a_first_run_needs_no_probe(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    budget = ("--hbm", "8GiB", "--dram", "1GiB")

    told = ended(runs.start(tmp_path / "out", *budget, "--steps", "6"))

    assert told.code == 0, told.errors
    assert len(told.losses) == 6
    assert told.losses[6] < told.losses[1]
