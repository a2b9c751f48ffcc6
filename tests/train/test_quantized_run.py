"""`penstock train --lora --quantize`: files, a resume under other budgets, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.train.runs import RESIDENT, Runs, run_command
from tests.train.test_lora import load, tensors

ADAPTER = ("--lora", "r=4,alpha=8")
STEPS = ("--steps", "4", "--save-every", "2")


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an undisturbed run of four steps."""
    out = tmp_path_factory.mktemp("quantized") / "out"
    torch.set_num_threads(1)
    result = runs.run(out, *RESIDENT, *STEPS, *ADAPTER, "--quantize", "nf4")
    assert result.code == 0, result.errors
    assert result.losses[4] < result.losses[1]
    return out


def test_the_output_is_an_adapter_that_names_its_base_model(whole: Path, runs: Runs) -> None:
    base = json.loads((whole / "base_model.json").read_text())
    config = json.loads((whole / "adapter_config.json").read_text())
    assert base["quantize"] == "nf4"
    assert config["base_model_name_or_path"] == base["path"] == str(runs.model.resolve())
    assert "| quantize | nf4 |" in (whole / "README.md").read_text()


def test_a_resume_under_other_budgets_is_bit_identical(
    whole: Path, runs: Runs, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoint-000004")
    small = ("--hbm", "900KiB", "--dram", "100KiB", "--nvme", f"{runs.disk}:64MiB")
    resumed = runs.run(out, "--resume", *small)
    assert resumed.code == 0, resumed.errors
    assert [event for event in resumed.of("step") if event["step"] > 2]
    expected, found = tensors(whole), tensors(out)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_resume_with_another_quantization_is_refused(
    whole: Path, runs: Runs, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    result = runs.run(out, "--resume", "--steps", "6", "--quantize", "int4")
    assert result.code == 1
    assert "was nf4 in the checkpoint and is int4 now; resume with nf4" in result.errors


def test_merge_adds_the_adapter_to_the_original_weights(
    whole: Path, runs: Runs, tmp_path: Path
) -> None:
    result = run_command(["merge", str(whole), "--into", str(tmp_path / "merged"), "--json"])
    assert result.code == 0, result.errors
    expected = load(whole, runs.model).merge_and_unload().state_dict()
    found = safetensors.torch.load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("flags", [(), ("--freeze", "model.layers.0.*")], ids=str)
def test_weights_that_are_trained_are_not_quantized(
    runs: Runs, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    result = runs.run(tmp_path / "out", *RESIDENT, *STEPS, *flags, "--quantize", "nf4")
    assert result.code != 0
    assert "weights that are trained cannot be quantized" in result.errors
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.safetensors"))


def test_random_base_weights_are_those_of_a_run_without_an_adapter(runs: Runs) -> None:
    import penstock
    from penstock.model.quantize import quantized_values

    name = "model.layers.1.mlp.up_proj"
    found = []
    for options in ({}, {"lora": "r=2"}, {"lora": "r=2", "quantize": "int4"}):
        with penstock.prepare(
            runs.model, init="random", seed=5, context=32, batch=2, dtype="fp32", device="cpu",
            self_check=False, budget={"hbm": "64MiB", "dram": "64MiB"}, **options,
        ) as engine:  # fmt: skip
            middle = ".base_layer" if options else ""
            found.append(engine.state[f"{name}{middle}.weight"]["weight"].clone())
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], quantized_values(found[0], "int4"))
