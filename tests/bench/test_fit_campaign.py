"""The campaign of random models: what it draws, runs, counts and reports."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import fit_campaign
from bench.fit_cases import TINY, Case, Limits, draw_batches, draw_case, make_config
from penstock.errors import InfeasibleError
from penstock.units import GiB

ROOT = Path(__file__).parents[2]


def test_a_case_follows_from_seed_and_number() -> None:
    assert draw_case(5, 3) == draw_case(5, 3)
    assert draw_case(5, 3) != draw_case(5, 4)
    assert draw_case(5, 3) != draw_case(6, 3)


def test_cases_cover_what_the_campaign_promises() -> None:
    cases = [draw_case(1, number, compiled=0.5) for number in range(300)]
    limits = Limits()

    assert len({case.family for case in cases}) > 20
    assert all(32_000 <= case.config["vocab_size"] <= 262_144 for case in cases)
    assert max(case.config["vocab_size"] for case in cases) > 200_000
    assert all(case.context * case.batch <= max(limits.tokens, case.context) for case in cases)
    assert any(case.config["intermediate_size"] % 8 for case in cases)
    assert any(case.config["intermediate_size"] % 8 == 0 for case in cases)
    assert any(case.config.get("head_dim", 0) % 8 for case in cases)
    for choice in ("micro_batch", "packed", "moments", "clip", "freeze", "compiled"):
        assert len({getattr(case, choice) for case in cases}) > 1, choice
    assert {case.config["tie_word_embeddings"] for case in cases} == {True, False}
    for case in cases:
        make_config(case)  # transformers refuses some combinations of sizes


def test_packed_rows_start_documents_at_zero() -> None:
    packed = next(c for n in range(50) if (c := draw_case(1, n, limits=TINY)).packed)
    positions = next(draw_batches(packed, 1))["position_ids"]

    assert positions.shape == (packed.batch, packed.context)
    assert (positions[:, 0] == 0).all()
    grows = positions[:, 1:] == positions[:, :-1] + 1
    assert (grows | (positions[:, 1:] == 0)).all()


@pytest.mark.long
def test_random_models_train_at_the_least_memory_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "fit.jsonl"
    command = [sys.executable, "bench/fit_campaign.py", "--tiny", "--device", "cpu", "--cases", "1",
               "--workers", "1", "--compiled", "0", "--seed", "11", "--out", str(out)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    records = fit_campaign.read_records(out)
    assert sorted(record["case"]["number"] for record in records) == [0]
    for record in records:
        assert record["outcome"] in fit_campaign.TRAINED
        assert len(record["losses"]) == 3
        assert 0 < record["planned_hbm"] <= record["least_hbm"] == record["hbm_budget"]
    assert '"trained": 1' in result.stdout


def arguments(out: Path, *words: str) -> argparse.Namespace:
    fixed = ["--tiny", "--device", "cpu", "--workers", "2", "--seed", "3", "--out", str(out)]
    return fit_campaign.arguments([*fixed, *words])


def fake(outcomes: dict[int, str]) -> Any:
    """Return a stand-in for a case: it ends with the outcome that its number has."""

    def run_case(case: Case, args: argparse.Namespace, claim: Any) -> dict[str, Any]:
        outcome = outcomes.get(case.number, "planned")
        if outcome == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if outcome == "hangs":
            time.sleep(1000)
        return fit_campaign.new_record(case, args) | {"outcome": outcome}

    return run_case


def test_a_case_that_dies_or_hangs_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_campaign, "run_case", fake({1: "killed", 2: "hangs"}))
    args = arguments(tmp_path / "out", "--cases", "5", "--case-seconds", "2", "--reserve", "0")

    records = fit_campaign.run_campaign(args)

    outcomes = {record["case"]["number"]: record["outcome"] for record in records}
    assert outcomes == {0: "planned", 1: "crashed", 2: "timed out", 3: "planned", 4: "planned"}
    summary = fit_campaign.summarize(records)
    assert summary["trained"] == 3
    assert any("--seed 3 --only 1 " in failure["repeat"] for failure in summary["failures"])


def test_an_unsupported_draw_is_replaced_and_a_later_call_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_campaign, "run_case", fake({1: "unsupported"}))
    out = tmp_path / "out"
    fit_campaign.run_campaign(arguments(out, "--cases", "2", "--reserve", "0"))
    assert {r["case"]["number"] for r in fit_campaign.read_records(out)} == {0, 1, 2}

    args = fit_campaign.arguments(["--append", "--cases", "4", "--workers", "2", "--tiny",
                                   "--reserve", "0", "--out", str(out)])  # fmt: skip
    assert args.seed == 3
    made = fit_campaign.run_campaign(args)

    assert {record["case"]["number"] for record in made} == {3, 4}
    assert fit_campaign.summarize(fit_campaign.read_records(out))["cases"] == 4


def test_a_summary_counts_memory_errors_shares_and_runs_below() -> None:
    def record(outcome: str, number: int, below: float = 0.0, live: int = 0) -> dict[str, Any]:
        args = argparse.Namespace(compiled=1.0, tiny=False, below=below, device=None)
        base = fit_campaign.new_record(draw_case(1, number), args) | {"outcome": outcome}
        if live:
            base |= {"live_peak": live, "context_planned": 2, "context_measured": 1,
                     "planned_hbm": 10, "reserved_peak": 9, "hbm_budget": 10}  # fmt: skip
        return base

    summary = fit_campaign.summarize([
        record("planned", 0, live=8), record("replanned", 1, live=9), record("planned", 2, live=5),
        record("out of memory", 3), record("torch out of memory", 4), record("not finite", 5),
        record("refused", 6, below=0.9), record("planned", 7, below=0.9, live=8),
    ])  # fmt: skip

    assert summary["cases"] == 6
    assert summary["out_of_memory"] == 2
    assert summary["not_finite"] == 1
    assert summary["used_share"]["median"] == 0.9
    assert summary["most_reserved_over_budget"] == 1
    assert summary["below"] == {
        "cases": 2, "failed_as_expected": 1, "outcomes": {"refused": 1, "planned": 1}
    }  # fmt: skip
    assert len(summary["failures"]) == 4
    assert json.dumps(summary)


def test_the_least_is_what_the_planner_names() -> None:
    def plan(hbm: int) -> Any:
        raise InfeasibleError("too little", least={"hbm": 7 * GiB, "dram": None})

    assert fit_campaign.find_least(plan) == 7 * GiB
