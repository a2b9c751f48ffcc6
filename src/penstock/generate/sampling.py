"""Sample tokens from scores.

Each request has random numbers of its own, one per token, so that its samples do not depend on
which other requests share a batch with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Sampler:
    """How one request samples, and its random numbers."""

    temperature: float
    top_k: int
    top_p: float
    seed: int | str
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def next(self) -> float:
        """Return the next random number, from 0 to below 1."""
        return self._random.random()


def sample_tokens(scores: torch.Tensor, samplers: Sequence[Sampler]) -> list[int | None]:
    """Sample a token for each row of `[rows, vocabulary]`; None where scores are not finite."""
    best, tokens = scores.max(dim=-1)
    if drawn := [row for row, each in enumerate(samplers) if each.temperature > 0]:
        rows = torch.tensor(drawn, device=scores.device)
        tokens[rows] = _draw(scores[rows].float(), [samplers[row] for row in drawn])
    # One copy to the host for both, because it waits for the device; and few launches, because the
    # device is idle meanwhile.
    numbers: list[float] = torch.cat([tokens, best.double()]).tolist()
    count = len(samplers)
    return [
        int(token) if math.isfinite(score) else None
        for token, score in zip(numbers[:count], numbers[count:], strict=True)
    ]


def _draw(scores: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=scores.device)[:, None]

    count = scores.shape[1]
    ordered, tokens = torch.sort(scores, dim=-1, descending=True, stable=True)
    ordered = ordered / column([each.temperature for each in samplers])
    rank = torch.arange(count, device=scores.device)[None, :]
    top_k = column([float(each.top_k or count) for each in samplers])
    chances = torch.softmax(ordered.masked_fill(rank >= top_k, float("-inf")), dim=-1)
    before = chances.cumsum(dim=-1) - chances
    chances = chances.masked_fill(before >= column([each.top_p for each in samplers]), 0.0)
    chances[:, 0].clamp_(min=torch.finfo(chances.dtype).tiny)  # the most likely token always stays
    reached = chances.cumsum(dim=-1)
    wanted = column([each.next() for each in samplers]) * reached[:, -1:]
    position = (reached <= wanted).sum(dim=-1, keepdim=True)
    last = (chances > 0).sum(dim=-1, keepdim=True) - 1
    return tokens.gather(1, torch.minimum(position, last))[:, 0]
