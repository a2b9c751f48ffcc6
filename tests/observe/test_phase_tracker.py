"""Steps and phases derived from calls that begin and end, with a clock that the test controls."""

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

EmittedPhase = tuple[str, int, float, float]
"""Name, step, start and end."""


class TrackedLoop:
    """A tracker, and the phases that it has emitted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.phases: list[EmittedPhase] = []
        self.steps: list[int] = []
        self.tracker = PhaseTracker(HostClock(0.0, lambda: self.now), self._add, self.steps.append)

    def _add(self, phase: PendingPhase) -> None:
        self.phases.append((phase.name, phase.step, phase.start.host, phase.end.host))

    def run(self, *calls: str) -> list[EmittedPhase]:
        """Make calls of one second each, one second apart; `a(b)` calls b inside a."""
        for call in calls:
            name, _, inner = call.rstrip(")").partition("(")
            self.tracker.enter(name)
            self.now += 1
            if inner:
                self.run(inner)
            self.tracker.leave()
            self.now += 1
        return self.phases

    def end(self) -> list[EmittedPhase]:
        self.tracker.close()
        return self.phases


def test_a_plain_loop_has_four_phases_per_step() -> None:
    loop = TrackedLoop()
    loop.run("data", "forward", "backward", "update", "data", "forward", "backward", "update")

    assert loop.end() == [
        ("data", 1, 0, 1),
        ("forward", 1, 2, 4),  # includes the loss
        ("backward", 1, 4, 5),
        ("update", 1, 5, 7),  # includes clipping
        ("data", 2, 8, 9),
        ("forward", 2, 10, 12),
        ("backward", 2, 12, 13),
        ("update", 2, 13, 15),
    ]
    assert loop.steps == [2]


def test_gradient_accumulation_is_one_step() -> None:
    loop = TrackedLoop()
    loop.run("forward", "backward", "forward", "backward", "update", "forward")

    assert [(name, step) for name, step, _, _ in loop.end()] == [
        ("forward", 1), ("backward", 1), ("forward", 1), ("backward", 1), ("update", 1),
        ("forward", 2),
    ]  # fmt: skip


def test_several_optimizer_calls_are_one_update() -> None:
    loop = TrackedLoop()
    loop.run("forward", "backward", "update", "update", "update", "forward")

    assert loop.end()[2:] == [("update", 1, 3, 9), ("forward", 2, 10, 11)]


def test_only_the_outermost_call_counts() -> None:
    loop = TrackedLoop()
    loop.run("forward(forward)", "backward(forward)", "update(forward)")

    assert [phase[0] for phase in loop.end()] == ["forward", "backward", "update"]


def test_evaluation_does_not_begin_a_step() -> None:
    loop = TrackedLoop()
    loop.run("forward", "backward", "update", "evaluate", "evaluate", "forward")

    assert [(name, step) for name, step, _, _ in loop.end()][3:] == [
        ("evaluate", 1),
        ("forward", 2),
    ]


def test_the_end_of_the_data_does_not_begin_a_step() -> None:
    loop = TrackedLoop()
    loop.run("forward", "backward", "update")
    loop.tracker.enter("data")
    loop.tracker.cancel()

    assert loop.tracker.step == 1
    assert [phase[0] for phase in loop.end()] == ["forward", "backward", "update"]
    loop.run("forward")
    assert loop.tracker.step == 2


def test_an_unseen_forward_is_inferred_from_its_backward() -> None:
    loop = TrackedLoop()
    loop.run("backward", "update", "backward", "backward")

    assert loop.end() == [
        ("backward", 1, 0, 1), ("update", 1, 1, 3), ("forward", 2, 3, 4), ("backward", 2, 4, 5),
        ("forward", 2, 5, 6), ("backward", 2, 6, 7),
    ]  # fmt: skip
    assert loop.tracker.unseen_forwards == 3


def test_an_update_that_raised_does_not_hide_what_follows() -> None:
    loop = TrackedLoop()
    loop.tracker.enter("update", owner=7)  # an exception: it never leaves
    loop.now += 1
    loop.tracker.enter("update", owner=7)
    loop.now += 1
    loop.tracker.leave()
    loop.run("forward")

    assert [phase[0] for phase in loop.end()] == ["update", "forward"]


def test_named_phases_replace_the_phases_inside() -> None:
    loop = TrackedLoop()
    for _ in range(2):
        with loop.tracker.named_phase("forward"):
            loop.run("forward")
        with loop.tracker.named_phase("update"):
            loop.run("backward", "update")

    assert loop.end() == [
        ("forward", 1, 0, 2), ("update", 1, 2, 6), ("forward", 2, 6, 8), ("update", 2, 8, 12),
    ]  # fmt: skip


def test_steps_that_the_user_counts_are_not_counted_twice() -> None:
    loop = TrackedLoop()
    for _ in range(3):
        loop.run("forward", "backward", "update", "update")
        loop.tracker.next_step()
        loop.run("evaluate")

    assert loop.steps == [2, 3, 4]
    assert [step for name, step, _, _ in loop.end() if name == "update"] == [1, 2, 3]


def test_other_threads_are_ignored_until_the_training_thread_ends() -> None:
    loop = TrackedLoop()

    def elsewhere() -> None:
        loop.run("forward", "backward", "update")

    loop.run("forward")
    other = threading.Thread(target=elsewhere)
    other.start()
    other.join()
    loop.run("backward")
    assert [phase[0] for phase in loop.end()] == ["forward", "backward"]

    fresh = TrackedLoop()
    for _ in range(2):
        thread = threading.Thread(target=fresh.run, args=("forward", "backward", "update"))
        thread.start()
        thread.join()
    assert [(phase[0], phase[1]) for phase in fresh.end()][::3] == [("forward", 1), ("forward", 2)]


def test_the_current_phase_is_known_immediately() -> None:
    loop = TrackedLoop()
    tracker = loop.tracker
    tracker.enter("forward")
    assert tracker.phase == "forward"
    tracker.leave()
    assert tracker.phase == "forward"  # the loss belongs to forward
    tracker.enter("backward")
    assert tracker.phase == "backward"
    tracker.leave()
    assert tracker.phase is None


# A GPU that is behind the host.


class FakeEvent:
    """An event in a stream that the GPU reaches `lag` seconds after the host recorded it."""

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
