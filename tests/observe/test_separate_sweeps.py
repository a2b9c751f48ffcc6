"""What an engine sweeps apart from its steps is recorded, and is no step's."""

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
from tests.observe.synthetic_runs import finishing, streamed

STEPS = 4


def links(events: list[Event]) -> Counter[str]:
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

    apart = [event for event in run.events if event.step is None]
    planned = step_traffic(
        setup.model, setup.work, placement, sweep_schedule(setup.model, placement)
    )
    names = {f"disk:{disk}": f"disk:{disk_name(str(disk))}"}
    assert links(apart) == {names.get(link, link): nbytes for link, nbytes in planned.items()}
    moved = (after.read_nbytes - before.read_nbytes) + (
        after.written_nbytes - before.written_nbytes
    )
    assert links(apart)[names[f"disk:{disk}"]] == moved > 0
    assert {event.kind for event in apart} >= {"read", "write", "sweep"}
    (phase,) = (phase for phase in run.phases if phase.name == "update")
    assert {event.phase for event in apart} == {"update"}
    assert all(phase.start <= e.start <= e.end <= phase.end + 1e-6 for e in apart)
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


def swept(step: int, nbytes: int = 7) -> Event:
    """At the end of a step of `finishing`."""
    start = 1.5 * step + 1.2
    return Event("node0", "sweep", "layer", start, start + 0.3, None, "update", "node0", nbytes)


def test_bytes_without_a_step_count_for_the_step_around_them() -> None:
    run = streamed()
    once = finishing(run, 7)
    assert_same_steps(replace(once, events=(*once.events, swept(7))), once)
    every = finishing(run, *range(8))  # the sweeps are then within the steps
    more = replace(every, events=(*every.events, *(swept(step) for step in range(8))))

    assert measure(more).links["node0"].nbytes == 7
    assert "node0" not in measure(every).links


def test_separate_sweeps_are_reported() -> None:
    once = finishing(streamed(), 7)
    read = replace(swept(7), track="disk:vda", kind="read", link="disk:vda", nbytes=3000)
    one = replace(once, events=(*once.events, swept(7), read))
    twice = finishing(streamed(), 3, 7)
    two = replace(twice, events=(*twice.events, swept(3), swept(7)))

    def told(run: RecordedRun) -> list[str]:
        return [f.text for f in find(measure(run)) if f.kind == "swept-apart"]

    assert told(one) == [
        "1 optimizer sweep ran outside steps and took 300 ms, with 3.00 kB of reads from vda"
    ]
    assert told(two) == ["2 optimizer sweeps ran outside steps and took 300 ms each"]
    assert told(once) == []  # a run that did not record it
    every = finishing(streamed(), *range(8))
    assert told(replace(every, events=(*every.events, swept(7)))) == []
