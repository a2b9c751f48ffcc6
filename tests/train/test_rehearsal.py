"""`penstock train` says what a rehearsal changed, and keeps the plan that it follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine import open_engine
from penstock.plan.plan import Plan
from penstock.plan.working_memory import PartMemory, WorkingMemory
from penstock.tiers import Tier
from penstock.units import KiB, MiB
from tests.train.runs import Runs

BUDGET = ("--hbm", "3MiB", "--dram", "64MiB", "--steps", "2")


def need(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every rehearsal measure some working memory."""
    part = PartMemory(name="model.layers.0", forward=0, backward=nbytes)
    memory = WorkingMemory(parts=(part,), origin="measured")
    monkeypatch.setattr(open_engine, "_rehearse", lambda *args: memory)


def plan_of(runs: Runs, out: Path) -> Plan:
    assert runs.run(out, *BUDGET).code == 0
    return Plan.load(out / "plan.json")


def too_much(plan: Plan) -> int:
    pools = {pool.what: pool.nbytes for pool in plan.pools}
    return pools["working memory"] + plan.budget.hbm - plan.peak(Tier.HBM) + 200 * KiB


def test_a_plan_that_is_too_small_changes_with_a_note(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan_of(runs, tmp_path / "before")
    need(too_much(before), monkeypatch)

    ended = runs.run(tmp_path / "out", *BUDGET)

    assert ended.code == 0, ended.errors
    (note,) = (line for line in ended.errors.splitlines() if "the rehearsal measured" in line)
    assert "planned again" in note
    followed = Plan.load(tmp_path / "out" / "plan.json")
    assert followed.at_rest(Tier.HBM) < before.at_rest(Tier.HBM)
    assert len(ended.losses) == 2


def test_a_budget_that_is_too_small_names_the_least(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(3 * MiB, monkeypatch)

    ended = runs.run(tmp_path / "out", *BUDGET)

    assert ended.code == 1
    assert "the rehearsal measured 3.00 MiB" in ended.errors
    assert "--hbm" in ended.errors
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_a_plan_file_that_is_too_small_is_refused(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan_of(runs, tmp_path / "before")
    need(too_much(before), monkeypatch)
    path = str(tmp_path / "before" / "plan.json")

    ended = runs.run(tmp_path / "out", "--plan", path, "--steps", "2")

    assert ended.code == 1
    assert "run `penstock plan` again, or leave --plan out" in ended.errors


def test_the_view_shows_the_rehearsal(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    plain = open_engine._rehearse

    def rehearse(*args: Any) -> Any:
        from dataclasses import replace

        *given, options = args
        assert options.progress is not None
        options.progress(0, 8, "rehearsing forward of model.embed_tokens")
        shown.append(options.progress)
        return plain(*given, replace(options, rehearse=True))

    monkeypatch.setattr(open_engine, "_rehearse", rehearse)

    ended = runs.run(tmp_path / "out", "--hbm", "64MiB", "--dram", "64MiB", "--steps", "1")

    assert ended.code == 0, ended.errors
    assert shown
