"""JSON lines, metrics.jsonl and experiment trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.train.errors import MissingLoggerError
from penstock.train.events import JsonLines, Listeners
from penstock.train.loggers import MetricsFile, check_loggers, hf_metrics
from tests.train.events import STEP, TIERS


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

    metrics = MetricsFile(tmp_path, after=2)
    metrics.handle({"event": "step", "step": 3, "loss": 1.0, "tiers": TIERS, "host": {}})
    metrics.close()

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in lines] == [1, 2, 3]
    assert lines[2]["loss"] == 1.0
    assert not {"tiers", "host"} & set(lines[2])


def test_metrics_have_the_names_of_the_transformers_trainer() -> None:
    assert hf_metrics(STEP) == {
        "train/loss": 2.5,
        "train/grad_norm": 0.7,
        "train/learning_rate": 1e-4,
        "train/epoch": 0.3,
        "train/tokens_per_second": 1234.0,
    }
    assert hf_metrics({"event": "eval", "step": 1, "loss": 2.0}) == {"eval/loss": 2.0}


def test_a_missing_tracker_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(
        MissingLoggerError, match=r"the package tensorboard: pip install 'penstock\[log\]'"
    ):
        check_loggers(["tensorboard"])
