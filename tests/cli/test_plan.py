"""`penstock plan` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from penstock.cli.machines import machines_command
from penstock.cli.plan import advice_text, parse_vary, plan_command
from penstock.errors import PenstockError, PlanError, SettingsError
from penstock.machine.presets import DEFAULT, preset
from penstock.plan.budget import GPU_PROCESS, check_paths, parse_budget, with_paths
from penstock.plan.plan import Plan
from penstock.plan.working_memory_estimate import estimate_working_memory
from penstock.planner.advice import Advice
from penstock.tiers import Tier
from penstock.units import GiB, MiB, format_seconds

GPT2 = str(Path(__file__).parents[1] / "configs" / "gpt2")
SMALL = ["--context", "512", "--batch", "4", "--hbm", "3GiB", "--machine", "desktop-24gb"]

app = typer.Typer(pretty_exceptions_enable=False)
app.command("plan")(plan_command)
app.command("machines")(machines_command)


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate working memory: tracing the model takes much longer than planning."""
    monkeypatch.setattr(
        "penstock.engine.plan_choice.working_memory_source",
        lambda *_, **__: estimate_working_memory,
    )


@pytest.fixture
def penstock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("COLUMNS", "160")
    return lambda *args: CliRunner().invoke(app, list(args))


def test_a_plan_shows_tiers_timeline_and_bottleneck(penstock: Callable[..., Result]) -> None:
    done = penstock("plan", GPT2, *SMALL, "--dram", "1GiB", "--nvme", "/mnt/nvme:4GiB")

    assert done.exit_code == 0, done.output
    for words in ("hbm", "dram", "GPU compute", "tokens/s; limited by", "14.00 bytes per parameter",
                  "What would help most"):  # fmt: skip
        assert words in done.output


def test_the_rates_of_a_disk_without_measurement_are_assumed(
    penstock: Callable[..., Result],
) -> None:
    done = penstock("plan", GPT2, *SMALL, "--dram", "1GiB", "--nvme", "/data/scratch:4GiB")

    assert done.exit_code == 0, done.output
    assert "/data/scratch: not measured, assumed to be as fast as" in done.output


def test_a_path_that_the_machine_lacks_is_named() -> None:
    machine = preset(DEFAULT)
    budget = parse_budget(machine, hbm="3GiB", dram="1GiB", nvme=("/data/scratch:4GiB",))

    with pytest.raises(PlanError, match="/data/scratch is not in the machine's storage"):
        check_paths(machine, budget)
    check_paths(with_paths(machine, budget)[0], budget)


def test_json_has_stable_keys(penstock: Callable[..., Result]) -> None:
    done = penstock("plan", GPT2, *SMALL, "--dram", "4GiB", "--json")
    found = json.loads(done.stdout)

    assert list(found) == ["feasible", "tiers", "step_seconds", "tokens_per_second", "bound_by",
                           "bytes_per_parameter", "phases", "working_memory", "recompute", "sweep",
                           "host", "ranks", "not_trainable"]  # fmt: skip
    assert list(found["tiers"]) == ["hbm", "dram", "cxl", "nvme"]
    assert all(list(tier) == ["budget", "at_rest", "peak"] for tier in found["tiers"].values())
    assert found["feasible"] is True
    assert found["tiers"]["hbm"]["peak"] <= found["tiers"]["hbm"]["budget"] == 3 * GiB
    assert found["bound_by"] in {"gpu", "host", "sweep", "pcie", "memory", "nvme"}
    assert list(found["phases"]) == ["sweep", "forward", "backward"]
    assert found["host"] == {
        "process": GPU_PROCESS, "peak": found["tiers"]["dram"]["peak"] + GPU_PROCESS
    }  # fmt: skip
    for phase in found["phases"].values():
        for tier, nbytes in phase.items():
            assert found["tiers"][tier]["at_rest"] <= nbytes <= found["tiers"][tier]["peak"]


