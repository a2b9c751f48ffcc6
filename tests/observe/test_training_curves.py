"""The metrics of a training in its report."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.cli import main
from penstock.observe.plots import PhaseIndex, draw_plot
from penstock.observe.training_curves import TrainingCurves, read_curves
from tests.observe.synthetic_runs import offloaded, write_run


def write_metrics(out: Path) -> None:
    events = [
        {"event": "eval", "step": 0, "loss": 3.5},
        {"event": "step", "step": 2, "loss": 7.0, "lr": 1.0},  # of a run that was killed
        *(
            {"event": "step", "step": n, "loss": 3.0 / n, "lr": 1.0, "seconds": 0.25 * n}
            for n in range(1, 4)
        ),
        {"event": "skipped", "step": 4, "loss": None},
        {"event": "save", "step": 3},
        {"event": "eval", "step": 3, "loss": 1.25},
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (out / "metrics.jsonl").write_text(lines + '{"event": "st')


def test_metrics_are_read_next_to_the_recording(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    curves = read_curves(tmp_path / "profile")

    assert curves is not None
    assert curves.loss == ((1, 3.0), (2, 1.5), (3, 1.0))  # step 2 as it was done again
    assert curves.evaluation == ((0, 3.5), (3, 1.25))
    assert curves.step_seconds == 0.625
    assert curves.grad_norm == ()
    assert read_curves(tmp_path / "elsewhere") is None


def test_the_load_of_experts_has_plots(tmp_path: Path) -> None:
    loads = {"expert_load_max": 3.5, "expert_load_min": 0.25, "idle_experts": 2}
    events = [{"event": "step", "step": n, "loss": 2.0, **loads} for n in (1, 2)]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "metrics.jsonl").write_text(lines)

    curves = read_curves(tmp_path)

    assert curves is not None
    plots = {plot.id: plot for plot in curves.other_plots()}
    assert plots.keys() == {"expert-load", "idle-experts"}
    drawn = draw_plot(plots["expert-load"], PhaseIndex([]))
    assert "the busiest" in drawn
    assert "the least busy" in drawn
    assert curves.idle_experts == ((1, 2.0), (2, 2.0))


def test_a_curve_of_any_length_is_drawn() -> None:
    one = TrainingCurves(((1.0, 2.0),))
    flat = TrainingCurves(((1.0, 0.0), (2.0, 0.0)))
    many = tuple((float(n), 5.0 / n) for n in range(1, 20_000))
    long = TrainingCurves(many, ((1.0, 2.0), (9.0, 1.0)))
    for curves, lines in ((one, 1), (flat, 1), (long, 2)):
        (plot,) = curves.loss_plots()
        figure = ElementTree.fromstring(draw_plot(plot, PhaseIndex([])))
        paths = [p.attrib["d"] for p in figure.findall(".//div[@class='area']/svg/path")]
        assert len(paths) == lines + 1  # and the grid
        assert all("nan" not in path for path in paths)
        assert max(map(len, paths)) < 30_000
    (plot,) = long.loss_plots()
    assert "evaluation from 2 to 1" in draw_plot(plot, PhaseIndex([]))
    assert plot.y(plot.top) == 0.0


def test_the_report_of_a_recorded_training_shows_its_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(offloaded(), tmp_path / "profile")
    assert main.run(["report", str(tmp_path)]) == 0
    assert "Loss by step" not in (run / "report.html").read_text()
    write_metrics(tmp_path)
    capsys.readouterr()
    assert main.run(["report", str(tmp_path), "--json"]) == 0
    html = (run / "report.html").read_text()
    assert "Loss by step" in html
    assert "training from 3 to 1" in html
    assert json.loads(capsys.readouterr().out)["losses"]["training"]["lowest"] == 1.0


def test_a_training_without_a_recording_has_a_report_of_its_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["report", str(tmp_path)]) == 1  # neither a recording nor a training
    write_metrics(tmp_path)
    capsys.readouterr()
    assert main.run(["report", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())

    assert printed.startswith("Training loss from 3 to 1 in 3 steps of 625 ms")
    assert "`--profile 20`" in printed
    html = (tmp_path / "report.html").read_text()
    assert all(title in html for title in ("Loss by step", "Learning rate", "Step time"))
    assert main.run(["report", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["losses"]["evaluation"] == {"first": 3.5, "lowest": 1.25, "last": 1.25}
    assert report["step_seconds"] == 0.625
