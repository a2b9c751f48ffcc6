"""Every step agrees with torch's own AdamW and clipping, which share no code with Penstock.

Two runs of many steps cannot be compared this way: where a gradient is nearly zero, AdamW divides
it by its own size, and the last bit of a sum decides the sign of an update. So each step starts
from the engine's weights, master weights and moments, and the results of that step are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from penstock.engine.engine import Engine
from penstock.optim.rules import draw_key
from tests.equivalence.runs import DISK, OPTIMIZER, WAYS, Setup, Way, warm_up
from tests.support.dropout_seeds import seed_like_the_engine
from tests.support.samples import sample
from tests.support.torch_loop import TorchLoop

STEPS = 6
EPSILON = 2.0**-23
"""The distance from 1 to the next fp32 number."""

CASES: dict[str, tuple[str, dict[str, Any], Way]] = {
    "llama": ("llama", {}, WAYS[3]),
    "qwen3": ("qwen3", {}, DISK),
    "gemma3": ("gemma3", {}, WAYS[8]),
    "fp16": ("qwen3", {"dtype": "fp16"}, DISK),
    "fp32": ("llama", {"dtype": "fp32"}, WAYS[3]),
    "fp32, int8 moments": ("gemma3", {"dtype": "fp32", "moments": "int8"}, DISK),
    "not clipped": ("llama", {"clip": None}, DISK),
    "accumulated": ("llama", {"accumulate": True}, WAYS[3]),
    "bf16 moments": ("llama", {"moments": "bf16"}, DISK),
    "int8 moments": ("llama", {"moments": "int8"}, DISK),
    "label smoothing": ("llama", {"label_smoothing": 0.1}, WAYS[3]),
    "label smoothing, capped logits": ("gemma2", {"label_smoothing": 0.3}, DISK),
    "label smoothing, fp16": ("qwen3", {"label_smoothing": 0.1, "dtype": "fp16"}, DISK),
    "label smoothing, fp32": ("llama", {"label_smoothing": 0.1, "dtype": "fp32"}, DISK),
}
SCALE = 1024.0
"""Loss scale of fp16."""


SAMPLE = (
    *("llama", "gemma3", "fp16", "fp32", "not clipped", "accumulated", "int8 moments"),
    "label smoothing, capped logits",
)
"""Cases that are not only part of `make test-long`: each way to compute an update once."""


@pytest.mark.parametrize("case", sample(CASES, SAMPLE))
def test_every_step_agrees_with_torchs_adamw_and_clipping(case: str, tmp_path: Path) -> None:
    family, work, way = CASES[case]
    setup = Setup.of(family, **work)
    with setup.engine(way, tmp_path) as engine:
        assert_agrees_with_torch(setup, engine)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_steps_in_fp32_agree_with_torch_without_starting_over(family: str, tmp_path: Path) -> None:
    """In fp32, two runs of several steps stay close, unlike in 16 bits.

    A large epsilon keeps AdamW from dividing gradients that are nearly zero by their own size.
    """
    setup = Setup.of(family, freeze=(), dtype="fp32")
    settings = OPTIMIZER | {"lr": 1e-3, "eps": 1e-4}
    loop = TorchLoop(
        setup.source, micro_batch=setup.work.numerics.micro_batch, clip=setup.work.clip,
        settings=settings,
    )  # fmt: skip
    with setup.engine(WAYS[3], tmp_path, optimizer=settings) as engine:
        for batch in setup.batches(STEPS):
            loss = float(engine.step(batch))
            assert loss == pytest.approx(loop.step(batch), rel=1e-5)
            assert engine.grad_norm == pytest.approx(loop.grad_norm, rel=1e-5)
        for name, master in loop.masters.items():
            weight, expected = engine.state[name]["weight"], master.detach()
            size = float(expected.abs().max())
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-5 * size)


def test_dropout_is_that_of_torch_with_the_same_seeds(tmp_path: Path) -> None:
    """GPT-2 drops elements of the embedding, of attention and of every residual.

    The engine seeds torch's generator before each block of each micro-batch.
    """
    rates = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    setup = Setup.of("gpt2", freeze=(), config=rates)
    before_micro_batch = seed_like_the_engine(setup.source, 7)
    setup.source.train()

    with setup.engine(WAYS[3], tmp_path, seed=7) as engine:
        assert_agrees_with_torch(
            setup,
            engine,
            before_micro_batch=before_micro_batch,
        )
        batch = setup.batches(1)[0]
        dropped, whole = float(engine.forward_backward(batch)), engine.evaluate([batch]).loss
    assert dropped != pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_noise_on_embeddings_is_that_of_transformers_with_the_same_seeds(
    family: str, tmp_path: Path
) -> None:
    from transformers.integrations.neftune import activate_neftune

    setup = Setup.of(family, freeze=(), dtype="fp32", neftune_noise_alpha=5.0)
    activate_neftune(setup.source, 5.0)
    setup.source.train()

    def seed_noise(step: int, micro: int) -> None:
        torch.manual_seed(draw_key(7, step, (1 << 63) + micro) & ((1 << 63) - 1))

    loop = TorchLoop(
        setup.source, micro_batch=setup.work.numerics.micro_batch, clip=None,
        settings=OPTIMIZER | {"lr": 0.0}, before_micro_batch=seed_noise,
    )  # fmt: skip
    batches = setup.batches(3)
    with setup.engine(WAYS[3], tmp_path, seed=7, optimizer=OPTIMIZER | {"lr": 0.0}) as engine:
        evaluated = engine.evaluate(batches[:1]).loss
        losses = []
        for batch in batches:
            losses.append(float(engine.step(batch)))
            assert losses[-1] == pytest.approx(loop.step(batch), rel=1e-5)
            assert engine.grad_norm == pytest.approx(loop.grad_norm, rel=1e-5)
        assert losses[0] != pytest.approx(evaluated, rel=1e-3)
        assert engine.evaluate(batches[:1]).loss == evaluated


def assert_agrees_with_torch(setup: Setup, engine: Engine, **options: Any) -> None:
    """Train with both, from the engine's state at every step, and compare the results."""
    work = setup.work
    scale = SCALE if work.dtype == "fp16" else 1.0
    engine.scale.value = scale
    frozen = {t.name for b in setup.model.blocks for t in b.tensors if not t.trainable}
    loop = TorchLoop(
        setup.source,
        micro_batch=work.numerics.micro_batch,
        clip=work.clip,
        settings=OPTIMIZER,
        frozen=lambda name: name in frozen,
        lr_of=lambda step, dims: OPTIMIZER["lr"] * warm_up(step) * (1.0 if dims >= 2 else 0.5),
        loss_scale=scale,
        label_smoothing=work.numerics.label_smoothing,
        **options,
    )
    factors = [warm_up, lambda step: 0.5 * warm_up(step)]
    scheduler = LambdaLR(engine.optimizer, factors[: len(engine.optimizer.param_groups)])
    clipped = 0
    for batch in setup.batches(STEPS):
        before = {
            name: state["master"] for name, state in engine.state.items() if "master" in state
        }
        loss = float(engine.step(batch))
        assert loss == pytest.approx(loop.step(batch), rel=1e-6)
        # Torch adds the squares in fp32.
        assert engine.grad_norm == pytest.approx(loop.grad_norm, rel=1e-6)
        clipped += work.clip is not None and engine.grad_norm > work.clip
        state = dict(engine.state.items())
        assert_same_update(loop, before, state, work.moments)
        loop.load(state)
        scheduler.step()
    assert clipped == (0 if work.clip is None else STEPS)


def assert_same_update(
    loop: TorchLoop,
    before: Mapping[str, torch.Tensor],
    state: Mapping[str, Mapping[str, torch.Tensor]],
    moments: str,
) -> None:
    assert loop.masters.keys() == before.keys()
    for name, master in loop.masters.items():
        ours, theirs = state[name], loop.moments(name)
        lr = loop.rate(name)
        # Rounding of the master itself, and of the update, whose size is about the rate.
        limit = 2 * EPSILON * before[name].abs() + 32 * EPSILON * lr
        difference = (ours["master"] - master.detach()).abs()
        assert bool((difference <= limit).all()), (name, float((difference / limit).max()))
        assert float((ours["master"] - before[name]).abs().max()) > 0.1 * lr, "it was updated"
        torch.testing.assert_close(ours["weight"], ours["master"].to(ours["weight"].dtype))
        if moments == "fp32":
            size = theirs["exp_avg"].abs().max()
            torch.testing.assert_close(
                ours["exp_avg"], theirs["exp_avg"], rtol=1e-6, atol=float(1e-6 * size)
            )
            torch.testing.assert_close(
                ours["exp_avg_sq"], theirs["exp_avg_sq"], rtol=2e-6, atol=1e-30
            )
