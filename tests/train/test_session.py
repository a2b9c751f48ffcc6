"""Runs from end to end: what they print and write, and that a resume is bit-identical."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from penstock.settings import read_yaml
from tests.support.manifests import make_old_manifest, update_manifest
from tests.train.conftest import STEPS
from tests.train.runs import RESIDENT, RunResult, Runs, contents, run_command

Whole = tuple[Path, RunResult]


def test_events_have_the_documented_fields(whole: Whole) -> None:
    out, ended = whole
    assert ended.code == 0, ended.errors
    assert ended.events[0]["event"] == "plan"
    assert set(ended.events[0]["tiers"]) == {"hbm", "dram", "cxl", "nvme"}
    tier = ended.events[0]["tiers"]["dram"]
    assert set(tier) == {"budget", "at_rest", "peak"}
    assert 0 < tier["at_rest"] <= tier["peak"] <= tier["budget"] == 64 << 20

    steps = ended.of("step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    for event in steps:
        assert {"loss", "grad_norm", "lr", "tokens_per_second", "tiers", "host"} <= set(event)
        held = event["tiers"]["dram"]
        assert held["used"] == held["peak"] == held["planned"] == tier["peak"]
        assert 0 < event["tiers"]["hbm"]["used"] <= event["tiers"]["hbm"]["planned"]
        assert held["used"] < event["host"]["used"] <= event["host"]["peak"]
    assert steps[-1]["loss"] < steps[0]["loss"]

    (start_up,) = ended.of("start_up")
    assert set(start_up) == {"event", "seconds", "phases"}
    assert list(start_up["phases"]) == [
        "import", "survey", "data", "plan", "model", "device", "self-check", "rehearsal",
        "host memory", "HBM", "store", "weights", "optimizer states", "pin", "evaluation",
        "first step", "other",
    ]  # fmt: skip
    assert sum(start_up["phases"].values()) == pytest.approx(start_up["seconds"], abs=0.02)
    assert ended.events.index(start_up) == ended.events.index(steps[0]) - 1

    assert [event["step"] for event in ended.of("eval")] == [0, STEPS]
    assert [event["step"] for event in ended.of("save")] == [2, 4, 6]
    done = ended.events[-1]
    assert done["event"] == "done"
    assert done["steps"] == STEPS
    assert done["out"] == str(out)
    assert done["peak_host_bytes"] > done["peak_hbm_bytes"] > 0


def test_transformers_loads_the_trained_model(whole: Whole) -> None:
    out, _ = whole
    newest = max(out.glob("checkpoint-*"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer("the capital of", return_tensors="pt")
    made = []
    for folder in (out, newest):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
        made.append(model.generate(**ids, max_new_tokens=4, do_sample=False))
    assert torch.equal(*made)


def test_the_output_directory_has_metrics_settings_and_two_checkpoints(whole: Whole) -> None:
    out, ended = whole
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if line["event"] == "step"] == list(
        ended.losses.values()
    )
    settings = read_yaml(out / "run.yaml")
    assert (settings["lr"], settings["hbm"], settings["steps"]) == (1e-2, "64MiB", STEPS)
    assert sorted(p.name for p in out.glob("checkpoint-*")) == [
        "checkpoint-000004",
        "checkpoint-000006",
    ]
    assert (out / "checkpoint-000004/optimizer.safetensors").exists()
    assert (out / "checkpoint-000006/optimizer.safetensors").exists()


def test_a_tight_budget_with_a_disk_trains_to_the_same_bits(
    runs: Runs, whole: Whole, tmp_path: Path
) -> None:
    ended = runs.run(tmp_path / "out", *runs.tight(), "--steps", str(STEPS))

    assert ended.code == 0, ended.errors
    assert ended.events[0]["tiers"]["nvme"]["at_rest"] > 0
    assert ended.losses == whole[1].losses
    assert contents(tmp_path / "out") == contents(whole[0])


@pytest.fixture
def stopped(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output directory of a run that was stopped in its third step."""
    out = tmp_path / "stopped"
    stop_in_step(monkeypatch, 3)
    ended = runs.run(out, *RESIDENT, "--steps", str(STEPS))
    monkeypatch.undo()
    assert (ended.code, ended.events[-1]["event"]) == (130, "stopped"), ended.errors
    assert list(ended.losses) == [1, 2, 3]
    return out


def stop_in_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    import signal

    from penstock.engine.engine import Engine

    plain = Engine.step

    def step(self: Engine, batch: Any) -> torch.Tensor:
        if self.batches == number - 1:
            signal.raise_signal(signal.SIGINT)
        return plain(self, batch)

    monkeypatch.setattr(Engine, "step", step)


def test_a_stopped_run_resumes_to_the_bit_with_another_budget(
    runs: Runs, whole: Whole, stopped: Path
) -> None:
    ended = run_command(["train", "--out", str(stopped), "--resume", "--json", *runs.tight()])

    assert ended.code == 0, ended.errors
    assert list(ended.losses) == [4, 5, 6]
    assert ended.losses.items() <= whole[1].losses.items()
    assert contents(stopped) == contents(whole[0])
    assert "no longer" not in ended.errors
    lines = [json.loads(line) for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 2, 3, 4, 5, 6]


def rewrite_as_version_1(out: Path) -> None:
    """Replace the files of a stopped run with those that Penstock 0.1 wrote."""
    values = read_yaml(out / "run.yaml")
    (out / "run.yaml").write_text("# Penstock 0.1.0\n" + yaml.safe_dump(values, sort_keys=False))
    folder = max(out.glob("checkpoint-*"))
    state = json.loads((folder / "training_state.json").read_text())
    engine = state.pop("engine")
    repeated = {"step": engine["steps"], "rng": {"seed": engine["seed"]}}
    old = {**state, **repeated, "version": 1}
    (folder / "training_state.json").write_text(json.dumps(old))
    (folder / "engine.json").write_text(json.dumps(engine))
    make_old_manifest(folder)


