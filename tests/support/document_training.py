"""Train a plain transformers model on documents, without packing or padding.

Everything here is torch, and the model transformers', so that a mistake of Penstock cannot be in it
too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.support.torch_loop import TorchLoop


@dataclass(frozen=True)
class Schedule:
    """Hyperparameters of a run."""

    steps: int = 20
    warmup: int = 4
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0

    def factor(self, step: int) -> float:
        """Return the share of the peak rate of a step: a linear warmup, then a cosine to 0.

        Unlike transformers' schedule, warmup does not begin at 0.
        """
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / (self.steps - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * done))


@dataclass
class PlainRun:
    """Losses and weights of a run, and the largest gradient that each element had."""

    losses: list[float]
    norms: list[float]
    """Gradient norms before clipping."""
    weights: dict[str, torch.Tensor]
    """Weights after the last step."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def train_documents(
    model: Any,
    steps: Sequence[Sequence[torch.Tensor]],
    schedule: Schedule,
    *,
    frozen: Any = lambda name: False,
    inputs: Mapping[str, int] | None = None,
) -> PlainRun:
    """Train on the documents of each step: all tokens are targets but a document's first.

    Args:
        model: The model, on the device to train on.
        steps: Token ids of the documents of each step.
        schedule: Hyperparameters.
        frozen: Says which parameters are not trained, by name.
        inputs: Further arguments of the model, each as the value of all tokens.
    """
    settings = {"lr": schedule.lr, "betas": schedule.betas, "weight_decay": schedule.weight_decay}
    loop = TorchLoop(model.train(), clip=schedule.clip, settings=settings, frozen=frozen)
    scheduler = LambdaLR(loop.optimizer, schedule.factor)
    run = PlainRun([], [], {name: master.data for name, master in loop.masters.items()})
    for documents in steps:
        parts = []
        for ids in _stack_equal_lengths(documents):
            ids = ids.to(model.device)
            more = {name: torch.full_like(ids, value) for name, value in (inputs or {}).items()}
            parts.append({"input_ids": ids, "labels": ids, **more})
        run.losses.append(loop.step_parts(parts))
        run.norms.append(loop.grad_norm)
        scheduler.step()
        for name, master in loop.masters.items():
            assert master.grad is not None
            largest = master.grad.abs()
            run.gradients[name] = torch.maximum(run.gradients.get(name, largest), largest)
    return run


def _stack_equal_lengths(documents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return documents of equal length as one tensor, which saves time and needs no padding."""
    by_length: dict[int, list[torch.Tensor]] = {}
    for document in documents:
        by_length.setdefault(len(document), []).append(document)
    return [torch.stack(alike) for alike in by_length.values()]
