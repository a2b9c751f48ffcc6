"""Make the plain model drop the same elements as the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from penstock.optim.rules import draw_key


def seed_like_the_engine(model: Any, seed: int) -> Callable[[int, int], None]:
    """Seed torch before the embedding and each layer of a GPT-2, as the engine does.

    Returns a function to call before each micro-batch, with the number of its step and its own.
    """
    now: dict[str, int] = {}

    def seed_before(block: int) -> Callable[..., None]:
        def set_seed(*_: Any) -> None:
            key = draw_key(seed, now["step"], (block << 32) + now["micro"])
            torch.manual_seed(key & ((1 << 63) - 1))  # of all devices

        return set_seed

    model.transformer.drop.register_forward_pre_hook(seed_before(0))
    for number, layer in enumerate(model.transformer.h):
        layer.register_forward_pre_hook(seed_before(1 + number))
    return lambda step, micro: now.update(step=step, micro=micro)
