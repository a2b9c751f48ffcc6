"""The small parts of a run: signals, the watchdog, lines, the live view, metrics."""

from __future__ import annotations

import io
import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.train.errors import MissingLoggerError
from penstock.train.events import JsonLines, Listeners
from penstock.train.loggers import MetricsFile, check_loggers, named
from penstock.train.progress import Lines, Live, duration
from penstock.train.signals import Stopping
from penstock.train.watchdog import Watchdog

TIERS = {"hbm": {"budget": 100, "at_rest": 10, "peak": 50},
         "cxl": {"budget": 0, "at_rest": 0, "peak": 0}}  # fmt: skip

STEP = {"event": "step", "step": 3, "loss": 2.5, "grad_norm": 0.7, "lr": 1e-4, "epoch": 0.3,
        "seconds": 2.0, "tokens_per_second": 1234.0, "tiers": TIERS}  # fmt: skip


def test_once_is_a_wish_and_twice_an_order() -> None:
    left: list[object] = []
    before = signal.getsignal(signal.SIGINT)
    with Stopping(left.append) as stopping:
        stopping.before_leaving = lambda: left.append("terminal")
        assert not stopping.requested
        signal.raise_signal(signal.SIGTERM)
        assert stopping.requested
        assert (stopping.exit_code, left) == (143, [])
        signal.raise_signal(signal.SIGINT)
        assert left == ["terminal", 130]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_watchdog_says_what_is_waited_for_and_not_while_it_moves() -> None:
    told: list[str] = []
    heard = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        heard.set()

    with Watchdog(lambda: "read of layer 3", tell, patience=0.05) as dog:
        dog.moved("forward layer 3")
        assert heard.wait(30)
    assert "in forward layer 3: waiting for read of layer 3" in told[0]


def test_the_watchdog_waits_longer_where_pauses_are_long() -> None:
    told: list[str] = []
    dog = Watchdog(lambda: "", told.append, patience=0.02)
    dog._longest = 1e6
    with dog:
        dog.moved("a step")
        assert not dog._end.wait(0.3)
    assert told == []


def test_lines_come_once_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(interval=1e9)
    lines._steps = 10
    lines._last = 1e18  # as if one had just been printed
    lines.hear(STEP)
    assert capsys.readouterr().out == ""
    lines.hear({"event": "eval", "step": 3, "loss": 2.25, "tokens": 9, "seconds": 1.0})
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("step 3/10  loss 2.5000  norm 0.7  lr 0.0001  1,234 tokens/s  14 s")
    assert said[1] == "held-out loss 2.2500 at step 3"


def rendered(live: Live) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(live.render())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def test_the_live_view_moves_within_a_step() -> None:
    live = Live(Console(file=io.StringIO(), width=120))
    live._steps, live._bound = 10, "NVMe at /mnt"
    live.hear({"event": "plan", "tiers": TIERS})
    live.hear(STEP)
    first = rendered(live)
    assert "step 3/10" in first
    assert "30.0%" in first
    assert "14 s left" in first
    assert "loss 2.5000" in first
    assert "50 B of 100 B" in first
    assert "cxl" not in first
    assert "bound by NVMe at /mnt" in first

    live.progress(50, 100, "backward layer 1")

    second = rendered(live)
    assert "35.0%" in second
    assert "13 s left" in second
    assert "backward layer 1" in second


def test_json_lines_have_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    listeners = Listeners([JsonLines()])
    listeners.tell("step", loss=float("nan"), step=1)
    listeners.note("for people")

    said = capsys.readouterr()
    assert json.loads(said.out) == {"event": "step", "loss": None, "step": 1}
    assert said.err == "for people\n"


def test_metrics_forget_what_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows: list[dict[str, Any]] = [{"event": "step", "step": number} for number in (1, 2, 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"event": "st')

    metrics = MetricsFile(tmp_path, after=2)
    metrics.hear({"event": "step", "step": 3, "loss": 1.0, "tiers": TIERS})
    metrics.close()

    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in kept] == [1, 2, 3]
    assert kept[2]["loss"] == 1.0
    assert "tiers" not in kept[2]


def test_metrics_have_hugging_face_s_names() -> None:
    assert named(STEP) == {
        "train/loss": 2.5,
        "train/grad_norm": 0.7,
        "train/learning_rate": 1e-4,
        "train/epoch": 0.3,
        "train/tokens_per_second": 1234.0,
    }
    assert named({"event": "eval", "step": 1, "loss": 2.0}) == {"eval/loss": 2.0}


def test_a_logger_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(MissingLoggerError, match="pip install tensorboard"):
        check_loggers(["tensorboard"])


@pytest.mark.parametrize(
    ("seconds", "text"), [(14.2, "14 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
