"""`penstock train --lora`: adapters are drawn, saved, resumed, merged and checked as PEFT's."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers

from penstock.checkpoint.adapter_files import BASE, BaseModel
from penstock.engine.engine import Engine
from penstock.settings import read_yaml
from tests.train.runs import (
    RESIDENT,
    RunResult,
    Runs,
    make_model,
    run_command,
    wait_for_exit,
)

LORA = "r=4,alpha=8,dropout=0.1,save=lm_head"
STEPS = ("--steps", "6", "--save-every", "2")
Whole = tuple[Path, RunResult]


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An undisturbed run of six steps."""
    out = tmp_path_factory.mktemp("lora") / "out"
    torch.set_num_threads(1)
    result = runs.run(out, *RESIDENT, *STEPS, "--lora", LORA)
    assert result.code == 0, result.errors
    return out, result


def load(out: Path, model: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    return peft.PeftModel.from_pretrained(base, out)


def tensors(folder: Path, name: str = "adapter_model") -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"{name}.safetensors")


def test_the_output_is_an_adapter_of_peft(whole: Whole, runs: Runs) -> None:
    out, result = whole
    assert result.losses[6] < result.losses[1]
    names = {path.name for path in out.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", BASE, "tokenizer.json"} <= names
    assert not names & {"config.json", "model.safetensors"}, "it is not a whole model"
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(runs.model.resolve())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.1)
    assert config["target_modules"] == sorted(config["target_modules"])  # equal runs, equal bytes
    assert read_yaml(out / "run.yaml")["lora"] == LORA.split(",")
    model = load(out, runs.model)
    found = dict(model.named_parameters())
    for name, tensor in tensors(out).items():
        kind = ".modules_to_save.default." if "lm_head" in name else ".default."
        own = f"{name.removesuffix('.weight')}{kind.rstrip('.')}.weight"
        assert torch.equal(found[own].float(), tensor.to(found[own].dtype).float())


def test_the_initial_adapter_is_the_one_that_peft_draws(runs: Runs, tmp_path: Path) -> None:
    import penstock

    with penstock.prepare(
        runs.model, lora=LORA, context=32, batch=2, seed=11, dtype="fp32", device="cpu",
        self_check=False,
    ) as engine:  # fmt: skip
        engine.write(tmp_path / "first", optimizer=False)
    base = transformers.AutoModelForCausalLM.from_pretrained(runs.model, dtype=torch.float32)
    torch.manual_seed(11)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", modules_to_save=["lm_head"]
    )
    expected = peft.get_peft_model(base, config)
    expected.save_pretrained(tmp_path / "theirs")
    ours, theirs = tensors(tmp_path / "first"), tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def crash(runs: Runs, out: Path) -> None:
    """End a run with an exception in its fifth step."""

    def step(self: Engine, batch: Any) -> Any:
        if self.batches == 4:
            raise RuntimeError("the end of this run")
        return plain(self, batch)

    plain = Engine.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", step)
        ended = runs.run(out, *RESIDENT, *STEPS, "--lora", LORA)
    assert "the end of this run" in ended.errors


def kill(runs: Runs, out: Path) -> None:
    """Kill the process of a run after its fifth step."""
    child = runs.start(out, *RESIDENT, *STEPS, "--lora", LORA)
    assert child.stdout is not None
    for line in child.stdout:
        event = json.loads(line)
        if event["event"] == "step" and event["step"] >= 5:
            break
    child.send_signal(signal.SIGKILL)
    wait_for_exit(child)


