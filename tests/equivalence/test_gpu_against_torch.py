"""The paths that only a GPU takes agree with the plain model and torch's own optimizer.

Compiled layers, Penstock's attention kernels and the fused loss each round in other places than
transformers does, so gradients are compared by the size of their difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from penstock.model.meta_model import weight_dtype
from penstock.roles import Dtype
from tests.support import engines
from tests.support.torch_loop import TorchLoop

OPTIMIZER = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
GPU_PATHS = {"compiled": True, "attention": "varlen", "loss_kernel": "fused"}

PATHS = {
    "all": GPU_PATHS,
    "compiled layers": {"compiled": True},
    "attention kernels": {"attention": "varlen"},
    "fused loss": {"loss_kernel": "fused"},
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


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_eager_layers_on_the_cpu_agree_with_the_plain_model(
    dtype: Dtype, one_thread: None, tmp_path: Path
) -> None:
    """The comparison itself, without a GPU. The plain model has another attention than the engine,
    so that there is a difference to tolerate."""
    assert_agrees_with_the_plain_model("llama", dtype, {}, "cpu", tmp_path)


def assert_agrees_with_the_plain_model(
    family: str, dtype: Dtype, numerics: dict[str, Any], device: str, disk: Path
) -> None:
    """Compare loss, gradient norm, and each tensor's gradient, of two steps.

    With a rate of 0 the weights stay the same, and the first moment is the clipped gradient times
    0.1, whichever optimizer computed it.
    """
    # Weights are large enough for attention to matter, and heads as wide as the kernels want them.
    config = engines.tiny_config(family, hidden_size=64, head_dim=16, initializer_range=0.1)
    work = engines.workload(context=32, batch=4, clip=0.5, dtype=dtype, **numerics)
    limits = TOLERANCES[dtype]
    model = engines.inventory(config)
    plan = engines.make_plan_of(model, work, "dddd", disk=disk)
    plain = engines.plain_model(config, weight_dtype(dtype))
    engine = engines.make_engine(config, plan, model, plain, device=device, optimizer=OPTIMIZER)
    plain.set_attn_implementation("eager")
    loop = TorchLoop(plain.to(device), micro_batch=2, clip=0.5, settings=OPTIMIZER)
    with engine:
        for batch in engines.batches(2, work, config.vocab_size):
            loss = float(engine.step(batch))
            expected = loop.step({name: rows.to(device) for name, rows in batch.items()})
            assert loss == pytest.approx(expected, rel=limits.loss)
            assert engine.grad_norm == pytest.approx(loop.grad_norm, rel=limits.norm)
            for name, state in engine.state.items():
                theirs = loop.moments(name)["exp_avg"].cpu()
                difference = torch.linalg.vector_norm(state["exp_avg"] - theirs)
                relative = float(difference / torch.linalg.vector_norm(theirs))
                assert relative < limits.gradient, (name, relative)
