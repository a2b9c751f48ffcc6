"""Lanes with random delays, and random plans."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.device import CpuDevice
from penstock.model.split import SplitModel
from penstock.optim.sweep import PreparedSweep
from penstock.storage.store import Store
from tests.equivalence.runs import Setup, Way

LONGEST = 0.004
"""Longest delay in seconds: several times the duration of an operation of a tiny model."""


def delay_lanes(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Delay copies, transfers, sweeps and computations at random, with a pace for each lane.

    An operation that should have waited for one of them, and did not, then finds wrong bytes.
    """
    rng, lock = random.Random(seed), threading.Lock()
    # Some lanes are never delayed, so that different lanes fall behind in different runs.
    pace: dict[str, float] = {}

    def delay() -> None:
        name = threading.current_thread().name
        with lock:
            slow = pace.setdefault(name, rng.choice((0.0, 0.5, 1.0)))
            seconds = slow * rng.random() * LONGEST if rng.random() < 0.4 else 0.0
        time.sleep(seconds)

    def delay_method(kind: type, method: str) -> None:
        plain: Callable[..., Any] = getattr(kind, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            delay()
            return plain(*args, **kwargs)

        monkeypatch.setattr(kind, method, call)

    for kind, method in ((CpuDevice, "copy"), (PreparedSweep, "start"), (Store, "start_read"),
                         (Store, "start_write"), (SplitModel, "layer")):  # fmt: skip
        delay_method(kind, method)


def random_way(seed: int, blocks: int) -> Way:
    """Return a random placement, schedule and store configuration."""
    rng = random.Random(seed)
    rows = []
    for _ in range(blocks):
        row = "hhh" if rng.random() < 0.2 else "".join(rng.choices("dn", k=3))
        rows.append(row + rng.choice("dnh"))
    ahead = rng.randint(1, 3)
    plan = {"rounds": rng.randint(1, 3), "ahead": ahead, "slots": ahead + rng.randint(1, 2),
            "piece": rng.choice((4096, 8192, 1 << 26)), "late": rng.random() < 0.5}  # fmt: skip
    if rng.random() < 0.5:
        plan["late_on_nvme"] = [at for at in range(blocks) if rng.random() < 0.7]
    in_host = [at for at, row in enumerate(rows) if row[:3] == "ddd"]
    if in_host and rng.random() < 0.5:
        plan |= {"gpu_swept": rng.sample(in_host, rng.randint(1, len(in_host))), "gpu_piece": 4096}
    store = {
        "engine": rng.choice(("threads", "io_uring", "auto")),
        "workers": rng.randint(1, 3),
    }
    if store["engine"] == "io_uring":
        store["engine"] = "auto"  # io_uring where the kernel has it
    return Way(f"random plan {seed}", tuple(rows), plan, store, threads=rng.randint(1, 3))


def thin_setup() -> Setup:
    """Return a setup that computes little for what it moves: rows of three tokens."""
    return Setup.of("llama", context=3, batch=4, micro_batch=1)
