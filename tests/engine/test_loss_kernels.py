"""The fused loss computes cross-entropy and its gradient, with and without label smoothing.

These tests run in Triton's interpreter, which `test_loss.py` starts. That file has similar ones on
a GPU.
"""

from __future__ import annotations

import pytest
import torch

from penstock.engine.loss import ChunkedLoss, GradientSink, _cross_entropy, fused_loss
from tests.kv.decode_cases import fixed_interpreter
from tests.support.device_sweeps import INTERPRETED, quiet
from tests.support.losses import TOLERANCES, exact_loss, logits_and_targets

__all__ = ["fixed_interpreter"]

pytestmark = [
    *quiet,
    pytest.mark.skipif(not INTERPRETED, reason="run by test_loss.py, interpreted"),
    pytest.mark.usefixtures("fixed_interpreter"),
]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.75])
@pytest.mark.parametrize("vocabulary", [1, 32, 8192, 9001])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_kernel_computes_the_loss_and_its_gradient(
    dtype: torch.dtype, vocabulary: int, smoothing: float
) -> None:
    logits, targets = logits_and_targets(6, vocabulary, dtype)
    wanted, gradient = exact_loss(logits, targets, smoothing)

    forward = fused_loss(logits, targets, None, smoothing)
    backward = fused_loss(logits, targets, 0.25, smoothing)

    torch.testing.assert_close(forward, wanted, rtol=1e-5, atol=1e-6)
    assert forward == backward
    torch.testing.assert_close(logits.double(), 0.25 * gradient, **TOLERANCES[dtype])


def test_smoothing_at_a_large_offset_of_the_logits() -> None:
    """A sum of logits loses the digits in which they differ, unless they are few."""
    logits, targets = logits_and_targets(4, 9001, torch.float32)
    logits += 300.0
    wanted, _ = exact_loss(logits, targets, 0.1)

    torch.testing.assert_close(fused_loss(logits, targets, None, 0.1), wanted, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_bad_target_gives_nan_and_an_ignored_one_no_gradient(smoothing: float) -> None:
    logits, _ = logits_and_targets(4, 32, torch.float32)

    losses = _cross_entropy(logits, torch.tensor([-100, 32, -1, 5]), 1.0, smoothing)

    assert losses.isnan().tolist() == [False, True, True, False]
    assert losses[0] == 0
    assert not logits[0].any()
    assert logits[3].any()


def test_chunks_smooth_in_the_kernel_as_in_torch() -> None:
    drawn = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(12, 8, generator=drawn), torch.randn(50, 8, generator=drawn)
    targets = torch.randint(0, 50, (12,), generator=drawn)
    targets[::4] = -100
    found = []
    for fused in (True, False):
        trained, states = weight.clone().requires_grad_(), hidden.clone()
        total_gradient = torch.zeros_like(weight)
        sink = GradientSink({"weight": trained}, lambda _, part, to=total_gradient: to.add_(part))
        loss = ChunkedLoss(lambda x, w=trained: x @ w.T, 5, fused=fused, label_smoothing=0.2)
        total = loss.backward(states, targets, sink, num_items=9, scale=4.0)
        assert total == pytest.approx(float(loss.forward(hidden, targets)), rel=1e-6)
        found.append((total, states, total_gradient))

    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
