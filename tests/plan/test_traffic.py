"""What the schedule says an operation moves is what the engine moves, to the byte."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.device import CpuDevice
from penstock.engine.engine import Engine
from penstock.plan.build_schedule import step_schedule, sweep_schedule
from penstock.plan.schedule import Verb
from penstock.plan.traffic import step_traffic
from tests.equivalence.runs import DISK, WAYS, Setup, Way


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that the lanes copied between host and device, by direction."""
    found: Counter[str] = Counter()
    plain = CpuDevice.copy

    def copy(this: CpuDevice, into: torch.Tensor, source: torch.Tensor) -> None:
        _, _, lane = threading.current_thread().name.partition(" ")
        direction = {"fetch": "h2d", "drain": "d2h"}.get(lane.split(" ")[0])
        if direction is not None:
            found[direction] += source.numel() * source.element_size()
        plain(this, into, source)

    monkeypatch.setattr(CpuDevice, "copy", copy)
    return found


GRID: list[tuple[Way, dict[str, Any]]] = [
    *((way, {}) for way in (WAYS[0], WAYS[1], WAYS[3], WAYS[6], WAYS[8])),
    (DISK, {"moments": "int8"}),
    (WAYS[8], {"accumulate": True, "dtype": "fp16"}),
]


@pytest.mark.parametrize(
    ("way", "work"), GRID, ids=[f"{way.name} {' '.join(map(str, w.values()))}" for way, w in GRID]
)
def test_bytes_per_link_are_those_that_were_moved_and_planned(
    way: Way, work: dict[str, Any], tmp_path: Path, copied: Counter[str]
) -> None:
    setup = Setup.of("llama", **work)
    first, second = setup.batches(2)
    with setup.engine(way, tmp_path) as engine:
        engine.step(first)  # which has nothing to sweep
        before, on_disk = Counter(copied), disk_counters(engine)
        engine.forward_backward(second)
        seen, after = told(engine), disk_counters(engine)
        placement = engine.plan.placement
        schedule = step_schedule(setup.model, placement)
        planned = step_traffic(setup.model, setup.work, placement, schedule)

        assert seen["h2d"] == copied["h2d"] - before["h2d"] == planned.get("h2d", 0)
        assert seen["d2h"] == copied["d2h"] - before["d2h"] == planned.get("d2h", 0)
        assert (seen["read"], seen["written"]) == (after[0] - on_disk[0], after[1] - on_disk[1])
        assert seen["read"] + seen["written"] == planned.get(f"disk:{tmp_path}", 0)


@pytest.mark.parametrize(
    ("way", "work"), GRID, ids=[f"{way.name} {' '.join(map(str, w.values()))}" for way, w in GRID]
)
def test_a_sweep_apart_moves_what_is_told_of_it(
    way: Way, work: dict[str, Any], tmp_path: Path, copied: Counter[str]
) -> None:
    setup = Setup.of("llama", **work)
    with setup.engine(way, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        before, on_disk = Counter(copied), disk_counters(engine)
        engine.finish()
        seen, after = told(engine), disk_counters(engine)
        placement = engine.plan.placement
        schedule = sweep_schedule(setup.model, placement)
        planned = step_traffic(setup.model, setup.work, placement, schedule)

        assert copied == before
        assert (seen["h2d"], seen["d2h"]) == (0, 0)
        assert (seen["read"], seen["written"]) == (after[0] - on_disk[0], after[1] - on_disk[1])
        assert seen["read"] + seen["written"] == planned.get(f"disk:{tmp_path}", 0)
        assert sum(seen.values()) == sum(planned.values())


@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[3]], ids=lambda way: way.name)
def test_what_a_failed_run_has_swept_is_not_told_again(way: Way, tmp_path: Path) -> None:
    setup = Setup.of("llama")
    with setup.engine(way, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        sweeps = [op for op in engine._programs.sweep.operations if op.verb is Verb.SWEEP]
        assert engine._pending is not None
        engine._pending.done.add((sweeps[0].block, sweeps[0].piece))  # as a failure leaves it
        engine.finish()
        told_of = [e.operation for e in engine.timeline() if e.operation.verb is Verb.SWEEP]

        assert engine._pending is None
    assert sorted(map(str, told_of)) == sorted(map(str, sweeps[1:]))


def told(engine: Engine) -> Counter[str]:
    found: Counter[str] = Counter()
    for event in engine.timeline():
        for transfer in event.transfers:
            link = transfer.link
            if link.startswith("disk:"):
                link = "read" if transfer.source == "disk" else "written"
            found[link] += transfer.nbytes
    return found


def disk_counters(engine: Engine) -> tuple[int, int]:
    store = engine._memory.tiers.store
    return (store.stats.read_nbytes, store.stats.written_nbytes) if store else (0, 0)


def test_a_sweep_is_counted_on_the_nodes_it_touches(tmp_path: Path) -> None:
    setup = Setup.of("llama")
    with setup.engine(WAYS[1], tmp_path) as engine:
        for batch in setup.batches(2):
            engine.step(batch)
        swept = [e for e in engine.timeline() if e.operation.verb is Verb.SWEEP]

    elements = sum(block.flat_elements(True) for block in setup.model.blocks)
    moved = {t.link: 0 for e in swept for t in e.transfers}
    for transfer in (t for e in swept for t in e.transfers):
        moved[transfer.link] += transfer.nbytes
    # Weight, low half, two moments: read and written; the gradient: read.
    assert list(moved.values()) == [elements * (2 * 12 + 2)]
