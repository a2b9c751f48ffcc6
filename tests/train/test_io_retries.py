"""A run reports file operations that it had to repeat."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from penstock.engine.engine import Engine
from penstock.storage.store import Store
from tests.support.failing_files import FailingFiles
from tests.train.runs import RESIDENT, Runs


def test_repeated_operations_are_reported_by_path_and_counted(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.io_retries.sleep", lambda seconds: None)
    found = [{"/nvme": 2}, {}]
    monkeypatch.setattr(Engine, "take_io_retries", lambda self: found.pop(0) if found else {})
    out = tmp_path / "out"
    failures = {"pwrite": 2, "rename": 1}

    def fail(number: int, call: str, path: str) -> int:
        left = failures.get(call, 0)
        failures[call] = left - 1
        return errno.EIO if left > 0 else 0

    with FailingFiles([out], fail).installed():
        result = runs.run(out, *RESIDENT, "--steps", "2")

    assert result.code == 0, result.errors
    assert "warning: 2 I/O retries on /nvme; check the drive" in result.errors
    assert f"warning: 1 I/O retry on {out}; check the drive" in result.errors
    shard = r".checkpoint-000002.tmp-"
    assert any("2 I/O retries on" in line and shard in line for line in result.errors.splitlines())
    assert result.of("done")[0]["io_retries"] == 5


def test_the_engine_reports_new_retries_of_its_store_once(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Store.stats.fget
    assert plain is not None

    class Stats:
        def __init__(self, store: Store) -> None:
            self._stats, self.retries = plain(store), 3

        def __getattr__(self, name: str) -> object:
            return getattr(self._stats, name)

    monkeypatch.setattr(Store, "stats", property(Stats))
    result = runs.run(tmp_path / "out", *runs.tight(), "--steps", "2")
    assert result.code == 0, result.errors
    assert result.errors.count(f"3 I/O retries on {runs.disk}") == 1
    assert result.of("done")[0]["io_retries"] == 3
