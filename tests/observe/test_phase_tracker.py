"""Steps and phases, from what is told to begin and end: by a clock that the test winds."""

from __future__ import annotations

import threading

import pytest

from penstock.observe.phase_tracker import (
    HostClock,
    PendingPhase,
    PhaseTracker,
    Timestamp,
    TorchClock,
)

Line = tuple[str, int, float, float]


class Told:
    """A tracker, and what it made of what it was told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[Line] = []
        self.steps: list[int] = []
        self.tracker = PhaseTracker(HostClock(0.0, lambda: self.now), self._hear, self.steps.append)

    def _hear(self, stretch: PendingPhase) -> None:
        self.lines.append((stretch.name, stretch.step, stretch.start.host, stretch.end.host))

    def run(self, *calls: str) -> list[Line]:
        """Each call takes one second, with one second between; `a(b)` has b inside."""
        for call in calls:
            name, _, inner = call.rstrip(")").partition("(")
            self.tracker.enter(name)
            self.now += 1
            if inner:
                self.run(inner)
            self.tracker.leave()
            self.now += 1
        return self.lines

    def end(self) -> list[Line]:
        self.tracker.close()
        return self.lines


def test_a_plain_loop_has_four_phases_per_step() -> None:
    told = Told()
    told.run("data", "forward", "backward", "update", "data", "forward", "backward", "update")

    assert told.end() == [
        ("data", 1, 0, 1),
        ("forward", 1, 2, 4),  # with the loss
        ("backward", 1, 4, 5),
        ("update", 1, 5, 7),  # with clipping
        ("data", 2, 8, 9),
        ("forward", 2, 10, 12),
        ("backward", 2, 12, 13),
        ("update", 2, 13, 15),
    ]
    assert told.steps == [2]


def test_gradient_accumulation_is_one_step() -> None:
    told = Told()
    told.run("forward", "backward", "forward", "backward", "update", "forward")

    assert [(name, step) for name, step, _, _ in told.end()] == [
        ("forward", 1), ("backward", 1), ("forward", 1), ("backward", 1), ("update", 1),
        ("forward", 2),
    ]  # fmt: skip


def test_several_optimizer_calls_are_one_update() -> None:
    told = Told()
    told.run("forward", "backward", "update", "update", "update", "forward")

    assert told.end()[2:] == [("update", 1, 3, 9), ("forward", 2, 10, 11)]


def test_only_the_outermost_call_counts() -> None:
    told = Told()
    told.run("forward(forward)", "backward(forward)", "update(forward)")

    assert [line[0] for line in told.end()] == ["forward", "backward", "update"]


def test_evaluation_does_not_begin_a_step() -> None:
    told = Told()
    told.run("forward", "backward", "update", "evaluate", "evaluate", "forward")

    assert [(name, step) for name, step, _, _ in told.end()][3:] == [
        ("evaluate", 1),
        ("forward", 2),
    ]


def test_the_end_of_the_data_does_not_begin_a_step() -> None:
    told = Told()
    told.run("forward", "backward", "update")
    told.tracker.enter("data")
    told.tracker.cancel()

    assert told.tracker.step == 1
    assert [line[0] for line in told.end()] == ["forward", "backward", "update"]
    told.run("forward")
    assert told.tracker.step == 2


def test_an_unseen_forward_is_inferred_from_its_backward() -> None:
    told = Told()
    told.run("backward", "update", "backward", "backward")

    assert told.end() == [
        ("backward", 1, 0, 1), ("update", 1, 1, 3), ("forward", 2, 3, 4), ("backward", 2, 4, 5),
        ("forward", 2, 5, 6), ("backward", 2, 6, 7),
    ]  # fmt: skip
    assert told.tracker.unseen_forwards == 3


def test_an_update_that_raised_does_not_hide_what_follows() -> None:
    told = Told()
    told.tracker.enter("update", owner=7)  # and never left
    told.now += 1
    told.tracker.enter("update", owner=7)
    told.now += 1
    told.tracker.leave()
    told.run("forward")

    assert [line[0] for line in told.end()] == ["update", "forward"]


def test_named_phases_replace_the_phases_inside() -> None:
    told = Told()
    for _ in range(2):
        with told.tracker.named_phase("forward"):
            told.run("forward")
        with told.tracker.named_phase("update"):
            told.run("backward", "update")

    assert told.end() == [
        ("forward", 1, 0, 2), ("update", 1, 2, 6), ("forward", 2, 6, 8), ("update", 2, 8, 12),
    ]  # fmt: skip


def test_steps_that_the_user_counts_are_not_counted_twice() -> None:
    told = Told()
    for _ in range(3):
        told.run("forward", "backward", "update", "update")
        told.tracker.next_step()
        told.run("evaluate")

    assert told.steps == [2, 3, 4]
    assert [step for name, step, _, _ in told.end() if name == "update"] == [1, 2, 3]


def test_other_threads_are_ignored_until_the_training_thread_ends() -> None:
    told = Told()

    def elsewhere() -> None:
        told.run("forward", "backward", "update")

    told.run("forward")
    other = threading.Thread(target=elsewhere)
    other.start()
    other.join()
    told.run("backward")
    assert [line[0] for line in told.end()] == ["forward", "backward"]

    fresh = Told()
    for _ in range(2):
        thread = threading.Thread(target=fresh.run, args=("forward", "backward", "update"))
        thread.start()
        thread.join()
    assert [(line[0], line[1]) for line in fresh.end()][::3] == [("forward", 1), ("forward", 2)]


def test_the_current_phase_is_known_immediately() -> None:
    told = Told()
    tracker = told.tracker
    tracker.enter("forward")
    assert tracker.phase == "forward"
    tracker.leave()
    assert tracker.phase == "forward"  # its loss
    tracker.enter("backward")
    assert tracker.phase == "backward"
    tracker.leave()
    assert tracker.phase is None


# A GPU that lags behind.


class FakeEvent:
    """An event in a stream: the GPU passes it `lag` seconds after the host did."""

    def __init__(self, host: float, lag: float, *, done: bool = True) -> None:
        self.at, self.done = host + lag, done

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) * 1e3


def test_a_timestamp_is_the_time_at_which_the_gpu_reached_it() -> None:
    clock = TorchClock(origin=100.0)
    clock._first = {0: Timestamp(101.0, FakeEvent(101.0, 0.0), 0)}

    assert clock.seconds(Timestamp(102.0, FakeEvent(102.0, 0.5), 0)) == pytest.approx(2.5)
    assert clock.seconds(Timestamp(102.0, FakeEvent(102.0, -0.5), 0)) == pytest.approx(
        2.0
    )  # clocks drift
    assert clock.seconds(Timestamp(102.0, FakeEvent(102.0, 0.5, done=False), 0)) is None
    assert clock.seconds(Timestamp(102.0)) == pytest.approx(2.0)


def test_the_clock_does_not_initialize_cuda() -> None:
    assert TorchClock(0.0).stamp().event is None
