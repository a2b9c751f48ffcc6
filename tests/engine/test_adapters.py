"""Models with adapters of PEFT: what is trained, saved, given back and refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch

import penstock
from penstock.checkpoint.adapter_files import BASE, BaseModel
from penstock.checkpoint.errors import AdapterConfigError, BaseModelError
from penstock.errors import EngineError, SelfCheckError, UnsupportedModelError
from tests.equivalence.runs import DISK, DRAM, RESIDENT
from tests.equivalence.test_adapters import OPTIMIZER, assert_close, make_plan, train_plainly
from tests.support import engines
from tests.support.adapters import adapted, lora, trained
from tests.support.samples import sample

IDS = torch.arange(3, 19)[None]


def prepare(model: Any, tmp_path: Path, way: Any = DRAM, **options: Any) -> Any:
    plan, _ = make_plan(model, way, tmp_path, **options.pop("work", {}))
    given = {"optimizer": OPTIMIZER, "device": "cpu", "self_check": False} | options
    return penstock.prepare(model, plan=plan, **given)


def batches(model: Any, count: int) -> list[Any]:
    return engines.batches(count, engines.workload(batch=5), model.config.vocab_size)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_saved_adapter_is_loaded_by_peft(dtype: Any, tmp_path: Path) -> None:
    config = lora(modules_to_save=["lm_head"], lora_dropout=0.1)
    model = adapted(
        "llama", config, dtype=getattr(torch, {"fp32": "float32"}.get(dtype, "bfloat16"))
    )
    base = copy.deepcopy(model).unload()
    with prepare(model, tmp_path, DISK, dtype=dtype, work={"dtype": dtype}) as engine:
        for batch in batches(model, 3):
            engine.step(batch)
        engine.write(tmp_path / "saved", optimizer=False)
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert files == {"adapter_model.safetensors", "adapter_config.json", BASE, "complete.json"}
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "saved")
    with torch.no_grad():
        expected, found = (each.eval()(IDS).logits for each in (model, loaded))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        safetensors.torch.load_file(tmp_path / folder / "adapter_model.safetensors")
        for folder in ("saved", "theirs")
    )
    assert ours.keys() == theirs.keys()
    # PEFT saves a trained copy of a module in 16 bits if the model has 16 bits.
    assert all(torch.equal(ours[name].to(theirs[name].dtype), theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "dtype", ["bf16", *(pytest.param(dtype, marks=pytest.mark.long) for dtype in ("fp32", "fp16"))]
)
def test_a_checkpoint_continues_bit_for_bit_under_another_plan(dtype: Any, tmp_path: Path) -> None:
    models = [adapted("qwen3", lora(lora_dropout=0.1, modules_to_save=["lm_head"])) for _ in "ab"]
    work = {"work": {"dtype": dtype}, "dtype": dtype}
    steps = batches(models[0], 6)
    with prepare(models[0], tmp_path, RESIDENT, **work) as engine:
        losses = [float(engine.step(batch)) for batch in steps[:3]]
        engine.write(tmp_path / "saved")
        losses += [float(engine.step(batch)) for batch in steps[3:]]
    with prepare(models[1], tmp_path, DISK, **work) as engine:
        engine.step(steps[5])  # what it had before does not matter
        engine.read(tmp_path / "saved")
        assert [float(engine.step(batch)) for batch in steps[3:]] == losses[3:]
    first, second = map(trained, models)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_has_no_frozen_weights(tmp_path: Path) -> None:
    model = adapted("llama")
    number = sum(tensor.numel() for tensor in trained(model).values())
    with prepare(model, tmp_path) as engine:
        engine.step(batches(model, 1)[0])
        engine.write(tmp_path / "saved")
    for name, each in (("adapter_model", 4), ("optimizer", 8)):
        path = tmp_path / "saved" / f"{name}.safetensors"
        tensors = safetensors.torch.load_file(path)
        assert sum(t.numel() * t.element_size() for t in tensors.values()) == each * number


def test_a_checkpoint_of_other_frozen_weights_is_refused(tmp_path: Path) -> None:
    model, other = adapted("llama"), adapted("llama")
    with torch.no_grad():
        other.get_base_model().model.layers[1].mlp.down_proj.base_layer.weight.mul_(1.001)
    with prepare(model, tmp_path) as engine:
        engine.step(batches(model, 1)[0])
        engine.write(tmp_path / "saved")
    with (
        prepare(other, tmp_path) as engine,
        pytest.raises(BaseModelError, match="differ from them"),
    ):
        engine.read(tmp_path / "saved")


@pytest.mark.parametrize(
    ("saved", "read", "parts"),
    [
        (["lm_head"], None, "does not describe these tensors: base_model.model.lm_head.weight"),
        (None, ["lm_head"], "describes tensors that the file lacks: base_model.model.lm_head"),
    ],
)
def test_a_checkpoint_of_an_adapter_with_other_modules_is_refused_by_name(
    saved: list[str] | None, read: list[str] | None, parts: str, tmp_path: Path
) -> None:
    """Other weights are frozen then, so the digests differ; the base model is not to blame."""
    first, second = (adapted("llama", lora(modules_to_save=names)) for names in (saved, read))
    with prepare(first, tmp_path) as engine:
        engine.write(tmp_path / "saved")
    with (
        prepare(second, tmp_path) as engine,
        pytest.raises(AdapterConfigError, match=re.escape(parts)) as caught,
    ):
        engine.files.read(tmp_path / "saved")
    assert f"(modules_to_save: {json.dumps(read)})" in str(caught.value)


def test_the_digest_does_not_depend_on_the_plan(tmp_path: Path) -> None:
    found = set()
    for number, way in enumerate((RESIDENT, DRAM, DISK)):
        model = adapted("qwen3", tie_word_embeddings=True)
        with prepare(model, tmp_path, way) as engine:
            engine.write(tmp_path / str(number), optimizer=False)
        found.add(BaseModel.load(tmp_path / str(number)).digest)
    assert len(found) == 1
    assert len(found.pop()) == 32


def test_a_peft_model_says_what_to_call_while_it_is_trained(tmp_path: Path) -> None:
    model = adapted("llama", lora(modules_to_save=["embed_tokens"]))
    before = {name: p.clone() for name, p in model.named_parameters()}
    with prepare(model, tmp_path) as engine:
        for call in (model, model.generate, model.get_base_model(), model.base_model):
            with pytest.raises(EngineError, match=r"engine\.step"):
                call(input_ids=IDS)
        with pytest.raises(EngineError, match=r"engine\.write"):
            model.save_pretrained(tmp_path / "x")
        engine.step(batches(model, 1)[0])
        engine.restore(model)
        assert bool(model(IDS).logits.isfinite().all())
    after = dict(model.named_parameters())
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == [name for name, p in model.named_parameters() if p.requires_grad]


def test_the_twin_of_a_self_check_has_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong factor of the adapter in the engine's copy alone ends `prepare`."""
    model = adapted("llama")
    with prepare(model, tmp_path, self_check=True) as engine:
        assert engine.self_checked
    from penstock.engine import self_check

    built: list[Any] = []
    original = self_check.build_twin

    def build(*args: Any) -> Any:
        twin = original(*args)
        built.append(twin)
        if args[2] == self_check.DOCUMENTS:
            for module in twin.modules():
                if isinstance(module, peft.tuners.lora.Linear):
                    module.scaling["default"] *= 1.5
        return twin

    monkeypatch.setattr(self_check, "build_twin", build)
    monkeypatch.setattr(self_check, "load_entry", lambda *_: None)
    with pytest.raises(SelfCheckError):
        prepare(model, tmp_path, self_check=True)
    assert any("lora_A" in name for name, _ in built[0].named_parameters())


