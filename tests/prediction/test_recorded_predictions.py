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
def test_tiers_held_the_predicted_bytes(name: str) -> None:
    check_tiers(RUNS[name])


def check_tiers(run: dict[str, Any]) -> None:
    """Compare what a run measured with the prediction that was saved before it.

    Files of earlier versions repeat the plan as the bytes of DRAM, CXL and NVMe. What they measured
    is torch's HBM, which may exceed the plan but not the budget, and the machine's memory.
    """
    predicted, tiers = run["predicted"]["tiers"], run["tiers"]
    host = predicted["dram"]["peak"] + predicted["cxl"]["peak"]
    assert run["host_peak_nbytes"] > host
    if "used" not in tiers["dram"]:
        assert run["hbm_reserved"] <= predicted["hbm"]["budget"]
        assert run["hbm_allocated"] <= predicted["hbm"]["peak"]
        return
    for tier in ("dram", "cxl", "nvme"):
        assert tiers[tier]["used"] == tiers[tier]["peak"] == predicted[tier]["peak"], tier
    assert run["arenas_in_memory"] == host
    assert run["hbm_reserved"] <= tiers["hbm"]["peak"] <= predicted["hbm"]["peak"]
    assert run["host"]["peak"] <= run["host"]["planned"]


MEASURED: dict[str, Any] = {
    "predicted": {"tiers": {tier: {"budget": 100, "peak": peak} for tier, peak in
                            {"hbm": 80, "dram": 50, "cxl": 0, "nvme": 20}.items()}},
    "tiers": {"hbm": {"used": 70, "peak": 75}, "dram": {"used": 50, "peak": 50},
              "cxl": {"used": 0, "peak": 0}, "nvme": {"used": 20, "peak": 20}},
    "hbm_reserved": 68, "hbm_allocated": 60, "host_peak_nbytes": 60, "arenas_in_memory": 50,
    "host": {"planned": 60, "used": 55, "peak": 58},
}  # fmt: skip
"""A run in today's format whose measurements agree with its prediction."""


def test_a_run_that_held_what_was_predicted_passes() -> None:
    check_tiers(MEASURED)


@pytest.mark.parametrize(
    "change",
    [
        {"tiers": MEASURED["tiers"] | {"dram": {"used": 51, "peak": 51}}},
        {"tiers": MEASURED["tiers"] | {"nvme": {"used": 19, "peak": 19}}},
        {"tiers": MEASURED["tiers"] | {"hbm": {"used": 81, "peak": 81}}},
        {"arenas_in_memory": 49},
        {"hbm_reserved": 76},
        {"host": {"planned": 60, "used": 55, "peak": 61}},
    ],
    ids=["dram", "nvme", "hbm", "pages", "reserved", "host"],
)
def test_a_run_that_held_something_else_fails(change: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check_tiers(MEASURED | change)
