"""The same training as a plain loop: the unmodified transformers model, its own loss, torch's
autograd, everything in one place. What the engine must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.optim import formats, reference, rules
from penstock.optim.norms import GradStats, clip_scale
from penstock.optim.sweep import grad_stats


class PlainLoop:
    """AdamW by the reference in plain torch: a 16-bit weight with the rest of its master.

    `order` names every tensor, as seeds of stochastic rounding count them; `lr_of` is a learning
    rate by step, from 0, and by the tensor's dimensions, where it is not constant.
    """

    def __init__(
        self,
        model: Any,
        *,
        micro_batch: int,
        clip: float | None,
        settings: dict[str, Any],
        frozen: Callable[[str], bool] = lambda name: False,
        moments: formats.Moments = "fp32",
        order: Sequence[str] = (),
        lr_of: Callable[[int, int], float] | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        self.model, self.micro_batch, self.clip, self.settings = model, micro_batch, clip, settings
        self.trained = {n: p for n, p in model.named_parameters() if not frozen(n)}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.trained)
        self.state = {name: _fresh(p.detach(), moments) for name, p in self.trained.items()}
        self.order, self.lr_of, self.loss_scale = list(order), lr_of, loss_scale
        self.steps = 0
        self.grad_norm = float("nan")

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        sums, loss = self.gradients(batch)
        sixteen = self.model.dtype
        grads = {name: total.to(sixteen) for name, total in sums.items()}
        stats: GradStats = grad_stats([g.view(-1) for g in grads.values()])
        if not stats.finite:
            return loss
        unscale = 1.0 / self.loss_scale
        self.grad_norm = stats.norm * unscale
        clipped = 1.0 if self.clip is None else clip_scale(self.grad_norm, self.clip)
        self.steps += 1
        for name, grad in grads.items():
            by = rules.adamw(
                step=self.steps, scale=unscale * clipped, **self._settings_of(grad.dim())
            )
            key = rules.draw_key(0, self.steps, self.order.index(name)) if self.order else 0
            state = self.state[name]
            bad = reference.sweep("adamw", state, grad.view(-1), by, key=key, first_index=0)
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
            (loss * self.loss_scale if self.loss_scale != 1.0 else loss).backward()
            total += float(loss.detach())
            for name, parameter in self.trained.items():
                assert parameter.grad is not None, name
                grad = parameter.grad.float()
                sums[name] = grad if name not in sums else sums[name] + grad
        return sums, total

    def master(self, name: str) -> torch.Tensor:
        return formats.read_master(self.state[name]["weight"], self.state[name]["rest"])

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Everything by the names that tests/equivalence gives it."""
        roles = {"weight": "weight", "rest": "master", "first": "first", "second": "second",
                 "first_base": "first bases", "second_base": "second bases"}  # fmt: skip
        found = {f"{n} weight": p.detach().view(-1) for n, p in self.model.named_parameters()}
        for name, state in self.state.items():
            found |= {f"{name} {roles[key]}": value for key, value in state.items()}
        return found

    def _settings_of(self, dimensions: int) -> dict[str, Any]:
        """Of the tensor's group: matrices are decayed."""
        given = dict(self.settings)
        if dimensions < 2:
            given["weight_decay"] = 0.0
        if self.lr_of is not None:
            given["lr"] = self.lr_of(self.steps - 1, dimensions)
        return given


def _fresh(weight: torch.Tensor, moments: formats.Moments) -> dict[str, torch.Tensor]:
    flat = weight.view(-1)
    rest = formats.fresh_rest(flat)
    assert rest is not None
    state = {"weight": flat, "rest": rest}
    for name in ("first", "second"):
        zeros = torch.zeros(flat.numel())
        made = formats.write_moment(zeros, name, moments, second=name == "second")
        state |= {key.removesuffix("_code"): value for key, value in made.items()}
    return state
