"""The same training as a plain loop, which the engine must equal bit for bit.

It uses the unmodified `transformers` model, its own loss and torch's autograd, with everything in
one place. The update follows Penstock's documented rounding and so uses Penstock's own rules;
`torch_loop` uses none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.optim import formats, reference, rules
from penstock.optim.norms import GradStats, clip_scale
from penstock.optim.sweep import grad_stats


class PlainLoop:
    """Train with the reference AdamW in plain torch, on weights with master weights.

    `order` lists every tensor in the order in which the seeds of stochastic rounding count them.
    `lr_of`, if given, returns the learning rate for a step (from 0) and a number of dimensions.
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
        dtype = self.model.dtype
        grads = {name: total.to(dtype) for name, total in sums.items()}
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
        """Return the gradients, summed over micro-batches in order and in fp32, and the loss."""
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
        return formats.read_master(self.state[name]["weight"], self.state[name].get("rest"))

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the training state, with the names that tests/equivalence uses."""
        roles = {"weight": "weight", "rest": "master", "first": "first", "second": "second",
                 "first_base": "first bases", "second_base": "second bases"}  # fmt: skip
        tensors = {f"{n} weight": p.detach().view(-1) for n, p in self.model.named_parameters()}
        for name, state in self.state.items():
            tensors |= {f"{name} {roles[key]}": value for key, value in state.items()}
        return tensors

    def _settings_of(self, dimensions: int) -> dict[str, Any]:
        """Return the settings of a tensor's parameter group: only matrices decay."""
        settings = dict(self.settings)
        if dimensions < 2:
            settings["weight_decay"] = 0.0
        if self.lr_of is not None:
            settings["lr"] = self.lr_of(self.steps - 1, dimensions)
        return settings


def _fresh(weight: torch.Tensor, moments: formats.Moments) -> dict[str, torch.Tensor]:
    flat = weight.view(-1)
    rest = formats.fresh_rest(flat)
    state = {"weight": flat} | ({} if rest is None else {"rest": rest})
    for name in ("first", "second"):
        zeros = torch.zeros(flat.numel())
        moment = formats.write_moment(zeros, name, moments, second=name == "second")
        state |= {key.removesuffix("_code"): value for key, value in moment.items()}
    return state