def test_an_infeasible_budget_exits_with_1_and_names_a_feasible_one(
    penstock: Callable[..., Result],
) -> None:
    tight = [*SMALL[:4], "--hbm", "2600MiB", "--dram", "256MiB", "--machine", "desktop-24gb"]
    table = penstock("plan", GPT2, *tight)
    as_json = penstock("plan", GPT2, *tight, "--json")

    assert table.exit_code == as_json.exit_code == 1
    assert "does not fit in 2.54 GiB hbm" in table.output
    found = json.loads(as_json.stdout)
    assert found["feasible"] is False
    assert found["tiers"]["dram"]["least"] > 256 << 20
    enough = f"{found['tiers']['dram']['least']}"
    again = [*SMALL[:4], "--hbm", "2600MiB", "--dram", enough, "--machine", "desktop-24gb"]
    assert penstock("plan", GPT2, *again, "--json").exit_code == 0


def test_the_plan_file_can_be_loaded(penstock: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    penstock("plan", GPT2, *SMALL, "--dram", "4GiB", "-o", str(path), "--json")

    assert Plan.load(path).machine == "desktop-24gb"


def test_a_model_that_cannot_be_trained_is_planned_for_with_its_weights(
    penstock: Callable[..., Result], tmp_path: Path
) -> None:
    """Experts are stored one by one, which only loading for training would refuse."""
    import transformers

    from tests.conformance_models.tiny import tiny_config

    transformers.AutoModelForCausalLM.from_config(tiny_config("phimoe")).save_pretrained(tmp_path)
    small = ["--context", "32", *SMALL[2:]]
    reason = (
        "PhimoeForCausalLM draws random numbers in training in addition to dropout, to choose "
        "experts; if its config has router_jitter_noise, set it to 0 with "
        "--model-config router_jitter_noise=0.0"
    )
    done = penstock("plan", str(tmp_path), *small, "--dram", "4GiB")
    as_json = penstock("plan", str(tmp_path), *small, "--dram", "4GiB", "--json")
    too_small = penstock("plan", str(tmp_path), *small, "--hbm", "1MiB", "--json")

    assert (done.exit_code, as_json.exit_code, too_small.exit_code) == (1, 1, 1), done.output
    said = " ".join(done.output.split())
    assert f"error: this model cannot be trained: {reason}" in said
    assert "per step" in done.output
    found = [json.loads(each.stdout.splitlines()[-1]) for each in (as_json, too_small)]
    assert [(each["feasible"], each["not_trainable"]) for each in found] == [
        (True, reason), (False, reason),
    ]  # fmt: skip


def test_a_name_of_penstock_fit_is_planned_for_without_its_files(
    penstock: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.model.hub._ask", None)  # nobody asks the Hub

    done = penstock("plan", "qwen3-0.6b", *SMALL, "--hbm", "16GiB", "--json")
    refused = penstock("plan", "qwen3-0.6b", *SMALL, "--lora", "r=4")

    assert done.exit_code == 0, done.output
    assert "published sizes of Qwen/Qwen3-0.6B" in done.stderr
    assert json.loads(done.stdout)["feasible"]
    assert "needs the model's files" in str(refused.exception)
    assert "pass its Hub ID Qwen/Qwen3-0.6B" in str(refused.exception)


def test_settings_of_training_are_accepted_checked_and_named(
    penstock: Callable[..., Result], tmp_path: Path
) -> None:
    plans = []
    for name, more in (
        ("few", []),
        ("all", ["--lr", "1e-3", "--out", "out/", "--save-every", "9"]),
    ):
        path = tmp_path / name
        done = penstock("plan", GPT2, *SMALL, "--dram", "4GiB", "-o", str(path), *more)
        assert done.exit_code == 0, done.output
        plans.append(path.read_text())
    wrong = penstock("plan", GPT2, *SMALL, "--dram", "4GiB", "--lr", "-1")

    assert plans[0] == plans[1]
    assert "Not used: --lr, --out, --save-every, on which the plan does not" in done.output
    assert isinstance(wrong.exception, SettingsError)
    assert "--lr " not in penstock("plan", "--help").output


def test_explain_shows_one_block(penstock: Callable[..., Result]) -> None:
    done = penstock("plan", GPT2, *SMALL, "--dram", "4GiB", "--explain", "transformer.h.3")

    assert "transformer.h.3: 7,087,872 parameters" in done.output
    assert "backward" in done.output
    assert "peak memory during" in done.output


def test_the_micro_batch_may_be_a_number_or_auto(
    penstock: Callable[..., Result], tmp_path: Path
) -> None:
    sizes = {}
    for given in ("2", "auto"):
        path = tmp_path / f"{given}.json"
        flags = ["--dram", "4GiB", "--micro-batch", given, "-o", str(path), "--json"]
        assert penstock("plan", GPT2, *SMALL, *flags).exit_code == 0
        sizes[given] = Plan.load(path).workload.numerics.micro_batch

    assert sizes == {"2": 2, "auto": 4}


@pytest.mark.parametrize("other", [["--json"], ["--vary", "dram=1GiB..4GiB"]])
def test_only_one_kind_of_output_can_be_chosen(
    penstock: Callable[..., Result], other: list[str]
) -> None:
    """`--json` would print neither a block nor a curve."""
    done = penstock("plan", GPT2, *SMALL, "--explain", "transformer.h.3", *other)

    assert done.exit_code == 2
    assert "choose one of them" in done.output
    assert "parameters)" not in done.output


def test_vary_plots_a_curve(
    penstock: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = penstock("plan", GPT2, *SMALL, "--dram", "4GiB", "--vary", "dram=256MiB..4GiB")

    assert done.exit_code == 0, done.output
    assert (tmp_path / "plan-dram.png").stat().st_size > 1000


@pytest.mark.usefixtures("no_trace")
def test_vary_agrees_with_plan_and_starts_from_budgets_that_do_not_fit(
    penstock: Callable[..., Result], tmp_path: Path
) -> None:
    tight = ["--context", "256", "--batch", "32", "--hbm", "2GiB", *SMALL[-2:]]
    image = str(tmp_path / "curve.png")
    done = penstock(
        "plan", GPT2, *tight, "--dram", "1GiB", "--vary", "dram=1GiB..2GiB", "-o", image
    )
    none = penstock(
        "plan", GPT2, *tight, "--dram", "1MiB", "--vary", "dram=1MiB..2MiB", "-o", image
    )

    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines() if " GiB  " in line]
    assert " ".join(rows[0][2:]) == "does not fit"
    assert "does not fit in 2.00 GiB hbm, 1.00 GiB dram" in " ".join(done.output.split())
    plan = penstock("plan", GPT2, *tight, "--dram", "2GiB")
    assert f"{' '.join(rows[-1][2:4])} per step" in plan.output
    assert none.exit_code == 1
    assert "error: " in none.output


@pytest.mark.usefixtures("no_trace")
def test_a_budget_above_the_machine_is_for_a_machine_that_has_it(
    penstock: Callable[..., Result], tmp_path: Path
) -> None:
    small = replace(preset("desktop-24gb"), name="small")
    (node,) = small.dram_nodes
    file = tmp_path / "small.json"
    replace(small, nodes=(replace(node, capacity=128 * MiB),)).save(file)
    big = [*SMALL[:-1], str(file), "--dram", "3GiB"]

    done = penstock("plan", GPT2, *big)
    assert done.exit_code == 0, done.output
    assert "small has 128 MiB of dram: this plan is for a machine like it with 3.00 GiB." in (
        done.output
    )
    assert "choose a smaller --dram" not in done.output
    found = penstock("plan", GPT2, *big, "--json")
    assert "small has 128 MiB of dram" in found.stderr
    plan = json.loads(found.stdout)
    assert plan["tiers"]["dram"]["peak"] > 128 * MiB

    points = penstock(
        "plan", GPT2, *big, "--vary", "dram=1GiB..15GiB", "-o", str(tmp_path / "a.png")
    )
    assert points.exit_code == 0, points.output
    assert "Budgets above 5.50 GiB are planned for a machine like small" in points.output
    last = next(line for line in points.output.splitlines() if line.startswith("3.00 GiB"))
    assert format_seconds(plan["step_seconds"]) in last
    assert (tmp_path / "a.png").exists()


def test_cxl_memory_of_a_machine_without_any_is_refused(penstock: Callable[..., Result]) -> None:
    done = penstock("plan", GPT2, *SMALL, "--cxl", "3GiB")
    assert done.exit_code == 1
    assert "cxl: is 3.00 GiB, but desktop-24gb has no CXL memory" in str(done.exception)
    assert "leave --cxl out, or plan for a machine that has it" in str(done.exception)


@pytest.mark.parametrize("tier", ["hbm", "dram"])
def test_a_budget_above_this_machine_is_refused(penstock: Callable[..., Result], tier: str) -> None:
    done = penstock("plan", GPT2, "--context", "512", "--machine", "this", f"--{tier}", "900TiB")
    assert done.exit_code == 1
    assert f"{tier}: is 900 TiB, and this machine has" in str(done.exception)


def test_vary_writes_its_plot_only_to_an_image(penstock: Callable[..., Result]) -> None:
    done = penstock("plan", GPT2, *SMALL, "--vary", "dram=1GiB..3GiB", "-o", "plan.json")
    assert done.exit_code == 2
    assert "it names the plot: .png, .svg, .pdf; got plan.json" in " ".join(done.output.split())


def test_presets_are_listed_with_their_source(penstock: Callable[..., Result]) -> None:
    done = penstock("machines")

    assert "desktop-24gb" in done.output
    assert "data sheets" in done.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dram", "many"], "^dram: 'many' is not a size"),
        (["--context", "4096"], "^context: is 4096, but the position embeddings of .* cover 1024"),
        (["--machine", "nowhere"], "^machine: nowhere is neither a machine file nor a preset"),
        (["--moments", "fp8"], '^moments: must be "fp32" or "bf16" or "int8", got "fp8"'),
        (["--dram", "4GiB", "--vary", "cpu=1..2"], "^vary: must have the form dram=16GiB..128GiB"),
        (["--dram", "4GiB", "--explain", "h.99"], "^block: there is no 'h.99'; blocks are named"),
    ],
)
def test_bad_input_names_the_option_and_the_value(
    penstock: Callable[..., Result], args: list[str], message: str
) -> None:
    done = penstock("plan", GPT2, *SMALL, *args)

    assert isinstance(done.exception, PenstockError)
    with pytest.raises(PenstockError, match=message):
        raise done.exception


def test_a_range_of_sizes_is_parsed() -> None:
    tier, sizes = parse_vary("dram=16GiB..128GiB")

    assert tier is Tier.DRAM
    assert (sizes[0], sizes[-1]) == (16 * GiB, 128 * GiB)
    assert parse_vary("hbm=1.5GiB..3GiB")[1][0] == int(1.5 * GiB)
    with pytest.raises(PlanError, match="must go from a smaller"):
        parse_vary("dram=8GiB..2GiB")


def test_advice_is_one_line() -> None:
    assert "no change within reach" in advice_text([])
    line = advice_text([Advice(what="+16 GiB DRAM", speedup=2.1, gain="2.10 x")])
    assert line == "What would help most: +16 GiB DRAM: 2.10 x"


def test_advice_names_an_amount_of_memory(penstock: Callable[..., Result]) -> None:
    tight = ["--hbm", "2GiB", "--dram", "1GiB", "--nvme", "/mnt/nvme:4GiB"]
    done = penstock("plan", GPT2, *SMALL, *tight)

    assert "+8 GiB HBM" in done.output
