"""Optimizer sweeps outside steps: they are recorded, and belong to no step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from penstock.observe.findings import find
from penstock.observe.hardware import disk_name
from penstock.observe.measures import measure
from penstock.observe.records import Event, RecordedRun
from penstock.observe.run_files import read_run
from penstock.plan.build_schedule import sweep_schedule
from penstock.plan.traffic import step_traffic
from tests.equivalence.runs import WAYS, Setup, Way
from tests.observe.synthetic_runs import streamed, with_separate_sweeps

STEPS = 4


def bytes_per_link(events: list[Event]) -> Counter[str]:
    found: Counter[str] = Counter()
    for event in events:
        if event.link is not None and event.nbytes is not None:
            found[event.link] += event.nbytes
    return found


@pytest.mark.parametrize("way", [WAYS[3], WAYS[8]], ids=lambda way: way.name)
def test_a_separate_sweep_is_recorded_to_the_byte_and_changes_no_step(
    way: Way, tmp_path: Path
) -> None:
    setup, disk = Setup.of("llama"), tmp_path / "disk"
    disk.mkdir()
    with setup.engine(way, disk) as engine, penstock.observe(tmp_path / "run"):
        for batch in setup.batches(STEPS):
            engine.step(batch)
        before = engine._memory.store.stats
        engine.finish()
        after = engine._memory.store.stats
        placement = engine.plan.placement
    run = read_run(tmp_path / "run")

    separate = [event for event in run.events if event.step is None]
    planned = step_traffic(
        setup.model, setup.work, placement, sweep_schedule(setup.model, placement)
    )
    names = {f"disk:{disk}": f"disk:{disk_name(str(disk))}"}
    assert bytes_per_link(separate) == {
        names.get(link, link): nbytes for link, nbytes in planned.items()
    }
    moved = (after.read_nbytes - before.read_nbytes) + (
        after.written_nbytes - before.written_nbytes
    )
    assert bytes_per_link(separate)[names[f"disk:{disk}"]] == moved > 0
    assert {event.kind for event in separate} >= {"read", "write", "sweep"}
    (phase,) = (phase for phase in run.phases if phase.name == "update")
    assert {event.phase for event in separate} == {"update"}
    assert all(phase.start <= e.start <= e.end <= phase.end + 1e-6 for e in separate)
    assert_same_steps(run, replace(run, events=tuple(e for e in run.events if e.step is not None)))


def assert_same_steps(run: RecordedRun, other: RecordedRun) -> None:
    one, two = measure(run), measure(other)
    assert (one.steps, one.usages, one.links, one.waits) == (
        two.steps,
        two.usages,
        two.links,
        two.waits,
    )
    assert (one.busy, one.bottleneck, one.shown) == (two.busy, two.bottleneck, two.shown)


def sweep_event(step: int, nbytes: int = 7) -> Event:
    """An event in the sweep at the end of a step of `with_separate_sweeps`."""
    start = 1.5 * step + 1.2
    return Event("node0", "sweep", "layer", start, start + 0.3, None, "update", "node0", nbytes)


def test_bytes_without_a_step_count_for_the_step_around_them() -> None:
    run = streamed()
    once = with_separate_sweeps(run, 7)
    assert_same_steps(replace(once, events=(*once.events, sweep_event(7))), once)
    every = with_separate_sweeps(run, *range(8))  # so the sweeps are part of the steps
    more = replace(every, events=(*every.events, *(sweep_event(step) for step in range(8))))

    assert measure(more).links["node0"].nbytes == 7
    assert "node0" not in measure(every).links


def test_separate_sweeps_are_reported() -> None:
    once = with_separate_sweeps(streamed(), 7)
    read = replace(sweep_event(7), track="disk:vda", kind="read", link="disk:vda", nbytes=3000)
    one = replace(once, events=(*once.events, sweep_event(7), read))
    twice = with_separate_sweeps(streamed(), 3, 7)
    two = replace(twice, events=(*twice.events, sweep_event(3), sweep_event(7)))

    def texts(run: RecordedRun) -> list[str]:
        return [f.text for f in find(measure(run)) if f.kind == "swept-apart"]

    assert texts(one) == [
        "1 optimizer sweep ran outside steps and took 300 ms, with 3.00 kB of reads from vda"
    ]
    assert texts(two) == ["2 optimizer sweeps ran outside steps and took 300 ms each"]
    assert texts(once) == []  # without recorded events
    every = with_separate_sweeps(streamed(), *range(8))
    assert texts(replace(every, events=(*every.events, sweep_event(7)))) == []