@pytest.mark.parametrize("end", [crash, pytest.param(kill, marks=pytest.mark.long)])
def test_a_run_that_ended_early_resumes_bit_for_bit_under_other_budgets(
    end: Callable[[Runs, Path], None], whole: Whole, runs: Runs, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    end(runs, out)
    assert not (out / "adapter_model.safetensors").exists()
    small = ("--hbm", "900KiB", "--dram", "200KiB", "--nvme", f"{runs.disk}:64MiB")
    resumed = runs.run(out, "--resume", *small)
    assert resumed.code == 0, resumed.errors
    expected, found = tensors(whole[0]), tensors(out)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    last = "checkpoint-000006"
    states = (tensors(each / last, "optimizer") for each in (whole[0], out))
    first, second = states
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_resume_with_other_base_weights_is_refused(
    whole: Whole, runs: Runs, tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    shutil.copytree(whole[0], out)
    shutil.copytree(runs.model, other)
    weights = tensors(other, "model")
    weights["model.layers.2.mlp.up_proj.weight"] += 0.01
    safetensors.torch.save_file(weights, other / "model.safetensors", {"format": "pt"})
    command = runs.flags(out, "--resume", "--steps", "8")
    command[1] = str(other)
    result = run_command(command)
    assert result.code == 1
    assert "trained with the weights of" in result.errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merge_gives_what_peft_merges(
    whole: Whole, runs: Runs, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = runs.model
    if dtype == torch.float32:
        model = tmp_path / "model"
        wide = transformers.AutoModelForCausalLM.from_pretrained(runs.model, dtype=dtype)
        wide.save_pretrained(model)
    result = run_command(
        ["merge", str(whole[0]), "--into", str(tmp_path / "merged"), "--base", str(model), "--json"]
    )
    assert result.code == 0, result.errors
    expected = load(whole[0], model, dtype).merge_and_unload().state_dict()
    found = tensors(tmp_path / "merged", "model")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name].to(dtype)), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert loaded.dtype == dtype
    assert run_command(["check", str(tmp_path / "merged")]).code == 0
    again = ["merge", str(whole[0]), "--into", str(tmp_path / "merged")]
    assert "not empty" in run_command(again).errors


def test_a_tied_embedding_and_the_head_have_one_trained_copy(runs: Runs, tmp_path: Path) -> None:
    model, out, merged = (tmp_path / name for name in ("model", "out", "merged"))
    make_model(model, tie_word_embeddings=True)
    command = runs.flags(out, *RESIDENT, "--steps", "2", "--lora", "r=2,save=embed_tokens")
    command[1] = str(model)
    assert run_command(command).code == 0
    assert run_command(["merge", str(out), "--into", str(merged), "--json"]).code == 0
    expected = load(out, model).merge_and_unload()
    found = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.bfloat16)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    theirs, ours = expected.state_dict(), found.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    before = tensors(model, "model")["model.embed_tokens.weight"]
    assert not torch.equal(ours["model.embed_tokens.weight"], before)


