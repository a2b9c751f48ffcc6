"""Resource usage of steps, from events."""

from __future__ import annotations

from hypothesis import given

from penstock.observe.intervals import total_length
from penstock.observe.records import Event, Phase
from penstock.observe.steps import find_steps
from penstock.observe.usage import step_usages
from tests.observe.synthetic_runs import make_run
from tests.observe.test_intervals import SPANS, ticks


@given(SPANS, SPANS, SPANS)
def test_usage_agrees_with_counting_seconds(
    gpu: list, copies: list, sweeps: list  # type: ignore[type-arg]
) -> None:  # fmt: skip
    events = [Event("gpu", "kernel", "k", a, b, 0) for a, b in gpu]
    events += [Event("h2d", "copy", "c", a, b, 0, link="h2d", nbytes=1) for a, b in copies]
    events += [Event("cpu sweep", "sweep", "s", a, b, 0) for a, b in sweeps]
    run = make_run([Phase("forward", 0, 0, 10), Phase("update", 0, 10, 25)], events, [])
    (use,) = step_usages(find_steps(run), run.events)
    whole = set(range(25))
    computing, copying, sweeping = (ticks(s) & whole for s in (gpu, copies, sweeps))

    assert use.seconds("gpu") == len(computing)
    assert use.hidden("h2d") == len(computing & copying)
    assert use.idle(["h2d"], "update") == (len(set(range(10, 25)) - copying), 15)
    waits = {names: total_length(spans) for names, spans in use.waits().items() if spans}
    idle = whole - computing
    counted = {
        (): len(idle - copying - sweeping),
        ("h2d",): len(idle & copying - sweeping),
        ("cpu sweep",): len(idle & sweeping - copying),
        ("cpu sweep", "h2d"): len(idle & sweeping & copying),
    }
    assert waits == {names: seconds for names, seconds in counted.items() if seconds}


def test_an_event_across_steps_is_busy_in_both_and_its_bytes_count_once() -> None:
    phases = [Phase("forward", n, float(n), n + 1.0) for n in range(2)]
    copy = Event("h2d", "copy", "w", 0.5, 1.25, 0, link="h2d", nbytes=8)
    late = Event("d2h", "copy", "g", 1.5, 1.75, 0, link="d2h", nbytes=3)
    first, second = step_usages(find_steps(make_run(phases, [], [])), [copy, late])

    assert (first.seconds("h2d"), second.seconds("h2d")) == (0.5, 0.25)
    assert (first.seconds("d2h"), second.seconds("d2h")) == (0.0, 0.25)
    assert (first.nbytes, second.nbytes) == ({"h2d": 8, "d2h": 3}, {})
