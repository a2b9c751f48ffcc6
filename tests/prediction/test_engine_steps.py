"""The cost model agrees with whole steps of the engine, from `bench/results/engine_*.json`.

The rates of the preset `h200` were fitted to how long the lanes of some runs were busy
(docs/planner.md lists them). The step time, which depends on what overlaps and what waits, is a
prediction. `test_recorded_predictions.py` covers predictions made before a run.
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
from tests.support.samples import sample

RESULTS = Path(__file__).parents[2] / "bench" / "results"

RUN = (
    "fast-4x4096-4", "fast-16x4096", "8b-4x4096", "8b-4x4096-2", "8b-1x65536", "8b-1x131072",
    "disk-16", "curve-08", "curve-12", "curve-20", "moments-fp32", "moments-bf16", "moments-int8",
    "32b",
)  # fmt: skip
"""Cells of the GPU table with more than one step. A number at the end counts runs of a cell."""

LATE = {"fast-4x4096-4": "fast-4x4096", "8b-4x4096-2": "8b-4x4096"}
"""Runs whose plans updated moments in backward, and their cells."""

FITTED = ("fast-4x4096-4", "8b-4x4096", "moments-fp32", "moments-bf16")
"""Runs that the rates were fitted to."""


def streamed(name: str) -> dict[str, Any]:
    """Return the results of a run."""
    path = max(RESULTS.glob(f"engine_{name}_nvidia-h200_*.json"))
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]
    streamed: dict[str, Any] = results["streamed"]
    return streamed


@functools.cache
def planned(name: str) -> PlanResult:
    """Plan the cell again with the budgets of the run, in which the CPU made all sweeps."""
    cell = next(cell for cell in cells() if cell.name == LATE.get(name, name))
    return plan_cell(cell, Path("/mnt/nvme"), gpu_sweeps=False, late_moments=name in LATE)


@pytest.mark.parametrize("name", sample(RUN, ("fast-16x4096", "8b-4x4096-2", "disk-16")))
def test_the_estimated_step_time_is_within_10_percent_of_the_measured_one(name: str) -> None:
    measured = statistics.median(streamed(name)["step_seconds"][1:])

    assert planned(name).cost.step_seconds == pytest.approx(measured, rel=0.10)


@pytest.mark.parametrize("name", sample(FITTED, ("8b-4x4096",)))
def test_the_estimated_busy_time_of_lanes_is_within_10_percent(name: str) -> None:
    cost = planned(name).cost
    busy = dict.fromkeys(("compute", "sweep"), 0.0)
    for operation, span in zip(cost.schedule.operations, cost.spans, strict=True):
        if operation.lane in busy:
            busy[operation.lane] += span.end - span.start
    recorded = streamed(name)["timeline"]["busy"]

    for lane, seconds in busy.items():
        assert seconds == pytest.approx(recorded[lane], rel=0.10)
