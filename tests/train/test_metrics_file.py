"""JSON lines and metrics.jsonl."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.train.events import JsonLines, Listeners
from penstock.train.metrics_file import MetricsFile
from tests.train.events import TIERS


def test_json_lines_contain_null_instead_of_nan(capsys: pytest.CaptureFixture[str]) -> None:
    listeners = Listeners([JsonLines()])
    listeners.emit("step", loss=float("nan"), step=1)
    listeners.note("for people")

    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"event": "step", "loss": None, "step": 1}
    assert printed.err == "for people\n"


def test_metrics_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows: list[dict[str, Any]] = [{"event": "step", "step": number} for number in (1, 2, 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"event": "st')

    metrics = MetricsFile(tmp_path, after=2, note=print)
    metrics.handle({"event": "step", "step": 3, "loss": 1.0, "tiers": TIERS, "host": {}})
    metrics.close()

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in lines] == [1, 2, 3]
    assert lines[2]["loss"] == 1.0
    assert not {"tiers", "host"} & set(lines[2])


def test_lines_wait_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    full, write = [False], os.write

    def write_half(fd: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[: max(1, len(data) // 2)])

    metrics = MetricsFile(tmp_path, after=0, note=notes.append)
    monkeypatch.setattr(os, "write", write_half)
    for number in range(1, 7):
        full[0] = number in (2, 3, 5)
        metrics.handle({"event": "step", "step": number})
    full[0] = True
    metrics.handle({"event": "step", "step": 7})
    metrics.close()

    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert len(notes) == 4  # two times full, full at the end, and what is lost
    assert notes[0].startswith(f"warning: {path} cannot be written: No space left on device")
    assert notes[-1] == f"warning: {path} lacks the last 1 lines of the run"
