"""Lanes that dawdle at random, and plans drawn at random."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.device import CpuDevice
from penstock.model.split import SplitModel
from penstock.storage.store import Store
from tests.equivalence.runs import Setup, Way

LONGEST = 0.004
"""Seconds: several times what an operation of a tiny model takes."""


def make_lanes_dawdle(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Copies, transfers, sweeps and computations start late, each lane by its own dice. What should
    have waited for one of them then does not find its bytes."""
    drawn, lock = random.Random(seed), threading.Lock()
    # One lane in three hurries, so that now this one and now that one is behind.
    pace: dict[str, float] = {}

    def dawdle() -> None:
        name = threading.current_thread().name
        with lock:
            slow = pace.setdefault(name, drawn.choice((0.0, 0.5, 1.0)))
            seconds = slow * drawn.random() * LONGEST if drawn.random() < 0.4 else 0.0
        time.sleep(seconds)

    def late(kind: type, method: str) -> None:
        plain: Callable[..., Any] = getattr(kind, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            dawdle()
            return plain(*args, **kwargs)

        monkeypatch.setattr(kind, method, call)

    for kind, method in ((CpuDevice, "copy"), (CpuDevice, "start_sweep"), (Store, "start_read"),
                         (Store, "start_write"), (SplitModel, "layer")):  # fmt: skip
        late(kind, method)


def random_way(seed: int, blocks: int) -> Way:
    drawn = random.Random(seed)
    rows = []
    for _ in range(blocks):
        row = "hhh" if drawn.random() < 0.2 else "".join(drawn.choices("dn", k=3))
        rows.append(row + drawn.choice("dnh"))
    ahead = drawn.randint(1, 3)
    plan = {"rounds": drawn.randint(1, 3), "ahead": ahead, "slots": ahead + drawn.randint(1, 2),
            "piece": drawn.choice((4096, 8192, 1 << 26))}  # fmt: skip
    store = {
        "engine": drawn.choice(("threads", "io_uring", "auto")),
        "workers": drawn.randint(1, 3),
    }
    if store["engine"] == "io_uring":
        store["engine"] = "auto"  # where there is one
    return Way(f"drawn by {seed}", tuple(rows), plan, store, threads=drawn.randint(1, 3))


def thin_setup() -> Setup:
    """Little to compute for what there is to move: rows of three tokens."""
    return Setup.of("llama", context=3, batch=4, micro_batch=1)
