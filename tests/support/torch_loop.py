"""The same training with torch's own optimizer and clipping, without any of Penstock's rules.

`PlainLoop` follows Penstock's documented rounding to the bit, and so it uses Penstock's own rules.
A rule that is wrong would be wrong in both. This loop is independent: `torch.optim.AdamW` updates
fp32 master weights, and `torch.nn.utils.clip_grad_norm_` clips. It agrees closely but not to the
bit, because torch rounds in other places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

Part = Mapping[str, torch.Tensor]
"""Arguments of one forward pass, and its `labels`."""


class TorchLoop:
    """Train the unmodified `transformers` model with a torch optimizer on fp32 master weights.

    It is AdamW, unless `make_optimizer` makes another one from param groups and settings.

    `lr_of`, if given, returns the learning rate for a step (from 0) and a number of dimensions.
    Without it, a torch scheduler may change the rates of `optimizer`.
    `before_micro_batch`, if given, is called with the number of the step and of the micro-batch.
    """

    def __init__(
        self,
        model: Any,
        *,
        clip: float | None,
        settings: Mapping[str, Any],
        micro_batch: int = 1,
        frozen: Callable[[str], bool] = lambda name: False,
        lr_of: Callable[[int, int], float] | None = None,
        loss_scale: float = 1.0,
        label_smoothing: float = 0.0,
        before_micro_batch: Callable[[int, int], None] = lambda step, micro: None,
        make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        self.model, self.micro_batch, self.clip, self.loss_scale = (
            model, micro_batch, clip, loss_scale,
        )  # fmt: skip
        self.lr_of, self.before_micro_batch = lr_of, before_micro_batch
        self.label_smoothing = label_smoothing
        self.masters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen(name))
            if parameter.requires_grad:
                self.masters[name] = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
        matrices = [p for p in self.masters.values() if p.dim() >= 2]
        vectors = [p for p in self.masters.values() if p.dim() < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = make_optimizer([g for g in groups if g["params"]], **settings)
        self.steps = 0
        self.grad_norm = float("nan")

    def step(self, batch: Part) -> float:
        """Make one step of a batch; return the mean loss over the labels that are not -100."""
        rows, size = batch["input_ids"].shape[0], self.micro_batch
        starts = range(0, rows, size)
        return self.step_parts([{k: v[at : at + size] for k, v in batch.items()} for at in starts])

    def step_parts(self, parts: Iterable[Part]) -> float:
        """Make one step of several forward passes, such as one for each document."""
        parts = list(parts)
        items = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
        self.optimizer.zero_grad()
        loss = 0.0
        for number, part in enumerate(parts):
            self.before_micro_batch(self.steps, number)
            loss += self._add_gradients(part, items)
        for master in self.masters.values():
            assert master.grad is not None
            # Gradients are stored in 16 bits, summed and scaled before.
            master.grad = master.grad.to(self.model.dtype).float() / self.loss_scale
        limit = float("inf") if self.clip is None else self.clip
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), limit)
        self.grad_norm = float(norm)
        if self.lr_of is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr_of(self.steps, group["params"][0].dim())
        self.optimizer.step()
        self.steps += 1
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self.masters:
                    parameter.copy_(self.masters[name])
        return loss

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Continue from these weights, master weights and moments."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state[name]["weight"])
            for name, master in self.masters.items():
                master.copy_(state[name]["master"])
                for key, moment in self.moments(name).items():
                    moment.copy_(state[name][key])

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        """Return both moments of a tensor."""
        found = self.optimizer.state[self.masters[name]]
        return {key: found[key] for key in ("exp_avg", "exp_avg_sq")}

    def rate(self, name: str) -> float:
        """Return the learning rate of a tensor in the last step."""
        master = self.masters[name]
        (rate,) = (
            group["lr"]
            for group in self.optimizer.param_groups
            if any(p is master for p in group["params"])
        )
        return float(rate)

    def _add_gradients(self, part: Part, items: int) -> float:
        """Add the gradients of one forward pass, in fp32; return its part of the loss."""
        self.model.zero_grad()
        inputs = {name: tensor for name, tensor in part.items() if name != "labels"}
        # Training needs no cache of keys and values. With one, they are copies with another memory
        # layout, and a gradient that nearly cancels out can differ by a bit of bf16.
        logits = self.model(**inputs, use_cache=False).logits[:, :-1]
        targets = part["labels"][:, 1:].flatten()
        summed = nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets,
            reduction="sum", ignore_index=-100, label_smoothing=self.label_smoothing,
        )  # fmt: skip
        loss = summed / items
        (loss * self.loss_scale).backward()
        parameters = dict(self.model.named_parameters())
        for name, master in self.masters.items():
            gradient = parameters[name].grad.float()
            master.grad = gradient if master.grad is None else master.grad + gradient
        return float(loss.detach())
