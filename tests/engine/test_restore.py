"""A model that was passed to `prepare` has the trained weights after `close`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from penstock.engine import initial_weights, restore
from penstock.engine.engine import Engine
from penstock.engine.prepare import prepare
from penstock.engine.restore import ModelNotRestoredWarning
from penstock.engine.transport import SingleRank
from penstock.errors import EngineError, ModelRestoreError, UnsupportedModelError
from penstock.machine.limits import HostMemory
from tests.support.engines import plain_model, tiny_config

SMALL: dict[str, Any] = {
    "context": 32, "batch": 2, "device": "cpu", "budget": {"hbm": "64MiB", "dram": "64MiB"},
}  # fmt: skip

IDS = torch.randint(3, 260, (2, 32), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def train(engine: Engine, steps: int = 2) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        engine.step(BATCH)
    return {name: engine.state[name]["master"] for name in engine.state}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", [False, True])
def test_a_closed_engine_leaves_its_model_with_the_trained_weights(
    dtype: torch.dtype, tied: bool
) -> None:
    model = plain_model(tiny_config("llama", tie_word_embeddings=tied), dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules, config = list(model.modules()), model.config.to_dict()

    with prepare(model, lr=1e-2, **SMALL) as engine:
        train(engine)
        role = "weight" if dtype == torch.bfloat16 else "master"
        trained = {name: engine.state[name][role] for name in engine.state}
        loss = engine.evaluate([BATCH]).loss

    assert list(model.modules()) == modules
    assert model.config.to_dict() == config
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, trained[name]), name
        assert tensor.requires_grad
        assert not torch.equal(tensor, before[name]), name
    assert float(model.bfloat16()(**BATCH).loss.detach()) == pytest.approx(loss, abs=2e-2)
    assert model.generate(IDS[:1, :4], max_new_tokens=2, do_sample=False).shape == (1, 6)


def test_the_last_update_is_applied_before_the_model_gets_its_weights() -> None:
    one, other = (plain_model(tiny_config("llama")) for _ in range(2))
    engine = prepare(one, lr=1e-2, **SMALL)
    train(engine, 1)
    engine.close()
    with prepare(other, lr=1e-2, **SMALL) as engine:
        engine.step(BATCH)  # decided, but not carried out when the engine is closed

    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, one.state_dict()[name]), name


def test_a_restored_model_is_saved_and_loaded_by_transformers(tmp_path: Path) -> None:
    model = plain_model(tiny_config("llama"))
    with prepare(model, lr=1e-2, **SMALL) as engine:
        train(engine)
    model.save_pretrained(tmp_path)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda model: model(IDS), r"engine\.evaluate"),
        (lambda model: model.model(IDS), r"engine\.evaluate"),
        (lambda model: model.generate(IDS[:1, :4]), r"engine\.restore\(model\)"),
        (lambda model: model.save_pretrained("never"), r"engine\.write\(folder\)"),
        (lambda model: model.state_dict(), r"engine\.restore\(model\)"),
    ],
)
def test_while_the_engine_is_open_a_call_of_the_model_says_what_to_call(
    call: Any, advice: str
) -> None:
    model = plain_model(tiny_config("llama"))
    with prepare(model, **SMALL), pytest.raises(EngineError, match=advice):
        call(model)
    call_works = model(IDS).logits
    assert call_works.shape == (2, 32, 260)


def test_restore_gives_a_copy_while_training_continues() -> None:
    model = plain_model(tiny_config("llama"))
    with prepare(model, lr=1e-2, **SMALL) as engine:
        train(engine, 1)
        engine.restore(model)
        first = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        held = model.lm_head.weight
        train(engine, 1)
        assert torch.equal(model.lm_head.weight, first["lm_head.weight"])
        last = {name: engine.state[name]["weight"] for name in engine.state}
    assert model.lm_head.weight is held
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, last[name]), name


def test_restore_loads_another_model_with_the_same_tensors() -> None:
    with prepare(plain_model(tiny_config("llama")), lr=1e-2, **SMALL) as engine:
        masters = train(engine)
        other = plain_model(tiny_config("llama"), torch.float32, seed=9)
        engine.restore(other)
        assert torch.equal(other.lm_head.weight, masters["lm_head.weight"])
        with pytest.raises(EngineError, match="only in the engine"):
            engine.restore(plain_model(tiny_config("llama", num_hidden_layers=2)))
        with pytest.raises(EngineError, match="has the shape"):
            engine.restore(plain_model(tiny_config("llama", intermediate_size=48)))


def test_a_model_that_does_not_fit_is_a_shell_that_says_how_to_load_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain_model(tiny_config("llama"))
    engine = prepare(model, lr=1e-2, **SMALL)
    train(engine)
    monkeypatch.setattr(restore, "host_memory", lambda _: HostMemory(1000, 1000, None))
    with pytest.raises(ModelRestoreError, match=r"1000 B are free.*engine\.write\(folder\)"):
        engine.restore(model)
    engine.write(tmp_path / "out")
    with pytest.warns(ModelNotRestoredWarning, match=r"engine\.write\(folder\)"):
        engine.close()
    with pytest.raises(EngineError, match=r"from_pretrained\(folder\)"):
        model(IDS)


def test_a_model_whose_engine_could_not_be_built_works_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    model = plain_model(tiny_config("llama"))
    held, expected = model.lm_head.weight, model(IDS).logits
    monkeypatch.setattr(initial_weights, "set_weights", fail)
    with pytest.raises(OSError, match="no space"):
        prepare(model, **SMALL)
    assert model.lm_head.weight is held
    assert torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_a_bf16_model_that_was_trained_in_another_type_gets_its_weights(
    compute: str, tmp_path: Path
) -> None:
    model = plain_model(tiny_config("llama"))
    with prepare(model, lr=1e-2, dtype=compute, **SMALL) as engine:
        engine.step(BATCH)
        expected = {name: engine.state[name]["master"].bfloat16() for name in engine.state}
        engine.write(tmp_path)
    assert model.dtype == torch.bfloat16
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, expected[name]), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == {"fp16": torch.float16, "fp32": torch.float32}[compute]


def test_frozen_weights_come_back_as_they_were() -> None:
    model = plain_model(tiny_config("llama"), torch.float32)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with prepare(model, lr=1e-2, freeze=("model.embed_tokens.*",), **SMALL) as engine:
        engine.step(BATCH)
        engine.restore(model)
        assert torch.equal(model.model.embed_tokens.weight, before["model.embed_tokens.weight"])
    assert torch.equal(model.model.embed_tokens.weight, before["model.embed_tokens.weight"])
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])


def test_a_model_without_weights_is_refused() -> None:
    model = plain_model(tiny_config("llama"))
    with prepare(model, **SMALL), pytest.raises(UnsupportedModelError, match="close that engine"):
        prepare(model, **SMALL)
    assert model(IDS).logits.shape == (2, 32, 260)


@pytest.mark.parametrize("restored", [True, False])
def test_a_closed_engine_moves_its_model_back_if_it_got_its_weights(
    restored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def load(live: Any, read: Any) -> None:
        if not restored:
            raise OSError("unreadable")

    monkeypatch.setattr(restore, "restore_live", load)
    monkeypatch.setattr(restore, "move_back", lambda live: done.append("move the model"))

    def part(name: str, method: str) -> Any:
        return SimpleNamespace(**{method: lambda: done.append(name)})

    engine: Any = SimpleNamespace(
        _closed=False, plan=SimpleNamespace(seats=()), ranks=SingleRank(),
        live_model=SimpleNamespace(guard=lambda _: done.append("guard"), nbytes=0),
        state=SimpleNamespace(weight=None), _runner=part("runner", "close"),
        files=part("files", "close"), split_model=part("model", "release"),
        _memory=part("memory", "release"),
    )  # fmt: skip
    with contextlib.nullcontext() if restored else pytest.warns(ModelNotRestoredWarning):
        Engine.close(engine)
    Engine.close(engine)

    last = "move the model" if restored else "guard"
    assert done == ["runner", "files", "model", "memory", last]


def test_weights_that_do_not_fit_next_to_the_engine_wait_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain_model(tiny_config("llama"), torch.float32)
    engine = prepare(model, lr=1e-2, freeze=("model.embed_tokens.*",), **SMALL)
    engine.step(BATCH)
    trained = engine.state["lm_head.weight"]["master"]
    seen: list[int] = []

    def memory(_: Any) -> HostMemory:
        seen.append(len(list(tmp_path.glob(".penstock-weights-*/*"))))
        free = 1 << 30 if engine._closed else 1000
        return HostMemory(free, free, None)

    monkeypatch.setattr(restore, "host_memory", memory)
    engine.close(spill=tmp_path)
    assert seen == [0, len(list(model.parameters())) - 1]  # the frozen one was kept in memory
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(model.lm_head.weight, trained)
    assert model(IDS).logits.shape == (2, 32, 260)