def test_a_run_of_version_1_resumes_to_the_bit(whole: Whole, stopped: Path) -> None:
    rewrite_as_version_1(stopped)

    ended = run_command(["train", "--out", str(stopped), "--resume", "--json"])

    assert ended.code == 0, ended.errors
    assert list(ended.losses) == [4, 5, 6]
    assert ended.losses.items() <= whole[1].losses.items()
    assert contents(stopped) == contents(whole[0])
    assert "no longer" not in ended.errors


def rewrite_as_before_head_sums(out: Path) -> None:
    """Replace the files of a stopped run with those of a version without head sums.

    Kernels were not deterministic by default then.
    """
    text = (out / "run.yaml").read_text()
    assert "  deterministic: true\n" in text
    (out / "run.yaml").write_text(
        text.replace("  deterministic: true\n", "  deterministic: false\n")
    )
    folder = max(out.glob("checkpoint-*"))
    state = json.loads((folder / "training_state.json").read_text())
    del state["numerics"]["workload"]["head_sum"]
    state["numerics"]["workload"]["deterministic"] = False
    state["numerics"]["settings"]["deterministic"] = False
    (folder / "training_state.json").write_text(json.dumps(state))
    update_manifest(folder, "training_state.json")


def test_a_run_from_before_head_sums_keeps_its_numerics(stopped: Path) -> None:
    rewrite_as_before_head_sums(stopped)

    ended = run_command(["train", "--out", str(stopped), "--resume", "--json"])

    assert ended.code == 0, ended.errors
    assert "no longer" not in ended.errors
    state = json.loads((max(stopped.glob("checkpoint-*")) / "training_state.json").read_text())
    numerics = state["numerics"]["workload"]
    assert (numerics["head_sum"], numerics["deterministic"]) == ("chunk", False)


def test_a_resume_reports_what_changed(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9")
    more = ("--lr", "2e-2", "--micro-batch", "4", "--steps", "4")

    ended = run_command(["train", "--out", str(stopped), "--resume", "--json", *more])

    assert ended.code == 0, ended.errors
    assert "no longer bit-identical because" in ended.errors
    reported = ("torch was", "and is 9.9", "lr was 0.01 and is 0.02", "micro_batch was 2 and is 4")
    for words in (*reported, "the number of steps was 6 and is 4"):
        assert words in ended.errors


def trust_remote_code(out: Path) -> None:
    """Write into the files of a run that its code is trusted."""
    text = (out / "run.yaml").read_text()
    assert "  trust_remote_code: false\n" in text
    (out / "run.yaml").write_text(
        text.replace("  trust_remote_code: false\n", "  trust_remote_code: true\n")
    )


def test_the_directory_of_a_run_cannot_say_that_its_code_is_trusted(stopped: Path) -> None:
    trust_remote_code(stopped)
    resume = ["train", "--out", str(stopped), "--resume", "--json"]

    for more in ([], ["--config", str(stopped / "run.yaml")]):
        ended = run_command([*resume, *more])
        assert ended.code == 1, ended.errors
        assert "pass --trust-remote-code on the command line again" in ended.errors
        assert str(stopped / "run.yaml") in ended.errors

    ended = run_command([*resume, "--trust-remote-code"])
    assert ended.code == 0, ended.errors
    assert list(ended.losses) == [4, 5, 6]


@pytest.mark.parametrize("trusted", [True, False])
def test_the_users_own_file_decides_whether_code_is_trusted(
    trusted: bool, stopped: Path, tmp_path: Path
) -> None:
    trust_remote_code(stopped)
    own = tmp_path / "own.yaml"
    own.write_text(f"trust_remote_code: {str(trusted).lower()}\n")

    ended = run_command(
        ["train", "--out", str(stopped), "--resume", "--json", "--config", str(own)]
    )

    assert ended.code == 0, ended.errors
    assert read_yaml(stopped / "run.yaml")["trust_remote_code"] is trusted


def test_resuming_a_finished_run_only_publishes_the_model(whole: Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole[0], out)
    (out / "model.safetensors").unlink()

    ended = run_command(["train", "--out", str(out), "--resume", "--json"])

    assert ended.code == 0, ended.errors
    assert ended.losses == {}
    assert ended.events[-1]["event"] == "done"
    assert (out / "model.safetensors").exists()


def test_resume_without_a_checkpoint_starts_from_scratch(runs: Runs, tmp_path: Path) -> None:
    ended = runs.run(tmp_path / "out", *RESIDENT, "--steps", "1", "--resume")

    assert ended.code == 0, ended.errors
    assert "starts from scratch" in ended.errors
    assert list(ended.losses) == [1]


def test_weights_only_checkpoints_cannot_be_resumed(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert runs.run(out, *RESIDENT, "--steps", "2", "--save-weights-only").code == 0
    assert not list(out.glob("checkpoint-*/optimizer*"))

    ended = run_command(["train", "--out", str(out), "--resume", "--json"])

    assert ended.code == 1
    assert "no checkpoint has optimizer state" in ended.errors


def test_random_weights_need_only_a_config(runs: Runs, tmp_path: Path) -> None:
    from tests.train.runs import make_model

    model = make_model(tmp_path / "bare", weights=False)
    flags = runs.flags(tmp_path / "out", *RESIDENT, "--steps", "1", "--init", "random")
    flags[1] = str(model)

    ended = run_command(flags)

    assert ended.code == 0, ended.errors
    assert ended.losses[1] == pytest.approx(6.0, abs=0.5)  # untrained: log(400 tokens)
