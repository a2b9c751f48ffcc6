"""The selection of steps whose events are kept."""

from __future__ import annotations

from pathlib import Path

from penstock.observe.records import Event
from penstock.observe.run_files import RunFolder, read_run
from penstock.observe.step_selector import MakeEvents, StepSelector
from tests.observe.synthetic_runs import observation


def event_maker(step: int | None, number: int) -> MakeEvents:
    return lambda: [Event("gpu", "compute", str(number), float(number), number + 0.5, step)]


def test_a_sweep_after_a_step_is_kept_once_with_the_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, observation())
    selector = StepSelector(folder)
    selector.follow(event_maker(None, 0))  # its step ended before the recording began
    for number in range(1, 21):
        seconds = 9.0 if number in (2, 10, 20) else 1.0
        selector.add(number, seconds, event_maker(number, number), now=0.1 * number)
        selector.follow(event_maker(None, number))
    selector.close()
    folder.close()

    events = read_run(tmp_path).events
    kept = [1, 2, 3, 10, 18, 19, 20]
    assert [int(e.name) for e in events if e.step is not None] == kept
    assert sorted(int(e.name) for e in events if e.step is None) == [0, *kept]
