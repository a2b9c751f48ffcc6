"""The loss curve in the report of a training."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from penstock.cli import main
from penstock.observe.loss_curve import LossCurve, draw_loss_curve, read_loss_curve
from tests.observe.synthetic_runs import offloaded, write_run


def write_metrics(out: Path) -> None:
    events = [
        {"event": "eval", "step": 0, "loss": 3.5},
        *({"event": "step", "step": n, "loss": 3.0 / n, "lr": 1.0} for n in range(1, 4)),
        {"event": "skipped", "step": 4, "loss": None},
        {"event": "save", "step": 3},
        {"event": "eval", "step": 3, "loss": 1.25},
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (out / "metrics.jsonl").write_text(lines + '{"event": "st')


def test_losses_are_read_next_to_the_recording(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    curve = read_loss_curve(tmp_path / "profile")

    assert curve == LossCurve(((1, 3.0), (2, 1.5), (3, 1.0)), ((0, 3.5), (3, 1.25)))
    assert read_loss_curve(tmp_path / "elsewhere") is None


def test_a_curve_of_any_length_is_drawn() -> None:
    one = LossCurve(((1.0, 2.0),), ())
    many = LossCurve(tuple((float(n), 5.0 / n) for n in range(1, 20_000)), ((1.0, 2.0), (9.0, 1.0)))
    for curve, lines in ((one, 2), (many, 3)):
        figure = ElementTree.fromstring(draw_loss_curve(curve))
        paths = figure.findall(".//path")
        assert len(paths) == lines  # and the grid
        assert all("nan" not in path.attrib["d"] for path in paths)
        assert max(len(path.attrib["d"]) for path in paths) < 30_000
    assert "evaluation from 2 to 1, lowest 1" in draw_loss_curve(many)


def test_the_report_of_a_training_shows_its_losses(tmp_path: Path) -> None:
    run = write_run(offloaded(), tmp_path / "profile")
    assert main.run(["report", str(tmp_path)]) == 0
    assert "Loss by step" not in (run / "report.html").read_text()
    write_metrics(tmp_path)
    assert main.run(["report", str(tmp_path)]) == 0
    html = (run / "report.html").read_text()
    assert "Loss by step" in html
    assert "training from 3 to 1, lowest 1" in html
