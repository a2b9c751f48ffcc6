"""The cost model against whole steps of the engine, as `bench/results/engine_*.json` has them.

Rates of the bundled `h200` were fitted to how long lanes of some runs worked (docs/planner.md says
which): how long a step takes, with what overlaps and what waits, is predicted. `test_before.py` has
what was predicted before a run, by the model of that day.
"""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_cells import cells, plan_cell
from penstock.planner import PlanResult

RESULTS = Path(__file__).parents[2] / "bench" / "results"

RUN = (
    "fast-4x4096", "fast-16x4096", "8b-4x4096", "8b-1x65536", "8b-1x131072", "disk-16", "curve-08",
    "curve-12", "curve-20", "moments-fp32", "moments-bf16", "moments-int8", "32b",
)  # fmt: skip
"""Cells of the GPU table with more than one step."""

FITTED = ("fast-4x4096", "8b-4x4096", "moments-fp32", "moments-bf16")
"""Those whose lanes the rates of sweeps follow."""


def streamed(name: str) -> dict[str, Any]:
    """What the cell's run has written."""
    path = max(RESULTS.glob(f"engine_{name}_nvidia-h200_*.json"))  # the latest day's
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]["streamed"]
    return found


@functools.cache
def planned(name: str) -> PlanResult:
    """The cell, planned anew with the budgets of the run."""
    return plan_cell(next(cell for cell in cells() if cell.name == name), Path("/mnt/nvme"))


@pytest.mark.parametrize("name", RUN)
def test_the_same_budgets_are_planned_to_take_as_long_as_they_did(name: str) -> None:
    measured = statistics.median(streamed(name)["step_seconds"][1:])

    assert planned(name).cost.step_seconds == pytest.approx(measured, rel=0.10)


@pytest.mark.parametrize("name", FITTED)
def test_lanes_work_as_long_as_they_did(name: str) -> None:
    cost = planned(name).cost
    busy = dict.fromkeys(("compute", "sweep"), 0.0)
    for operation, span in zip(cost.schedule.operations, cost.spans, strict=True):
        if operation.lane in busy:
            busy[operation.lane] += span.end - span.start
    recorded = streamed(name)["timeline"]["busy"]

    for lane, seconds in busy.items():
        assert seconds == pytest.approx(recorded[lane], rel=0.10)
