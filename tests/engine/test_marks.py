"""Threads that wait for one another's marks: everybody is woken, once, whatever ends the wait."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from penstock.engine import marks as marks_module
from penstock.engine.device import Moment
from penstock.engine.marks import Marks, StoppedError


def beside(*calls: Callable[[], object]) -> list[object]:
    """What each has returned or raised, all at the same time."""
    found: list[object] = [None] * len(calls)

    def run(at: int) -> None:
        try:
            found[at] = calls[at]()
        except BaseException as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "somebody still waits"
    return found


def test_several_wait_for_one_mark() -> None:
    marks, mark = Marks(), Moment()
    found = beside(*[lambda: marks.get("a")] * 3, lambda: marks.put("a", mark))

    assert found == [mark, mark, mark, None]
    assert marks.waiting() == []


def test_a_failure_wakes_those_who_wait_for_anything() -> None:
    marks = Marks()
    waits = [lambda key=key: marks.get(key) for key in "abc"]
    found = beside(*waits, lambda: marks.fail(ValueError("broken")))

    assert all(isinstance(each, StoppedError) for each in found[:3])
    assert str(marks.failed) == "broken"


def test_what_is_there_is_not_given_after_a_failure() -> None:
    marks = Marks()
    marks.put("a", Moment())
    marks.fail(ValueError("broken"))

    with pytest.raises(StoppedError):
        marks.get("a")


@pytest.mark.parametrize("ends", ["put", "fail"])
def test_who_sleeps_is_woken_and_need_not_look(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks_module, "SLICE", 600.0)
    marks = Marks()

    def end() -> None:
        while "a" not in marks._asleep:
            pass
        marks.put("a", Moment()) if ends == "put" else marks.fail(ValueError("broken"))

    beside(lambda: marks.get("a"), end)


def test_a_sleeper_that_nobody_woke_looks_for_itself() -> None:
    """As when Ctrl-C comes after the mark is there and before anybody is told."""
    marks, mark = Marks(), Moment()

    def put_and_die() -> None:
        while "a" not in marks._asleep:
            pass
        with marks._lock:
            marks._found["a"] = mark
            del marks._asleep["a"]

    assert beside(lambda: marks.get("a"), put_and_die)[0] is mark


@pytest.mark.parametrize("seed", range(30))
def test_lanes_that_fail_at_once_leave_nobody_behind(seed: int) -> None:
    drawn = random.Random(seed)
    marks, ends = Marks(), drawn.randrange(40)

    def lane(own: int) -> None:
        try:
            for number in range(20):
                marks.put((own, number), Moment())
                if own * 20 + number == ends:
                    raise ValueError("broken")
                marks.get(((own + 1) % 4, drawn.randrange(number + 1)))
        except BaseException as error:
            marks.fail(error)
            raise

    found = beside(*[lambda own=own: lane(own) for own in range(4)])

    assert isinstance(marks.failed, ValueError)
    # A lane may have been through before the failure.
    assert all(each is None or isinstance(each, StoppedError | ValueError) for each in found)
