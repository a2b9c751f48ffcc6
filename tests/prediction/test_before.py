"""What plans promised before they were run, beside what was measured: every results file that holds
both. New files are held to the same."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def promised() -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(RESULTS.glob("engine_*.json")):
        streamed = json.loads(path.read_text(encoding="utf-8"))["results"]["streamed"]
        if streamed.get("predicted"):
            found[path.name] = streamed
    return found


RUNS = promised()


def test_there_are_some() -> None:
    assert len(RUNS) >= 5


@pytest.mark.parametrize("name", RUNS)
def test_a_step_took_what_was_promised(name: str) -> None:
    seconds = RUNS[name]["step_seconds"]
    measured = statistics.median(seconds[1:] or seconds)

    assert RUNS[name]["predicted"]["step_seconds"] == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("name", RUNS)
def test_tiers_held_what_was_promised_to_the_byte(name: str) -> None:
    planned, taken = RUNS[name]["predicted"]["tiers"], RUNS[name]["tiers"]

    for tier, of in taken.items():
        assert (of["at_rest"], of["peak"]) == (planned[tier]["at_rest"], planned[tier]["peak"]), (
            tier
        )
    assert RUNS[name]["hbm_reserved"] <= taken["hbm"]["budget"]
