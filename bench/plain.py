"""The baseline: a torch loop with everything in GPU memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.measuring import Batch

LossOf = Callable[[Any, torch.Tensor, int], torch.Tensor]
"""Computes the loss of a model over rows of token ids, divided by a number of targets."""

FP16_SCALE = 4096.0
"""Loss scale for fp16. It is fixed and small, because a benchmark must not skip a step."""


def transformers_loss(model: Any, ids: torch.Tensor, items: int) -> torch.Tensor:
    """Return the loss as transformers computes it, from the logits of all tokens."""
    loss: torch.Tensor = model(input_ids=ids, labels=ids, num_items_in_batch=items).loss
    return loss


def liger_loss(model: Any, ids: torch.Tensor, items: int) -> torch.Tensor:
    """Return the loss by Liger's kernel, which computes head and cross-entropy in chunks."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    states = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    total = LigerFusedLinearCrossEntropyLoss(reduction="sum")(
        model.lm_head.weight, states, ids[:, 1:].reshape(-1)
    )
    loss: torch.Tensor = total / items
    return loss


def plain_step(
    model: Any,
    *,
    adamw: dict[str, Any],
    clip: float,
    micro_batch: int | None,
    loss_of: LossOf = transformers_loss,
) -> Callable[[Batch], float]:
    """Return a function that runs one step.

    Computation is 16-bit; torch's fused AdamW updates fp32 master weights from gradients that are
    converted to fp32 once per step.
    """
    parameters = list(model.parameters())
    device = parameters[0].device
    scale = FP16_SCALE if parameters[0].dtype == torch.float16 else 1.0
    masters = [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(masters, fused=True, **adamw)

    def step(batch: Batch) -> float:
        ids = batch["input_ids"].to(device)
        total = torch.zeros((), device=device)
        items = ids.shape[0] * (ids.shape[1] - 1)
        for part in torch.split(ids, micro_batch or ids.shape[0]):
            loss = loss_of(model, part, items)
            (loss * scale).backward()
            total += loss.detach()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float().div_(scale)
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
                master.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize()
        return float(total)

    return step
