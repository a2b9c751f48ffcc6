"""The paths that only a GPU takes agree with the plain model and torch's own optimizer.

Compiled layers, Penstock's attention kernels and the fused loss each round in other places than
transformers does, so gradients are compared by the size of their difference. Rows have several
documents, which the plain model computes one after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from penstock.engine.engine import Engine
from penstock.model.meta_model import weight_dtype
from penstock.roles import Dtype
from tests.support import engines
from tests.support.dropout_seeds import seed_like_the_engine
from tests.support.torch_loop import TorchLoop

OPTIMIZER = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
BOUNDS = (0, 7, 8, 32)
"""Where the documents of a row start, and its length. One has a single token."""

PATHS = {
    "all": {"compiled": True, "attention": "varlen", "loss_kernel": "fused"},
    "compiled layers": {"compiled": True},
    "attention kernels": {"attention": "varlen"},
    "fused loss": {"loss_kernel": "fused"},
    "fused loss, smoothed": {"loss_kernel": "fused", "label_smoothing": 0.1},
}


class Tolerances(NamedTuple):
    """Relative differences of the loss, the gradient norm and each tensor's gradient."""

    loss: float
    norm: float
    gradient: float


TOLERANCES = {"bf16": Tolerances(2e-3, 2e-2, 0.05), "fp32": Tolerances(1e-5, 1e-5, 1e-5)}


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("numerics", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_path_of_the_gpu_agrees_with_the_plain_model(
    dtype: Dtype, family: str, numerics: dict[str, Any], tmp_path: Path
) -> None:
    """In fp32, products in TF32 would differ by more than is tolerated."""
    assert_agrees_with_the_plain_model(family, dtype, numerics, "cuda", tmp_path)


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_eager_layers_on_the_cpu_agree_with_the_plain_model(
    dtype: Dtype, attention: str, one_thread: None, tmp_path: Path
) -> None:
    """The comparison itself, without a GPU. The plain model has another attention than the engine,
    so that there is a difference to tolerate."""
    assert_agrees_with_the_plain_model("llama", dtype, {"attention": attention}, "cpu", tmp_path)


@pytest.mark.gpu
def test_dropout_on_the_gpu_is_that_of_the_plain_model(tmp_path: Path) -> None:
    assert_drops_the_same_elements("cuda", tmp_path)


def test_dropout_on_the_cpu_is_that_of_the_plain_model(one_thread: None, tmp_path: Path) -> None:
    assert_drops_the_same_elements("cpu", tmp_path)


def assert_agrees_with_the_plain_model(
    family: str, dtype: Dtype, numerics: dict[str, Any], device: str, disk: Path
) -> None:
    """Compare two steps of packed rows."""
    # Weights are large enough for attention to matter, and heads as wide as the kernels want them.
    config = engines.tiny_config(family, hidden_size=64, head_dim=16, initializer_range=0.1)
    numerics = {"dtype": dtype, **numerics}
    engine, plain = _engine_and_plain_model(config, numerics, device, disk)
    smoothing = engine.workload.numerics.label_smoothing
    loop = TorchLoop(plain, clip=0.5, settings=OPTIMIZER, label_smoothing=smoothing)
    row = torch.cat([torch.arange(high - low) for low, high in itertools.pairwise(BOUNDS)])
    with engine:
        for batch in engines.batches(2, engine.workload, config.vocab_size):
            positions = row.expand_as(batch["input_ids"]).clone()
            loss = float(engine.step(batch | {"position_ids": positions}))
            there = {name: tensor.to(device) for name, tensor in batch.items()}
            expected = loop.step_parts(
                {name: tensor[:, low:high] for name, tensor in there.items()}
                for low, high in itertools.pairwise(BOUNDS)
                if high - low > 1  # a single token predicts nothing
            )
            assert_same_gradients(engine, loss, loop, expected)


def assert_drops_the_same_elements(device: str, disk: Path) -> None:
    """Compare two steps of GPT-2, which drops elements of the embedding and of every residual.

    Attention has no dropout here: its kernels draw random numbers in an order of their own.
    """
    rates = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "initializer_range": 0.1}
    config = engines.tiny_config("gpt2", n_embd=64, **rates)
    engine, plain = _engine_and_plain_model(config, {}, device, disk, seed=7)
    loop = TorchLoop(
        plain.train(), micro_batch=2, clip=0.5, settings=OPTIMIZER,
        before_micro_batch=seed_like_the_engine(plain, 7),
    )  # fmt: skip
    with engine:
        for batch in engines.batches(2, engine.workload, config.vocab_size):
            loss = float(engine.step(batch))
            expected = loop.step({name: tensor.to(device) for name, tensor in batch.items()})
            assert_same_gradients(engine, loss, loop, expected)
        assert engine.evaluate([batch]).loss != pytest.approx(expected, rel=2e-3)


def assert_same_gradients(engine: Engine, loss: float, loop: TorchLoop, expected: float) -> None:
    """Compare loss, gradient norm, and each tensor's gradient, of a step.

    With a rate of 0 the weights stay the same, and the first moment is a sum of clipped gradients,
    whichever optimizer computed it.
    """
    limits = TOLERANCES[engine.workload.dtype]
    assert loss == pytest.approx(expected, rel=limits.loss)
    assert engine.grad_norm == pytest.approx(loop.grad_norm, rel=limits.norm)
    for name, state in engine.state.items():
        theirs = loop.moments(name)["exp_avg"].cpu()
        difference = torch.linalg.vector_norm(state["exp_avg"] - theirs)
        relative = float(difference / torch.linalg.vector_norm(theirs))
        assert relative < limits.gradient, (name, relative)


def _engine_and_plain_model(
    config: Any, changes: Mapping[str, Any], device: str, disk: Path, **settings: Any
) -> tuple[Engine, Any]:
    work = engines.workload(context=32, batch=4, clip=0.5, **changes)
    model = engines.inventory(config)
    plan = engines.make_plan_of(model, work, "dddd", disk=disk)
    plain = engines.plain_model(config, weight_dtype(work.dtype))
    settings = {"device": device, "optimizer": OPTIMIZER, **settings}
    engine = engines.make_engine(config, plan, model, plain, **settings)
    plain.set_attn_implementation("eager")
    return engine, plain.to(device)
