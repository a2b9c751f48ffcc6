"""Moments start at zero in every format and tier, also in memory that was used before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.engine.engine import Engine
from penstock.engine.initial_weights import clear_moments, set_weights
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
