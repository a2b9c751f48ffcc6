"""From scores to tokens. Room: hold.

Each request draws from numbers of its own, one per token, so that its outcome does not depend on
which others share a batch with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Draws:
    """How one request draws."""

    temperature: float
    top_k: int
    top_p: float
    seed: int | str
    _numbers: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._numbers = random.Random(self.seed)

    def next(self) -> float:
        """A number from 0 to below 1."""
        return self._numbers.random()


def pick(scores: torch.Tensor, draws: Sequence[Draws]) -> list[int | None]:
    """A token for each row of [rows, vocabulary]; None where the scores are not finite."""
    best, tokens = scores.max(dim=-1)
    if drawn := [row for row, each in enumerate(draws) if each.temperature > 0]:
        some = torch.tensor(drawn, device=scores.device)
        tokens[some] = _draw(scores[some].float(), [draws[row] for row in drawn])
    # One wait for both, and few launches: they come when the device has nothing else to do.
    found: list[float] = torch.cat([tokens, best.double()]).tolist()
    return [
        int(token) if math.isfinite(score) else None
        for token, score in zip(found[: len(draws)], found[len(draws) :], strict=True)
    ]


def _draw(scores: torch.Tensor, draws: Sequence[Draws]) -> torch.Tensor:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=scores.device)[:, None]

    count = scores.shape[1]
    ordered, tokens = torch.sort(scores, dim=-1, descending=True, stable=True)
    ordered = ordered / column([each.temperature for each in draws])
    rank = torch.arange(count, device=scores.device)[None, :]
    among = column([float(each.top_k or count) for each in draws])
    chances = torch.softmax(ordered.masked_fill(rank >= among, float("-inf")), dim=-1)
    before = chances.cumsum(dim=-1) - chances
    chances = chances.masked_fill(before >= column([each.top_p for each in draws]), 0.0)
    chances[:, 0].clamp_(min=torch.finfo(chances.dtype).tiny)  # the likeliest always stays
    reached = chances.cumsum(dim=-1)
    wanted = column([each.next() for each in draws]) * reached[:, -1:]
    at = (reached <= wanted).sum(dim=-1, keepdim=True)
    last = (chances > 0).sum(dim=-1, keepdim=True) - 1
    return tokens.gather(1, torch.minimum(at, last))[:, 0]
