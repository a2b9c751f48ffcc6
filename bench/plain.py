"""The baseline: an eager torch loop with everything in GPU memory and gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.measuring import Batch

FP16_SCALE = 4096.0
"""Loss scale for fp16. It is fixed and small, because a benchmark must not skip a step."""


def plain_step(
    model: Any, *, adamw: dict[str, Any], clip: float, micro_batch: int | None
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
            loss = model(input_ids=part, labels=part, num_items_in_batch=items).loss
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
