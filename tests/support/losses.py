"""Logits with targets, and their exact loss, for tests of the loss kernel."""

from __future__ import annotations

from typing import Any

import torch

TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-8},
    torch.float16: {"rtol": 2.0**-11, "atol": 1e-7},  # gradients are rounded to 11 bits
    torch.bfloat16: {"rtol": 2.0**-7, "atol": 1e-7},  # to 8 bits; the interpreter truncates
}
"""How far the gradient of logits may be from the exact one, by the type of the logits."""


def logits_and_targets(
    rows: int, vocabulary: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random logits and targets; every fifth target is ignored."""
    drawn = torch.Generator().manual_seed(4)
    logits = (5 * torch.randn(rows, vocabulary, generator=drawn)).to(device, dtype)
    targets = torch.randint(vocabulary, (rows,), generator=drawn).to(device)
    targets[::5] = -100
    return logits, targets


def exact_loss(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of torch's cross-entropy and its gradient, in fp64."""
    exact = logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        exact, targets, reduction="sum", label_smoothing=smoothing
    )
    (gradient,) = torch.autograd.grad(loss, exact)
    return loss.detach(), gradient
