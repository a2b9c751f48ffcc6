"""The same training as a plain loop: the unmodified transformers model, its own loss, torch's
autograd, everything in one place. What the engine must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.optim import formats, reference, rules
from penstock.optim.stats import clip_scale
from penstock.optim.sweep import grad_stats


class PlainLoop:
    """AdamW with a bf16 weight and its remainder, by the reference in plain torch."""

    def __init__(
        self,
        model: Any,
        *,
        micro_batch: int,
        clip: float | None,
        settings: dict[str, Any],
        frozen: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.model, self.micro_batch, self.clip, self.settings = model, micro_batch, clip, settings
        self.trained = {n: p for n, p in model.named_parameters() if not frozen(n)}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.trained)
        self.state = {
            name: {
                "weight": p.detach().view(-1),
                "rest": torch.zeros(p.numel(), dtype=torch.int16),
                "first": torch.zeros(p.numel()),
                "second": torch.zeros(p.numel()),
            }
            for name, p in self.trained.items()
        }
        self.steps = 0
        self.grad_norm = float("nan")

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        sums, loss = self.gradients(batch)
        grads = {name: total.to(torch.bfloat16) for name, total in sums.items()}
        self.grad_norm = grad_stats([g.view(-1) for g in grads.values()]).norm
        scale = 1.0 if self.clip is None else clip_scale(self.grad_norm, self.clip)
        self.steps += 1
        for name, grad in grads.items():
            decay = self.settings["weight_decay"] if grad.dim() >= 2 else 0.0
            by = rules.adamw(
                step=self.steps, scale=scale, **(self.settings | {"weight_decay": decay})
            )
            bad = reference.sweep(
                "adamw", self.state[name], grad.view(-1), by, key=0, first_index=0
            )
            assert bad is None
        return loss

    def gradients(self, batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], float]:
        """Summed in fp32 over micro-batches, in their order."""
        items = int((batch["labels"][:, 1:] != -100).sum())
        sums: dict[str, torch.Tensor] = {}
        total = 0.0
        for rows in range(0, batch["input_ids"].shape[0], self.micro_batch):
            part = {k: v[rows : rows + self.micro_batch] for k, v in batch.items()}
            self.model.zero_grad()
            loss = self.model(**part, num_items_in_batch=items).loss
            loss.backward()
            total += float(loss)
            for name, parameter in self.trained.items():
                assert parameter.grad is not None, name
                grad = parameter.grad.float()
                sums[name] = grad if name not in sums else sums[name] + grad
        return sums, total

    def master(self, name: str) -> torch.Tensor:
        return formats.join(self.state[name]["weight"], self.state[name]["rest"])


def same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
