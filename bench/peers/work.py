"""The work of every arm: one model, one batch, one optimizer, the same initial weights.

The batch is the same at every step, so that the loss falls. A wrong, late or missing update is then
visible in the losses; with random data it would not be.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from bench.measuring import Batch
from bench.shapes import config_of

SPREAD = 0.02
"""Standard deviation of initial weights, as in Llama."""

DRAW = 1 << 24
"""Number of elements drawn together, small enough for a device that is almost full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Model, batch and optimizer of a step, and the number of steps."""

    shape: str = "3b"
    context: int = 4096
    batch: int = 4
    micro_batch: int | None = None
    """Sequences per micro-batch, for arms where the caller chooses it (None: the whole batch)."""
    steps: int = 6
    warm_up: int = 2
    """Number of first steps that are not counted, because they compile and create states."""
    dtype: Literal["bf16", "fp16"] = "bf16"
    seed: int = 0
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0
    scratch: str = "."
    """Directory for the files of arms that use a disk."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a single arm, such as budgets and plans."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float16

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def config(self) -> Any:
        config = config_of(self.shape, self.context)
        config._attn_implementation = "sdpa"
        config.use_cache = False
        return config

    @property
    def adamw(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }

    def batch_of_tokens(self) -> Batch:
        drawn = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.context)
        return {"input_ids": torch.randint(0, self.config.vocab_size, shape, generator=drawn)}


Step = Callable[[Batch], float]
"""A function that runs one optimizer step and returns the loss, known on the host."""

Arm = Callable[[Work], AbstractContextManager[Step]]


def weight_of(name: str, shape: tuple[int, ...], work: Work) -> torch.Tensor:
    """Return an initial weight on the host. It depends only on the seed and its name."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=work.torch_dtype)
    weight = torch.empty(math.prod(shape), dtype=work.torch_dtype)
    for number, part in enumerate(torch.split(weight, DRAW)):
        drawn = torch.Generator(work.device)
        drawn.manual_seed(zlib.crc32(f"{work.seed} {name} {number}".encode()))
        values = torch.randn(part.numel(), generator=drawn, device=work.device)
        part.copy_(values.mul_(SPREAD))
    return weight.view(shape)


class InitialWeights(Mapping[str, torch.Tensor]):
    """The initial weights of a model, made on demand. Only the latest one is kept in memory."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], work: Work) -> None:
        self._shapes, self._work = shapes, work
        self._latest: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._latest is None or self._latest[0] != name:
            self._latest = (name, weight_of(name, self._shapes[name], self._work))
        return self._latest[1]

    def __iter__(self) -> Any:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def build_model(work: Work, dtype: torch.dtype, device: torch.device) -> Any:
    """Build the model with its initial weights, never holding a second copy of it."""
    import transformers

    config = work.config
    family: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = family.from_config(config, dtype=dtype)
    model.to_empty(device=device)
    model.tie_weights()
    # The rotary tables are buffers that are in no checkpoint. On the meta device they had no
    # memory, so they are computed again.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    fill(model, work)
    return ready(model)


def fill(model: Any, work: Work) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight_of(name, tuple(parameter.shape), work))


def ready(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model
