"""Small training loops, and the phases that are expected of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.observe.records import RecordedRun


class Loop:
    """A small model and its optimizer."""

    def __init__(self, wrap: Callable[[nn.Module], Any] = lambda model: model) -> None:
        inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 4)))
        self.model = wrap(inner)
        self.optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)

    def step(self, micro_batches: int = 1) -> None:
        for _ in range(micro_batches):
            self.model(torch.randn(2, 8)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def phases_and_steps(run: RecordedRun) -> list[tuple[str, int | None]]:
    return [(phase.name, phase.step) for phase in run.phases]


STEP = ["forward", "backward", "update"]


def expected(steps: int, phases: list[str] = STEP) -> list[tuple[str, int | None]]:
    return [(name, step) for step in range(1, steps + 1) for name in phases]
