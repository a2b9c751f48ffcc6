"""Compile layers on a CPU, and count compiled graphs and graph breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.equivalence.runs import Setup
from tests.equivalence.test_models import packed_batch


def compile_by(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a backend of torch.compile from now on, with an empty cache and fresh counters."""
    original = torch.compile

    def compile_with_backend(function: Any, *, options: Any = None, **how: Any) -> Any:
        if backend == "inductor":  # the other backends take no options
            how["options"] = options
        return original(function, backend=backend, **how)

    monkeypatch.setattr(torch, "compile", compile_with_backend)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    """Return the number of compiled graphs."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def breaks() -> dict[str, int]:
    """Return graph breaks with their reasons, and functions that hit the recompile limit."""
    counters = torch._dynamo.utils.counters
    return dict(counters["graph_break"]) | dict(counters["recompile_limit"])


def packed_in_twos(setup: Setup) -> dict[str, torch.Tensor]:
    """Return a batch of two-token documents: more documents than in `packed_batch`."""
    batch: dict[str, Any] = setup.batches(1)[0]
    row = torch.arange(setup.work.context) % 2
    return batch | {"position_ids": row.expand_as(batch["input_ids"]).clone()}


def every_batch(setup: Setup) -> list[dict[str, torch.Tensor]]:
    """Return batches with one document per row, and with rows packed in two ways."""
    return [setup.batches(1)[0], packed_batch(setup), packed_in_twos(setup)]
