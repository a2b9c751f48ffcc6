"""`penstock plan --gpus`: one plan for several GPUs, and the table of scaling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.plan.plan import Plan
from penstock.plan.working_memory_estimate import estimate_working_memory

CONFIG = Path(__file__).parents[1] / "configs/qwen2.5-3b"
SMALL = (str(CONFIG), "--context", "1024", "--machine", "board-8x4090")


@pytest.fixture(autouse=True)
def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate working memory: tracing the model takes much longer than planning."""
    monkeypatch.setattr(
        "penstock.engine.plan_choice.working_memory_source",
        lambda *_, **__: estimate_working_memory,
    )


def run(*arguments: str, code: int = 0) -> str:
    """Run the command; return what it prints, or its error."""
    result = CliRunner().invoke(app, ["plan", *SMALL, *arguments])
    assert result.exit_code == code, result.output
    return result.output or str(result.exception)


def test_several_numbers_give_a_table_at_the_same_tokens_per_gpu() -> None:
    rows: list[dict[str, Any]] = json.loads(
        run("--batch", "16", "--gpus", "2,4", "--json").splitlines()[-1]
    )
    assert [(row["gpus"], row["batch"], row["tokens"]) for row in rows] == [
        (1, 16, 16384), (2, 32, 32768), (4, 64, 65536),
    ]  # fmt: skip
    assert rows[0]["efficiency"] == 1.0
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["step_seconds"])
        per_gpu = row["tokens_per_second"] / row["gpus"]
        assert row["efficiency"] == pytest.approx(per_gpu / rows[0]["tokens_per_second"])
        assert row["efficiency"] <= 1.001
        ranks = row["ranks"]
        assert ranks["gpus"] == row["gpus"]
        assert ranks["machine_peak"]["dram"] == row["gpus"] * row["tiers"]["dram"]["peak"]
        assert ranks["transport"] == (None if row["gpus"] == 1 else "shared")
    table = run("--batch", "16", "--gpus", "2,4")
    assert "efficiency" in table
    assert "Transport: shared" in table


def test_one_number_plans_for_so_many_gpus(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = run("--batch", "32", "--gpus", "2", "-o", str(path))
    assert "2 GPUs: 32 x 1,024 tokens per step" in text.replace("\n", " ").replace("  ", " ")
    plan = Plan.load(path)
    assert (plan.workload.world, plan.workload.batch, len(plan.seats)) == (2, 32, 2)
    assert plan.placement.transport == "shared"
    forced = tmp_path / "forced.json"
    run("--batch", "32", "--gpus", "2", "-o", str(forced), "--transport", "collective")
    assert Plan.load(forced).placement.transport == "collective"


def test_several_machines_have_as_many_ranks_each(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = run("--batch", "64", "--gpus", "2", "--machines", "2", "-o", str(path))
    assert "2 GPUs, 2 machines" in " ".join(text.split())  # wrapped by the length of a path
    plan = Plan.load(path)
    assert (plan.workload.world, len(plan.seats), plan.ranks.machines) == (4, 2, 2)
    assert plan.placement.transport == "collective"
    assert "share no memory" in run(
        "--batch", "64", "--gpus", "2", "--machines", "2", "--transport", "shared", code=1
    ).replace("\n", " ")


def test_budgets_are_per_machine_except_hbm() -> None:
    rows = json.loads(
        run("--batch", "32", "--gpus", "2", "--json", "--hbm", "20GiB", "--dram", "60GiB")
        .splitlines()[-1]
    )  # fmt: skip
    assert rows["tiers"]["hbm"]["budget"] == 20 << 30
    assert rows["tiers"]["dram"]["budget"] == 30 << 30


def test_more_gpus_than_a_preset_has_are_planned_for_and_said_so() -> None:
    output = CliRunner().invoke(
        app, ["plan", str(CONFIG), "--context", "1024", "--batch", "32", "--machine",
              "desktop-24gb", "--gpus", "2"],
    ).output  # fmt: skip
    assert "desktop-24gb has 1 GPU: this plan is for a machine like it with 2" in " ".join(
        output.split()
    )


@pytest.mark.parametrize("gpus", ["0", "2,x", "two", "-1", ""])
def test_a_wrong_number_of_gpus_is_a_usage_error(gpus: str) -> None:
    assert "must be a number of GPUs" in " ".join(
        run("--batch", "32", "--gpus", gpus, code=2).replace("│", " ").split()
    )


@pytest.mark.parametrize("flag", [("-o", "x.json"), ("--explain", "lm_head")])
def test_a_table_takes_no_output_of_one_plan(flag: tuple[str, str]) -> None:
    assert "takes one number of GPUs" in run("--gpus", "2,4", *flag, code=2)


def test_fewer_micro_batches_than_gpus_are_refused_with_what_to_set() -> None:
    text = " ".join(run("--batch", "16", "--gpus", "2", code=1).split())
    assert "(--batch 32), a micro-batch of 8 (--micro-batch 8), or 1 rank (--gpus 1)" in text
