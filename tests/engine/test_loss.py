"""The loss over the head, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.engine.loss import (
    ChunkedLoss,
    GradientSink,
    LossScale,
    _cross_entropy,
    fused_loss,
)
from penstock.errors import EngineError, LossScaleError
from penstock.model.storage_counter import StorageCounter
from tests.support.device_sweeps import count_interpreted, needs_triton
from tests.support.losses import TOLERANCES, exact_loss, logits_and_targets

TOKENS, WIDTH, VOCABULARY, CHUNK = 12, 8, 32, 5


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, targets and the head's weight."""
    drawn = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=drawn)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=drawn)
    targets[::4] = -100
    return hidden, targets, torch.randn(VOCABULARY, WIDTH, generator=drawn).requires_grad_()


def own_loss(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -log_probs.sum()


def test_a_loss_per_token_is_refused() -> None:
    hidden, targets, weight = inputs()
    loss = ChunkedLoss(lambda x: x @ weight.T, CHUNK, lambda log_probs, _: -log_probs)
    with pytest.raises(EngineError, match=r"shape \(3,\); it must return a scalar, the sum"):
        loss.forward(hidden, targets)


@pytest.mark.parametrize("function", [None, own_loss], ids=["cross-entropy", "own function"])
@pytest.mark.parametrize("with_backward", [False, True], ids=["forward", "backward"])
def test_one_chunks_logits_exist_at_a_time(
    with_backward: bool, function: Callable[..., Any] | None
) -> None:
    hidden, targets, weight = inputs()
    earlier: list[StorageWeakRef] = []

    def logits(x: torch.Tensor) -> torch.Tensor:
        assert all(storage.expired() for storage in earlier)
        made = x @ weight.T
        # Followed by an operation whose backward keeps its result: the autograd graph of an earlier
        # chunk must be gone as well.
        capped = torch.tanh(made)
        earlier.extend(StorageWeakRef(t.untyped_storage()) for t in (made, capped))
        return capped

    loss = ChunkedLoss(logits, CHUNK, function)
    if with_backward:
        sink = GradientSink({"weight": weight}, lambda name, gradient: None)
        loss.backward(hidden, targets, sink, num_items=9, scale=1.0)
    else:
        loss.forward(hidden, targets)
    assert len(earlier) == 2 * 3


def test_the_fused_loss_needs_no_second_copy_of_the_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd must not notice that the kernel changed logits that are a view."""

    def replace_by_gradient(
        logits: torch.Tensor, targets: torch.Tensor, scale: float, smoothing: float
    ) -> torch.Tensor:
        logits.mul_(scale)
        return torch.zeros(logits.shape[0])

    monkeypatch.setattr("penstock.engine.loss._cross_entropy", replace_by_gradient)
    hidden, targets, _ = inputs()
    weight = torch.randn(4096, WIDTH).requires_grad_()
    loss = ChunkedLoss(lambda x: (x[None] @ weight.T).squeeze(0), TOKENS, fused=True)
    sink = GradientSink({"weight": weight}, lambda name, gradient: None)
    with StorageCounter() as counter:
        loss.backward(hidden, targets, sink, num_items=9, scale=1.0)
    logits, gradient = 4 * TOKENS * 4096, 4 * weight.numel()
    assert logits + gradient <= counter.peak < logits + gradient + 10_000


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_chunks_add_up_to_the_loss_and_gradients_of_the_whole(smoothing: float) -> None:
    hidden, targets, weight = inputs()
    whole = hidden.clone().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(
        whole @ weight.T, targets, reduction="sum", label_smoothing=smoothing
    )
    (2.0 * wanted / 9).backward()
    added: list[torch.Tensor] = []
    sink = GradientSink({"weight": weight}, lambda name, gradient: added.append(gradient.clone()))
    loss = ChunkedLoss(lambda x: x @ weight.T, CHUNK, label_smoothing=smoothing)

    assert loss.forward(hidden, targets) == pytest.approx(wanted.item(), rel=1e-6)
    total = loss.backward(hidden, targets, sink, num_items=9, scale=2.0)

    assert total == pytest.approx(wanted.item(), rel=1e-6)
    torch.testing.assert_close(hidden, whole.grad)
    torch.testing.assert_close(sum(added), weight.grad)


@needs_triton
@pytest.mark.timeout(600)
def test_the_kernel_in_the_interpreter() -> None:
    assert count_interpreted("tests/engine/test_loss_kernels.py") == 40


def test_an_overflow_restarts_the_count_of_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale doubles after so many good steps in a row, not so many in all."""
    monkeypatch.setattr("penstock.engine.loss.GROWTH_INTERVAL", 3)
    scale = LossScale.of("fp16")
    for _ in range(2):
        scale.note_good_step()
    scale.note_overflow()
    assert (scale.value, scale.good_steps) == (32768.0, 0)

    values = []
    for _ in range(4):
        scale.note_good_step()
        values.append(scale.value)

    assert values == [32768.0, 32768.0, 65536.0, 65536.0]


def test_the_scale_is_at_least_one_and_always_one_with_bf16() -> None:
    small, fixed = LossScale(value=1.5, fixed=False), LossScale.of("bf16")
    for scale in (small, fixed):
        scale.note_overflow()
        assert scale.value == 1.0
    for _ in range(3000):
        fixed.note_good_step()
    assert fixed.value == 1.0


def test_a_scale_at_its_minimum_bears_few_overflows_in_a_row() -> None:
    scale = LossScale(value=2.0, fixed=False)
    for _ in range(3):
        scale.note_overflow()  # to 1
        for _ in range(9):
            scale.note_overflow()
        scale.note_good_step()
        scale.value = 2.0
    scale.value = 1.0
    for _ in range(9):
        scale.note_overflow()

    with pytest.raises(LossScaleError, match="the last 10 steps overflowed fp16") as caught:
        scale.note_overflow()

    assert (caught.value.overflows, caught.value.scale) == (10, 1.0)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_skipped_steps_without_a_loss_scale_are_no_overflows(dtype: str) -> None:
    scale = LossScale.of(dtype)
    for _ in range(100):
        scale.note_overflow()
    assert scale.value == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.75])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 8192, 20000])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_fused_loss_is_that_of_torch(
    dtype: torch.dtype, vocabulary: int, smoothing: float
) -> None:
    logits, targets = logits_and_targets(32, vocabulary, dtype, "cuda")
    wanted, gradient = exact_loss(logits, targets, smoothing)

    forward = fused_loss(logits, targets, None, smoothing)
    backward = fused_loss(logits, targets, 0.25, smoothing)

    assert forward == backward
    torch.testing.assert_close(backward, wanted, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(logits.double(), 0.25 * gradient, **TOLERANCES[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 0.5], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_fused_loss_reads_no_logit_outside_of_the_vocabulary(
    dtype: torch.dtype, scale: float | None
) -> None:
    """A bad target gives NaN in its own row, and no other row changes."""
    drawn = torch.Generator().manual_seed(3)
    logits = torch.randn(8, VOCABULARY, generator=drawn).to(dtype).cuda()
    good = torch.tensor([0, VOCABULARY - 1, -100, 5]).cuda()
    bad = torch.tensor([-1, VOCABULARY, -101, 2**40]).cuda()
    wanted = torch.nn.functional.cross_entropy(logits[:4].float(), good, reduction="none")
    factor = 0.0 if scale is None else scale

    losses = _cross_entropy(logits.clone(), torch.cat([good, bad]), factor, 0.0)

    torch.testing.assert_close(losses[:4], wanted)
    assert bool(losses[4:].isnan().all())
    assert bool(fused_loss(logits, torch.cat([good, bad]), scale).isnan())
