"""The engine moves exactly the bytes that plan/traffic computes for each operation."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.device import CpuDevice
from penstock.engine.engine import Engine
from penstock.plan.build_schedule import step_schedule, sweep_schedule
from penstock.plan.placement import Share
from penstock.plan.schedule import Operation, Verb
from penstock.plan.traffic import Traffic, _disk_transfers, step_disk_writes, step_traffic
from penstock.planner.candidate import Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.roles import TRAINED
from penstock.tiers import Tier
from tests.equivalence.runs import DISK, HYBRID, RESIDENT, WAYS, Setup, Way
from tests.support.schedule_checker import WHOLE, all_on, evaluator_for


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the bytes that lanes copy between host and device, by direction."""
    nbytes: Counter[str] = Counter()
    original = CpuDevice.copy

    def copy(this: CpuDevice, into: torch.Tensor, source: torch.Tensor) -> None:
        _, _, lane = threading.current_thread().name.partition(" ")
        direction = {"fetch": "h2d", "drain": "d2h"}.get(lane.split(" ")[0])
        if direction is not None:
            nbytes[direction] += source.numel() * source.element_size()
        original(this, into, source)

    monkeypatch.setattr(CpuDevice, "copy", copy)
    return nbytes


GRID: list[tuple[Way, dict[str, Any]]] = [
    *((way, {}) for way in (WAYS[0], WAYS[1], WAYS[3], WAYS[6], WAYS[8])),
    (DISK, {"moments": "int8"}),
    (WAYS[8], {"accumulate": True, "dtype": "fp16"}),
    (HYBRID[0], {}),
    (HYBRID[2], {"moments": "int8"}),
]


