"""What the training loop tells the user about memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.train.loop import TrainingLoop
from penstock.units import GiB


def test_memory_above_the_plan_is_reported_once() -> None:
    notes: list[str] = []
    loop: Any = SimpleNamespace(_exceeded=set(), _listeners=SimpleNamespace(note=notes.append))
    within = {"dram": {"planned": GiB, "peak": GiB}}
    above = {"hbm": {"planned": GiB, "peak": 3 * GiB}, "host": {"planned": GiB, "peak": 2 * GiB}}

    for _ in range(2):
        TrainingLoop._note_excess(loop, within | above)

    hbm, host = notes
    assert hbm.startswith("hbm: 3.00 GiB in use, 2.00 GiB more than the planned 1.00 GiB")
    assert host.startswith("host: 2.00 GiB in use, 1.00 GiB more than the planned 1.00 GiB")
    assert "penstock probe" in host
