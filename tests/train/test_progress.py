"""The views of a run on a pipe and on a terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from penstock.engine.plan_choice import PlanChoice
from penstock.planner.candidate import Location
from penstock.planner.planner import plan_result
from penstock.train.progress import (
    LineView,
    LiveView,
    format_duration,
    format_event,
    print_plan,
)
from tests.support.machines import machine
from tests.support.schedule_checker import all_on, evaluator_for
from tests.train.events import STEP, TIERS


def test_lines_about_steps_come_once_per_interval(capsys: pytest.CaptureFixture[str]) -> None:
    view = LineView(interval=1e9)
    view._steps = 10
    view._last = 1e18  # as if a line had just been printed
    view.handle(STEP)
    assert capsys.readouterr().out == ""
    view.handle({"event": "eval", "step": 3, "loss": 2.25, "tokens": 9, "seconds": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 3/10  loss 2.5000  norm 0.7  lr 0.0001  1,234 tokens/s  14 s")
    assert lines[1] == "evaluation loss 2.2500 at step 3"


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("from_file", [True, False])
def test_the_plan_of_a_run_says_if_it_cannot_be_reproduced(
    deterministic: bool, from_file: bool
) -> None:
    evaluator = evaluator_for(layers=3, tied=False)
    result = plan_result(evaluator, all_on(evaluator, Location.DRAM))
    work = result.plan.workload
    numerics = replace(work.numerics, deterministic=deterministic)
    plan = replace(result.plan, workload=replace(work, numerics=numerics))
    planned = None if from_file else replace(result, plan=plan)
    output = io.StringIO()

    print_plan(Console(file=output, width=120), PlanChoice(plan, machine(), planned))

    assert output.getvalue().count("not reproducible") == (0 if deterministic else 1)


def rendered(view: LiveView) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(view.render())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def test_the_live_view_advances_within_a_step() -> None:
    view = LiveView(Console(file=io.StringIO(), width=120))
    view._steps, view._bottleneck = 10, "NVMe at /mnt"
    view.handle({"event": "plan", "tiers": TIERS})
    assert "50 B planned, budget 100 B" in rendered(view)
    view.handle(STEP)
    first = rendered(view)
    assert "step 3/10" in first
    assert "30.0%" in first
    assert "14 s left" in first
    assert "loss 2.5000" in first
    assert "40 B of 50 B planned, budget 100 B" in first
    assert "60 B of 80 B planned" in first
    assert "cxl" not in first
    assert "limited by NVMe at /mnt" in first

    view.show_step_progress(50, 100, "backward layer 1")

    second = rendered(view)
    assert "35.0%" in second
    assert "13 s left" in second
    assert "backward layer 1" in second


@pytest.mark.parametrize(
    ("seconds", "text"), [(14.2, "14 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_a_duration_is_formatted_in_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_the_end_of_a_run_says_whether_it_trained_an_adapter(tmp_path: Path) -> None:
    done = {"event": "done", "steps": 3, "model": str(tmp_path), "peak_host_bytes": 1,
            "peak_hbm_bytes": 1}  # fmt: skip

    assert f"the model is in {tmp_path}" in format_event(done, 3)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert f"the adapter is in {tmp_path}" in format_event(done, 3)


def test_the_line_about_the_start_leaves_out_short_phases() -> None:
    phases = {"import": 4.04, "survey": 0.02, "rehearsal": 7.5, "first step": 2.25}
    event = {"event": "start_up", "seconds": 13.84, "phases": phases}

    line = format_event(event, 3)

    assert line == "first step done after 13.8 s: import 4.0 s, rehearsal 7.5 s, first step 2.2 s"