@pytest.mark.parametrize(
    ("way", "work"), GRID, ids=[f"{way.name} {' '.join(map(str, w.values()))}" for way, w in GRID]
)
def test_recorded_bytes_equal_the_copied_and_the_planned_ones(
    way: Way, work: dict[str, Any], tmp_path: Path, copied: Counter[str]
) -> None:
    setup = Setup.of("llama", **work)
    first, second = setup.batches(2)
    with setup.engine(way, tmp_path) as engine:
        engine.step(first)  # the first step has nothing to sweep
        before, on_disk = Counter(copied), disk_counters(engine)
        engine.forward_backward(second)
        seen, after = recorded_bytes(engine), disk_counters(engine)
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
def test_a_separate_sweep_moves_the_planned_bytes(
    way: Way, work: dict[str, Any], tmp_path: Path, copied: Counter[str]
) -> None:
    setup = Setup.of("llama", **work)
    with setup.engine(way, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        before, on_disk = Counter(copied), disk_counters(engine)
        engine.finish()
        seen, after = recorded_bytes(engine), disk_counters(engine)
        placement = engine.plan.placement
        schedule = sweep_schedule(setup.model, placement)
        planned = step_traffic(setup.model, setup.work, placement, schedule)

        for link in ("h2d", "d2h"):
            assert seen[link] == copied[link] - before[link] == planned.get(link, 0)
        assert (seen["read"], seen["written"]) == (after[0] - on_disk[0], after[1] - on_disk[1])
        assert seen["read"] + seen["written"] == planned.get(f"disk:{tmp_path}", 0)
        assert sum(seen.values()) == sum(planned.values())


@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[3], HYBRID[0]], ids=lambda way: way.name)
def test_a_sweep_that_ran_before_a_failure_is_not_recorded_again(way: Way, tmp_path: Path) -> None:
    setup = Setup.of("llama")
    with setup.engine(way, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        sweeps = [op for op in engine._programs["sweep"].operations if op.verb is Verb.SWEEP]
        assert engine._pending is not None
        # This is the state that a failure leaves behind.
        engine._pending.done.add((sweeps[0].block, sweeps[0].piece))
        engine.finish()
        recorded = [e.operation for e in engine.timeline() if e.operation.verb is Verb.SWEEP]

        assert engine._pending is None
    assert sorted(map(str, recorded)) == sorted(map(str, sweeps[1:]))


def recorded_bytes(engine: Engine) -> Counter[str]:
    """Return the bytes in the engine's timeline, by link."""
    nbytes: Counter[str] = Counter()
    for event in engine.timeline():
        for transfer in event.transfers:
            link = transfer.link
            if link.startswith("disk:"):
                link = "read" if transfer.source == "disk" else "written"
            nbytes[link] += transfer.nbytes
    return nbytes


def disk_counters(engine: Engine) -> tuple[int, int]:
    store = engine._memory.tiers.store
    return (store.stats.read_nbytes, store.stats.written_nbytes) if store else (0, 0)


def test_a_sweep_counts_for_the_nodes_it_touches(tmp_path: Path) -> None:
    setup = Setup.of("llama")
    with setup.engine(WAYS[1], tmp_path) as engine:
        for batch in setup.batches(2):
            engine.step(batch)
        swept = [e for e in engine.timeline() if e.operation.verb is Verb.SWEEP]

    elements = sum(block.flat_elements(True) for block in setup.model.blocks)
    moved = {t.link: 0 for e in swept for t in e.transfers}
    for transfer in (t for e in swept for t in e.transfers):
        moved[transfer.link] += transfer.nbytes
    # Weights, remainders and two moments are read and written; gradients are read.
    assert list(moved.values()) == [elements * (2 * 12 + 2)]


# Writes to NVMe, which wear drives.


def disk_writes(evaluator: PlanEvaluator, rounds: int = 1) -> int:
    candidate = replace(all_on(evaluator, Location.NVME), rounds=rounds)
    placement = evaluator.placement(candidate)
    schedule = step_schedule(evaluator.inventory, placement)
    return sum(
        step_disk_writes(evaluator.inventory, evaluator.workload, placement, schedule).values()
    )


@pytest.mark.parametrize("piece", [WHOLE, 1 << 16])
def test_a_step_writes_everything_on_nvme_once(piece: int) -> None:
    evaluator = evaluator_for(layers=3, tied=False, piece=piece)

    stored = evaluator.stored_nbytes(all_on(evaluator, Location.NVME))
    assert disk_writes(evaluator) == stored[Tier.NVME]


def test_a_copy_covers_its_role_and_a_sweep_everything_that_is_trained() -> None:
    evaluator = evaluator_for(layers=3, tied=False)
    placement = evaluator.placement(all_on(evaluator, Location.DRAM))
    traffic = Traffic.of(evaluator.inventory, evaluator.workload, placement)

    def covered(verb: Verb) -> float:
        schedule = step_schedule(evaluator.inventory, placement)
        op = next(op for op in schedule.operations if op.verb is verb and op.block == 1)
        return sum(part.nbytes for part in traffic.stored_parts(op))

    groups = [evaluator.group_nbytes(1, group, 1) for group in ("weight", "state", "gradient")]
    assert covered(Verb.FETCH) == groups[0]
    assert covered(Verb.SWEEP) == sum(groups)


def test_each_round_writes_gradients_and_activations_again() -> None:
    evaluator = evaluator_for(layers=3, tied=False)
    blocks = range(len(evaluator.inventory.blocks))

    def stored(*groups: str) -> int:
        return sum(evaluator.group_nbytes(i, group, 2) for i in blocks for group in groups)

    activations = sum(evaluator.group_nbytes(i, "activation", 2) for i in blocks[1:-1])
    expected = stored("weight", "state") + 2 * (stored("gradient") + activations)
    assert disk_writes(evaluator, rounds=2) == expected


def test_frozen_weights_are_not_written() -> None:
    evaluator = evaluator_for(layers=3, tied=False, frozen=15)  # all tensors
    activations = 3 * evaluator.group_nbytes(1, "activation", 1)

    locations = tuple(
        each._replace(state=None, gradient=None)
        for each in all_on(evaluator, Location.NVME).locations
    )
    placement = evaluator.placement(Candidate(locations))
    schedule = step_schedule(evaluator.inventory, placement)
    writes = step_disk_writes(evaluator.inventory, evaluator.workload, placement, schedule)
    assert sum(writes.values()) == activations


@pytest.mark.parametrize("freeze", [(), ("*.layers.1.mlp.*",)], ids=["trained", "partly frozen"])
def test_a_sweep_on_the_gpu_touches_what_is_trained(
    freeze: tuple[str, ...], tmp_path: Path
) -> None:
    """Per element: weight, master weight and moments are read and written, the gradient read."""
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    setup = Setup.of("llama", freeze=freeze, config=wide)
    plan = setup.plan(RESIDENT, tmp_path)
    block = next(i for i, b in enumerate(setup.model.blocks) if "layers.1" in b.name)
    sweep = Operation(Verb.SWEEP, block, TRAINED, "forward", gpu=True)

    nbytes = Traffic.of(setup.model, setup.work, plan.placement).gpu_sweep_nbytes(sweep)

    trained = setup.model.blocks[block].parameters(trainable=True)
    assert trained < setup.model.blocks[block].parameters() or not freeze
    # A little more than the bytes of the elements: tensors are stored in whole pages.
    assert nbytes == pytest.approx((2 * (2 + 2 + 4 + 4) + 2) * trained, rel=0.03)


@pytest.mark.parametrize("nbytes", [10, 1_000_003])
def test_bytes_of_a_stripe_are_divided_over_its_disks_to_the_byte(nbytes: int) -> None:
    shares = [
        Share(tier=Tier.NVME, nbytes=size, path=path)
        for path, size in (("/a", 3 * 4096), ("/b", 2 * 4096), ("/c", 5 * 4096))
    ]
    host = Share(tier=Tier.DRAM, nbytes=4096, node=0)
    for reads, ends in ((True, ("disk", "host")), (False, ("host", "disk"))):
        found = list(_disk_transfers([host, *shares], nbytes, reads=reads))
        assert [t.link[-2:] for t in found] == ["/a", "/b", "/c"]
        first, second = nbytes * 3 // 10, nbytes * 2 // 10
        assert [t.nbytes for t in found] == [first, second, nbytes - first - second]
        assert {(t.source, t.target) for t in found} == {ends}
