"""Options of a run: plan files, settings files, data types, frozen tensors, a directory in use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from penstock.engine import prepare
from penstock.engine.gradients import GradientSums
from penstock.engine.loss import LossScale
from penstock.settings import read_yaml
from penstock.train.errors import OutInUseError
from penstock.train.output_directory import OutputDirectory
from tests.train.conftest import STEPS
from tests.train.runs import RESIDENT, RunResult, Runs, contents, run_command

Whole = tuple[Path, RunResult]


def test_a_plan_file_trains_to_the_same_bits(runs: Runs, whole: Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    inputs = [str(runs.model), "--data", str(runs.data), "--out", str(out)]
    rest = ["--eval-split", "0.2", "--lr", "1e-2", "--steps", str(STEPS), "--json"]
    plan = ["--plan", str(whole[0] / "plan.json"), "--cache", str(runs.folder / "cache")]

    ended = run_command(["train", *inputs, *rest, *plan])

    assert ended.code == 0, ended.errors
    assert contents(out) == contents(whole[0])


def test_a_plan_for_another_batch_is_refused(runs: Runs, whole: Whole, tmp_path: Path) -> None:
    plan = ["--plan", str(whole[0] / "plan.json")]

    ended = runs.run(tmp_path / "out", *plan, "--batch", "8", "--steps", "1")

    assert ended.code == 1
    assert "batch: is 8" in ended.errors
    assert "is for 4" in ended.errors


def test_flags_override_the_settings_file(runs: Runs, tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(yaml.safe_dump({"steps": 9, "lr": "5e-4", "hbm": "64MiB", "dram": "64MiB"}))

    ended = runs.run(tmp_path / "out", "--config", str(config), "--steps", "1")

    assert ended.code == 0, ended.errors
    settings = read_yaml(tmp_path / "out/run.yaml")
    assert (settings["steps"], settings["lr"], settings["hbm"]) == (1, 1e-2, "64MiB")


def test_a_step_that_overflows_changes_nothing_and_is_reported(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = LossScale(value=2.0**60, fixed=False)
    monkeypatch.setattr(LossScale, "of", lambda dtype: scale)

    fp16 = ("--dtype", "fp16", "--no-self-check")  # which would use the same scale
    ended = runs.run(tmp_path / "out", *RESIDENT, *fp16, "--steps", "2")

    assert ended.code == 1
    assert "no step changed a weight: 2 of 2 were skipped" in ended.errors
    assert ended.losses == {}
    assert [event["step"] for event in ended.of("skipped")] == [1, 2]
    assert [event["loss_scale"] for event in ended.of("skipped")] == [2.0**59, 2.0**58]
    assert [event["lr"] for event in ended.of("skipped")] == [5e-3, 5e-3]
    assert not any("grad_norm" in event for event in ended.of("skipped"))
    state = json.loads((tmp_path / "out/checkpoint-000002/training_state.json").read_text())
    assert state["engine"]["steps"] == 0
    assert state["data"]["step"] == 2


def test_fp32_weights_are_trained_saved_and_resumed(runs: Runs, tmp_path: Path) -> None:
    # With a constant rate, a run of two steps is the first half of a run of four.
    fp32 = ("--dtype", "fp32", "--schedule", "constant", "--warmup", "0", "--steps")
    whole = runs.run(tmp_path / "whole", *RESIDENT, *fp32, "4")
    runs.run(tmp_path / "out", *RESIDENT, *fp32, "2")

    resumed = runs.run(tmp_path / "out", *runs.tight(), *fp32, "4", "--resume")

    assert whole.code == resumed.code == 0, whole.errors + resumed.errors
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    saved = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.float32
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize(("first", "then"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_run_is_not_resumed_in_another_data_type(
    first: str, then: str, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    runs.run(out, *RESIDENT, "--dtype", first, "--steps", "1")
    monkeypatch.setattr(prepare, "prepare", None)  # it must be refused before it is called

    ended = runs.run(out, *RESIDENT, "--dtype", then, "--steps", "2", "--resume")

    assert ended.code == 1
    assert f"dtype: was {first} in the checkpoint and is {then} now" in ended.errors


def test_a_run_that_always_overflows_ends_with_an_error(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossScale, "of", lambda dtype: LossScale(value=4.0, fixed=False))
    gather = GradientSums.gather_stats
    monkeypatch.setattr(
        GradientSums, "gather_stats", lambda self: replace(gather(self), first_bad=(0, 0))
    )

    fp16 = ("--dtype", "fp16", "--no-self-check")  # which would overflow as well
    ended = runs.run(tmp_path / "out", *RESIDENT, *fp16, "--steps", "40")

    assert ended.code == 1
    assert "the last 10 steps overflowed fp16 at the lowest loss scale of 1" in ended.errors
    assert "--dtype bf16" in ended.errors
    # Two steps halve the scale to 1, and the tenth one after them is not reported as skipped.
    assert [event["loss_scale"] for event in ended.of("skipped")] == [2.0] + [1.0] * 10


def test_frozen_tensors_stay_and_the_model_config_can_be_overridden(
    runs: Runs, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    more = ("--freeze", "model.embed_tokens.*", "--model-config", "rope_theta=5e4")

    ended = runs.run(out, *RESIDENT, "--steps", "3", *more)

    assert ended.code == 0, ended.errors
    before, after = (load_file(d / "model.safetensors") for d in (runs.model, out))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.embed_tokens.weight" not in changed
    assert "lm_head.weight" in changed
    assert "50000.0" in (out / "config.json").read_text()


def test_only_one_run_at_a_time_uses_a_directory(tmp_path: Path) -> None:
    first = OutputDirectory(tmp_path / "out", resume=False)
    with pytest.raises(OutInUseError, match="another run"):
        OutputDirectory(tmp_path / "out", resume=True)
    first.close()
    OutputDirectory(tmp_path / "out", resume=True).close()

    assert not (tmp_path / "out").exists()


def test_a_run_without_a_self_check_says_so_also_after_a_resume(runs: Runs, tmp_path: Path) -> None:
    def notes(ended: RunResult) -> list[str]:
        assert ended.code == 0, ended.errors
        return [line for line in ended.errors.splitlines() if "not self-checked" in line]

    out, steps = tmp_path / "out", ("--save-every", "1", *RESIDENT)
    assert len(notes(runs.run(out, "--no-self-check", "--steps", "1", *steps))) == 1
    assert read_yaml(out / "run.yaml")["self_check"] is False

    assert len(notes(runs.run(out, "--resume", "--steps", "2", *steps))) == 1
    # A self-check now says nothing about the steps that were made before.
    assert len(notes(runs.run(out, "--resume", "--self-check", "--steps", "3", *steps))) == 1
    assert not notes(runs.run(tmp_path / "checked", "--steps", "1", *steps))


def test_label_smoothing_and_noise_are_part_of_the_run(runs: Runs, tmp_path: Path) -> None:
    plain = runs.run(tmp_path / "plain", *RESIDENT, "--steps", "1")
    options = ("--label-smoothing", "0.3", "--neftune-noise-alpha", "5")
    flags = (*options, "--schedule", "constant", "--warmup", "0", "--steps")
    whole = runs.run(tmp_path / "whole", *RESIDENT, *flags, "2")
    runs.run(tmp_path / "out", *RESIDENT, *flags, "1")

    resumed = runs.run(tmp_path / "out", *runs.tight(), *flags, "2", "--resume")
    off = ("--label-smoothing", "0", "--neftune-noise-alpha", "0")
    other = runs.run(tmp_path / "whole", *RESIDENT, *off, "--resume")

    assert whole.losses[1] != plain.losses[1]
    assert whole.of("eval")[0]["loss"] > plain.of("eval")[0]["loss"]
    assert whole.of("eval")[0]["label_smoothing"] == 0.3
    assert "label_smoothing" not in plain.of("eval")[0]
    assert resumed.losses[2] == whole.losses[2], resumed.errors
    assert "label_smoothing was 0.3 and is 0.0" in other.errors
    assert "neftune_noise_alpha was 5.0 and is 0.0" in other.errors
    card = (tmp_path / "out/README.md").read_text()
    assert "| label smoothing | 0.3 |" in card
    assert "| neftune noise alpha | 5.0 |" in card
    assert "label smoothing" not in (tmp_path / "plain/README.md").read_text()