def test_generate_uses_the_adapter(whole: Whole, runs: Runs, tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    assert run_command(["merge", str(whole[0]), "--into", str(merged), "--json"]).code == 0
    ask = ("--prompt", "the capital of", "--max-new", "8", "--json")
    answers = [
        run_command(["generate", str(folder), *ask, *more])
        for folder in (merged, whole[0], whole[0] / "checkpoint-000006")
        for more in ((), ("--hbm", "300KiB"))
    ]
    assert {answer.code for answer in answers} == {0}, answers[-1].errors
    texts = {json.dumps(json.loads(answer.output.splitlines()[0])["text"]) for answer in answers}
    assert len(texts) == 1


def test_check_reads_adapters(whole: Whole, tmp_path: Path) -> None:
    result = run_command(["check", str(whole[0]), "--json"])
    report = json.loads(result.output)
    assert result.code == 0, report
    assert len(report["parts"]) == 3
    assert not report["notes"]
    out = tmp_path / "out"
    shutil.copytree(whole[0], out)
    path = out / "checkpoint-000006" / "adapter_model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.unlink()
    path.write_bytes(raw)
    damaged = run_command(["check", str(out), "--json"])
    assert damaged.code == 1
    assert "adapter_model.safetensors" in json.loads(damaged.output)["problems"][0]


def test_a_merge_with_other_weights_is_refused(whole: Whole, runs: Runs, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(runs.model, other)
    weights = tensors(other, "model")
    weights["model.norm.weight"] += 0.5
    safetensors.torch.save_file(weights, other / "model.safetensors", {"format": "pt"})
    into = tmp_path / "merged"
    result = run_command(["merge", str(whole[0]), "--into", str(into), "--base", str(other)])
    assert result.code == 1
    assert "trained with the weights of" in result.errors
    assert not into.exists()
    assert BaseModel.load(whole[0]).path == str(runs.model.resolve())


def test_a_base_model_that_was_moved_is_named_with_a_remedy(runs: Runs, tmp_path: Path) -> None:
    model, moved, out = tmp_path / "model", tmp_path / "moved", tmp_path / "out"
    shutil.copytree(runs.model, model)
    flags = runs.flags(out, *RESIDENT, "--steps", "1", "--lora", LORA)
    flags[1] = str(model)
    assert run_command(flags).code == 0
    model.rename(moved)
    resume = ["--out", str(out), "--resume", "--steps", "2"]
    remedies = {
        ("train", *resume): f"penstock train MODEL --out {out} --resume",
        ("generate", str(out), "--prompt", "a"): f"penstock merge {out} --base MODEL --into",
        ("merge", str(out), "--into", str(tmp_path / "into")): f"{out} --base MODEL --into",
        ("plan", str(out)): f"{out} is an adapter, and no model; merge it",
    }

    for arguments, remedy in remedies.items():
        ended = run_command(list(arguments))
        assert ended.code == 1, ended.errors
        assert remedy in " ".join(ended.errors.split())
    assert run_command(["train", str(moved), *resume]).code == 0


def test_a_merge_with_a_damaged_tokenizer_is_refused(whole: Whole, tmp_path: Path) -> None:
    """The tokenizer would be copied next to the merged weights, which a check calls intact."""
    adapter, into = tmp_path / "adapter", tmp_path / "merged"
    shutil.copytree(whole[0] / "checkpoint-000006", adapter)
    raw = bytearray((adapter / "tokenizer.json").read_bytes())
    raw[200] ^= 1
    (adapter / "tokenizer.json").write_bytes(raw)

    result = run_command(["merge", str(adapter), "--into", str(into)])

    assert result.code == 1
    assert "tokenizer.json: the disk returned different bytes" in result.errors
    assert not into.exists()


HEAD = "base_model.model.lm_head.weight"
EMBEDDING = "base_model.model.model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"modules_to_save": None}, [f"does not describe these tensors: {HEAD}", "to_save: null"]),
        (
            {"modules_to_save": ["embed_tokens"]},
            [f"that the file lacks: {EMBEDDING}", f"tensors: {HEAD}", 'to_save: ["embed_tokens"]'],
        ),
        (
            {"target_modules": ["q_proj", "v_proj"]},
            ["self_attn.k_proj.lora_A.weight", "more (target_modules: [", '"q_proj"'],
        ),
        ({"use_dora": True}, ["that the file lacks", "(use_dora: true)"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_describes_other_tensors_than_the_adapter_has_is_refused(
    whole: Whole, runs: Runs, tmp_path: Path, changes: dict[str, Any], parts: list[str]
) -> None:
    """Tensors that the config does not describe would be ignored, and the weights be wrong."""
    adapter = tmp_path / "adapter"
    names = ("adapter_config.json", "adapter_model.safetensors")
    adapter.mkdir()
    for name in names:  # as an adapter from elsewhere, without a record of its base model
        shutil.copy(whole[0] / name, adapter / name)
    config = json.loads((adapter / names[0]).read_text())
    (adapter / names[0]).write_text(json.dumps(config | changes))
    merge = ["merge", str(adapter), "--into", str(tmp_path / "merged")]
    for command in (merge, ["generate", str(adapter), "--prompt", "a", "--max-new", "2"]):
        result = run_command(command)
        assert result.code == 1
        assert all(part in result.errors for part in (*names, *parts)), result.errors
        assert "trained with the weights" not in result.errors
    assert not (tmp_path / "merged").exists()
    checked = run_command(["check", str(adapter), "--json"])
    assert checked.code == 1
    assert parts[0] in json.loads(checked.output)["problems"][0]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_embedding_that_peft_saved_with_its_adapter_may_be_that_of_the_base_model(
    runs: Runs, tmp_path: Path
) -> None:
    """PEFT saves the frozen embedding too if it has an adapter. A changed one is refused."""
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    base = transformers.AutoModelForCausalLM.from_pretrained(runs.model, dtype=torch.bfloat16)
    config = peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"])
    model = peft.get_peft_model(base, config)
    torch.nn.init.normal_(model.base_model.model.model.embed_tokens.lora_embedding_A.default)
    model.save_pretrained(adapter)
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    saved = tensors(adapter)
    assert name in saved
    merge = ["merge", str(adapter), "--into", str(merged), "--base", str(runs.model), "--json"]
    assert run_command(merge).code == 0
    expected = model.merge_and_unload().state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in tensors(merged, "model").items())
    saved[name][3, 2] += 1
    safetensors.torch.save_file(saved, adapter / "adapter_model.safetensors", {"format": "pt"})
    shutil.rmtree(merged)
    assert f"does not describe these tensors: {name}" in run_command(merge).errors


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rank=4", "no option 'rank'"),
        ("r=0", "must have a rank r from 1"),
        ("r=4,r=8", "the option r twice"),
        ("alpha=x", "must have a number for alpha"),
        ("dropout=1", "below 1"),
        ("targets=", "needs a value for targets"),
        ("bias=some", "must have one of none, all, lora_only"),
        ("layers=0-2", "names of modules in targets="),
    ],
)
def test_wrong_options_are_usage_errors(text: str, problem: str, runs: Runs) -> None:
    result = runs.run(runs.folder / "never", "--lora", text)
    assert result.code == 2
    assert problem in " ".join(result.errors.replace("│", " ").split())


def test_a_target_that_no_module_has_is_an_error(runs: Runs, tmp_path: Path) -> None:
    result = runs.run(tmp_path / "out", "--lora", "targets=query")
    assert result.code == 1
    assert "cannot be used with this model" in result.errors
    assert "query" in result.errors


def test_without_peft_the_message_names_the_package(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    result = runs.run(tmp_path / "out", "--lora", LORA)
    assert result.code == 1
    assert "pip install peft" in result.errors
