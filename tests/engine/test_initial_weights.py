"""Moments start at zero in every format and tier, also in memory that was used before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.engine import Engine
from penstock.engine.initial_weights import clear_moments, set_weights
from penstock.engine.tensor_access import TensorAccess
from penstock.roles import Role
from tests.support import engines


@pytest.mark.parametrize(
    ("spots", "moments"),
    [("hhhh", "int8"), ("dddd", "bf16"), ("nnnn", "fp32"), ("nnnn", "int8")],
)
def test_cleared_moments_are_zero(
    spots: str, moments: str, tmp_path: Path, one_thread: None
) -> None:
    config = engines.tiny_config("llama")
    model, work = engines.inventory(config), engines.workload(moments=moments)
    plan = engines.make_plan_of(model, work, spots, disk=tmp_path, piece=8192)
    with engines.make_engine(config, plan, model, engines.plain_model(config)) as engine:
        engine.step(engines.batches(1, work, config.vocab_size)[0])
        engine.finish()
        assert not all_zero(engine)
        for block in range(len(model.blocks)):
            clear_moments(engine.access, block)
        assert all_zero(engine)


@pytest.mark.parametrize("spots", ["hhhh", "dddd", "nnnn"])
def test_moments_of_a_new_engine_are_zero_and_written_only_on_the_device(
    spots: str, tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engines.tiny_config("llama")
    model, work = engines.inventory(config), engines.workload(moments="fp32")
    plan = engines.make_plan_of(model, work, spots, disk=tmp_path, piece=8192)
    cleared: list[int] = []
    monkeypatch.setattr(engines, "set_weights", _set_initially)
    zero = torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "zero_", lambda t: [cleared.append(t.nbytes), zero(t)][1])
    plain = engines.plain_model(config)
    with engines.make_engine(config, plan, model, plain) as engine:
        elements = sum(block.flat_elements(True) for block in model.blocks)
        # Two moments of four bytes each; building a model clears a few bytes as well.
        assert (sum(cleared) >= 8 * elements) if spots == "hhhh" else (sum(cleared) < elements)
        assert all_zero(engine)
        if spots == "nnnn":
            written = engine._memory.store.stats.written_nbytes
            assert 2 * elements <= written < 6 * elements  # weights and master weights
        engine.step(engines.batches(1, work, config.vocab_size)[0])
        engine.finish()
        assert not all_zero(engine)
        set_weights(engine.access, model, plain.state_dict())  # the memory is not new any more
        assert all_zero(engine)


def _set_initially(access: TensorAccess, *args: Any) -> None:
    with access.setting_initial_values():
        set_weights(access, *args)


def all_zero(engine: Engine) -> bool:
    access = engine.access
    trained = [t.name for b in engine.inventory.blocks for t in b.tensors if t.trainable]
    bases = (False, True) if access.has_bases else (False,)
    return not any(
        bool(torch.count_nonzero(part))
        for name in trained
        for role in (Role.FIRST, Role.SECOND)
        for with_bases in bases
        for part in access.parts(name, role, bases=with_bases)
    )


def test_random_weights_differ_between_layers_and_are_the_same_in_every_plan(
    tmp_path: Path,
) -> None:
    config = engines.tiny_config("llama", num_hidden_layers=6)
    model, work = engines.inventory(config), engines.workload()
    drawn = []
    for spots in ("dddd", "nnnn"):
        plan = engines.make_plan_of(model, work, spots, disk=tmp_path, piece=8192)
        with engines.make_engine(config, plan, model, None) as engine:
            drawn.append(
                [engine.state[f"model.layers.{i}.mlp.up_proj.weight"]["master"] for i in range(6)]
            )

    for layer, other in zip(*drawn, strict=True):
        assert torch.equal(layer, other)
    for i, layer in enumerate(drawn[0]):
        assert not any(torch.equal(layer, other) for other in drawn[0][:i])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_bf16_weights_become_the_master_weights_of_any_run(dtype: str, tmp_path: Path) -> None:
    config = engines.tiny_config("llama")
    model, work = engines.inventory(config), engines.workload(dtype=dtype)
    plan = engines.make_plan_of(model, work, "dddd", disk=tmp_path, piece=8192)
    source = engines.plain_model(config).bfloat16().state_dict()
    with engines.make_engine(config, plan, model, None) as engine:
        set_weights(engine.access, model, source)
        for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
            assert torch.equal(engine.state[name]["master"], source[name].float())
