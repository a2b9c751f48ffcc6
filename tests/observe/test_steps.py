"""Steps and phases of a run."""

from __future__ import annotations

from hypothesis import given

from penstock.observe.records import Event, Phase, Sample
from penstock.observe.steps import UNNAMED, find_steps, flatten_phases, typical_step
from tests.observe.synthetic_runs import make_run
from tests.observe.test_intervals import SPANS, ticks


@given(SPANS)
def test_flattened_phases_neither_overlap_nor_lose_time(spans: list) -> None:  # type: ignore[type-arg]
    phases = [Phase(str(at), 0, a, b) for at, (a, b) in enumerate(spans)]

    segments = flatten_phases(phases)

    assert sum(s.end - s.start for s in segments) == len(ticks(spans))
    for segment in segments:
        latest = max(p.start for p in phases if p.start <= segment.start < p.end)
        assert next(p for p in phases if p.name == segment.name).start == latest


def test_a_step_ends_where_the_next_step_or_a_save_begins() -> None:
    phases = [
        Phase("forward", 0, 0.0, 1.0), Phase("save", 0, 2.0, 9.0), Phase("forward", 1, 10.0, 11.0),
        Phase("forward", 2, 12.0, 13.0), Phase("forward", 9, 50.0, 51.0),
    ]  # fmt: skip
    steps = find_steps(make_run(phases, [], []))

    assert [(s.number, s.start, s.end) for s in steps] == [
        (0, 0.0, 2.0), (1, 10.0, 12.0), (2, 12.0, 13.0), (9, 50.0, 51.0),
    ]  # fmt: skip
    assert steps[0].during(UNNAMED) == [(1.0, 2.0)]


def test_steps_come_from_events_or_samples_if_no_phase_has_a_step() -> None:
    events = [Event("gpu", "kernel", "k", float(n), n + 0.5, n) for n in range(3)]
    samples = [Sample(t=float(n), step=n // 2) for n in range(6)]

    assert len(find_steps(make_run([], events, samples))) == 3
    assert [s.start for s in find_steps(make_run([], [], samples))] == [0.0, 2.0, 4.0]


def test_the_typical_step_is_neither_the_first_nor_the_slowest() -> None:
    lengths = [9.0, 1.0, 1.1, 5.0, 1.05]
    phases, at = [], 0.0
    for number, seconds in enumerate(lengths):
        phases.append(Phase("forward", number, at, at + seconds))
        at += seconds

    shown = typical_step(find_steps(make_run(phases, [], [])))
    assert shown is not None
    assert shown.number in (2, 4)
