"""Compiled layers on a CPU, and what was compiled."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.equivalence.runs import Setup
from tests.equivalence.test_models import packed_batch


def compile_by(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on; what was compiled before is forgotten, and counted anew."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    """Pieces of code that were compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def breaks() -> dict[str, int]:
    """Why code was cut in pieces, or what was compiled more often than it may be."""
    counters = torch._dynamo.utils.counters
    return dict(counters["graph_break"]) | dict(counters["recompile_limit"])


def packed_in_twos(setup: Setup) -> dict[str, torch.Tensor]:
    """Other documents than `packed_batch` has, and more of them."""
    batch: dict[str, Any] = setup.batches(1)[0]
    row = torch.arange(setup.work.context) % 2
    return batch | {"position_ids": row.expand_as(batch["input_ids"]).clone()}


def every_batch(setup: Setup) -> list[dict[str, torch.Tensor]]:
    """Rows that are one document, and rows of several, packed this way and that."""
    return [setup.batches(1)[0], packed_batch(setup), packed_in_twos(setup)]
