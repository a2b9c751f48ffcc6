"""Predictions recorded before a run agree with what the run measured.

This covers every results file that contains both, and therefore also new ones.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def runs_with_predictions() -> dict[str, dict[str, Any]]:
    runs = {}
    for path in sorted(RESULTS.glob("engine_*.json")):
        streamed = json.loads(path.read_text(encoding="utf-8"))["results"]["streamed"]
        if streamed.get("predicted"):
            runs[path.name] = streamed
    return runs


RUNS = runs_with_predictions()


def test_there_are_runs_with_predictions() -> None:
    assert len(RUNS) >= 5


@pytest.mark.parametrize("name", RUNS)
def test_the_predicted_step_time_is_within_15_percent(name: str) -> None:
    seconds = RUNS[name]["step_seconds"]
    measured = statistics.median(seconds[1:] or seconds)

    assert RUNS[name]["predicted"]["step_seconds"] == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("name", RUNS)
def test_tiers_held_the_predicted_bytes_exactly(name: str) -> None:
    predicted, measured = RUNS[name]["predicted"]["tiers"], RUNS[name]["tiers"]

    for tier, nbytes in measured.items():
        assert (nbytes["at_rest"], nbytes["peak"]) == (
            predicted[tier]["at_rest"],
            predicted[tier]["peak"],
        ), tier
    assert RUNS[name]["hbm_reserved"] <= measured["hbm"]["budget"]