@pytest.mark.parametrize(
    ("rank", "options"), [(2, {"use_rslora": True}), (4, {"use_rslora": True}), (2, {})]
)
def test_a_self_check_passes_with_adapters_that_are_multiplied_by_a_large_factor(
    rank: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Up to 23 here. What an adapter adds to a twin must not be so much larger than the rest."""
    config = lora(r=rank, lora_alpha=32, target_modules="all-linear", **options)
    with prepare(adapted("llama", config), tmp_path, self_check=True) as engine:
        assert engine.self_checked


def test_a_self_check_passes_with_a_small_adapter_without_clipping(tmp_path: Path) -> None:
    """Rounding moves its second moments by as much as the limit that one sample gives."""
    model = adapted("qwen3", dtype=torch.bfloat16, num_attention_heads=2, num_key_value_heads=1)
    work = {"dtype": "bf16", "clip": None, "batch": 4, "micro_batch": 4}

    with prepare(model, tmp_path, self_check=True, work=work) as engine:
        assert engine.self_checked


OTHERS = {
    "IA3": peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "LoKr": peft.LoKrConfig(r=4, target_modules=["q_proj", "up_proj"], init_weights=False),
}


@pytest.mark.parametrize("name", sample(OTHERS, ("IA3",)))
def test_other_methods_whose_adapters_are_part_of_layers(
    name: str, tmp_path: Path, one_thread: None
) -> None:
    model = adapted("llama", OTHERS[name])
    plain, base = copy.deepcopy(model), copy.deepcopy(model).unload()
    expected = train_plainly(plain)
    with prepare(model, tmp_path, self_check=name == "IA3") as engine:
        losses = [float(engine.step(batch)) for batch in batches(model, len(expected))]
        engine.write(tmp_path / "saved")
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(trained(model), trained(plain))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "saved")
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(IDS).logits, model.eval()(IDS).logits)


REFUSED: dict[str, tuple[Any, str]] = {
    "prompt tuning": (
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "trained tokens"),
    "prefix tuning": (
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "keys and values"),
    "AdaLoRA": (
        peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10), "ranks that change"),
    "VeRA": (peft.VeraConfig(target_modules=["q_proj"], r=4), "share tensors"),
    "rows of the embedding": (
        peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3]), "modules_to_save"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_part_of_layers_is_refused(name: str) -> None:
    config, reason = REFUSED[name]
    model = peft.get_peft_model(engines.plain_model(engines.tiny_config("llama")), config)
    with pytest.raises(UnsupportedModelError, match=reason):
        penstock.prepare(model, context=16, batch=2)
    assert not any(p.is_meta for p in model.parameters())


def test_adapters_that_are_merged_disabled_frozen_or_several_are_refused(tmp_path: Path) -> None:
    model = adapted("llama")
    model.merge_adapter()
    with pytest.raises(UnsupportedModelError, match=r"unmerge_adapter\(\)"):
        penstock.prepare(model)
    model.unmerge_adapter()
    with model.disable_adapter(), pytest.raises(UnsupportedModelError, match="is disabled"):
        penstock.prepare(model)
    model.save_pretrained(tmp_path / "saved")
    model.add_adapter("other", lora(r=2))
    with pytest.raises(UnsupportedModelError, match="2 adapters"):
        penstock.prepare(model)
    base = engines.plain_model(engines.tiny_config("llama"))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "saved")
    with pytest.raises(UnsupportedModelError, match="is_trainable=True"):
        penstock.prepare(loaded)


def test_a_tensor_that_peft_would_not_save_is_refused(tmp_path: Path) -> None:
    model = adapted("llama")
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is trained"):
        prepare(model, tmp_path)
    assert not any(p.is_meta for p in model.parameters())
