"""Determine which step and phase a training loop is in, and when each phase began and ended.

Hooks report when forward, backward and similar calls begin and end. The tracker decides what that
means:

- only the outermost call counts, in the one thread that trains;
- consecutive calls of the same kind are one phase: the steps of several optimizers, or of one
  that is called for each part of a model;
- a forward phase lasts until its backward begins, so it includes the loss; an update begins where
  backward ended, so it includes gradient clipping;
- a step ends with its update: the next forward, backward or batch of data begins the next step.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

BEGINS_A_STEP = ("forward", "backward", "data")
"""Phases that begin a new step after an update."""

ENGINE = "engine"
"""What the tracker enters while a Penstock engine runs, which reports its own phases."""


class Timestamp(NamedTuple):
    """A moment on the host and, if the program uses a GPU, in the GPU's stream.

    A program runs ahead of its GPU: when `backward` returns, its kernels may not have started. So
    an event is recorded in the stream, which never waits, and the moment becomes a time once the
    GPU has passed the event.
    """

    host: float
    """Value of `time.perf_counter`."""

    event: Any = None
    """Event in the current CUDA stream; None without a GPU."""

    device: int = -1
    """Index of the event's GPU."""


class Clock(Protocol):
    """Takes timestamps and converts them to seconds."""

    def stamp(self) -> Timestamp:
        """Mark the current moment, behind everything that was issued so far."""

    def seconds(self, timestamp: Timestamp) -> float | None:
        """Return the seconds since the origin, or None if the GPU has not reached it yet."""


class HostClock:
    """A clock for programs without a GPU."""

    def __init__(self, origin: float, now: Callable[[], float] = time.perf_counter) -> None:
        self.origin, self._now = origin, now

    def stamp(self) -> Timestamp:
        return Timestamp(self._now())

    def seconds(self, timestamp: Timestamp) -> float | None:
        return timestamp.host - self.origin


class TorchClock(HostClock):
    """A clock that also uses the GPU once the program has initialized CUDA.

    It never initializes CUDA itself, which would take memory and change the observed program.
    """

    def __init__(self, origin: float, now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(origin, now)
        self._first: dict[int, Timestamp] = {}
        """For each device, a moment at which its stream was empty, so that host and GPU agree."""

    def stamp(self) -> Timestamp:
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return Timestamp(self._now())
        if torch.cuda.is_current_stream_capturing():
            return Timestamp(self._now())  # an event would become part of the captured graph
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        device = torch.cuda.current_device()
        if device not in self._first:
            event.synchronize()  # once per device, to relate the two clocks
            self._first[device] = Timestamp(self._now(), event, device)
        return Timestamp(self._now(), event, device)

    def seconds(self, timestamp: Timestamp) -> float | None:
        first = self._first.get(timestamp.device)
        if timestamp.event is None or first is None:
            return timestamp.host - self.origin
        if not timestamp.event.query():
            return None
        elapsed = first.event.elapsed_time(timestamp.event) / 1e3
        # The GPU cannot reach an event before the host has recorded it.
        return float(max(timestamp.host, first.host + elapsed) - self.origin)


@dataclass(slots=True)
class PendingPhase:
    """A phase whose times may not be known yet, because the GPU has not reached its end."""

    name: str
    step: int
    start: Timestamp
    end: Timestamp


class PhaseTracker:
    """Turns begin and end calls into phases. Calls from other threads than the one that trains are
    ignored, so only that thread changes the state; any thread may read `step` and `phase`."""

    def __init__(
        self,
        clock: Clock,
        emit: Callable[[PendingPhase], None],
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._clock, self._emit, self._on_step = clock, emit, on_step
        self.step = 1
        self.phase: str | None = None
        """The current phase. The sampling thread reads it."""
        self.unseen_forwards = 0
        """Number of backwards without a forward: their modules have no hooks yet."""
        self._training_thread: int | None = None
        self._stack: list[tuple[str, object]] = []
        """Calls that have been entered and not left, each with its owner."""
        self._named: list[str] = []
        self._began: Timestamp | None = None
        self._last: PendingPhase | None = None
        """The phase that ended last. It is emitted when the next one begins, since that may still
        extend it."""
        self._counts_steps = True
        self._updated = False
        """Whether the current step has had its update."""
        self._sees_forwards = False
        self._advanced = False
        """Whether the call that was entered last began a new step."""

    # Calls that hooks report.

    def enter(self, name: str, owner: object = None) -> None:
        """Begin a call. `owner` identifies the caller: an optimizer whose step raised an exception
        never left, which its next step reveals."""
        if not self._is_training_thread():
            return
        if owner is not None and (name, owner) in self._stack:
            self._stack.clear()
        self._stack.append((name, owner))
        if len(self._stack) == 1 and not self._named:
            self._begin(name)

    def leave(self) -> None:
        """End the call that was entered last in this thread."""
        if self._training_thread != threading.get_ident() or not self._stack:
            return
        name, _ = self._stack.pop()
        if not self._stack and not self._named:
            self._end(name)

    def cancel(self) -> None:
        """Discard the call that was entered last: there was no more data to load."""
        if self._training_thread != threading.get_ident() or not self._stack:
            return
        self._stack.pop()
        if not self._stack and not self._named:
            self.phase = None
            if self._advanced:
                self.step, self._updated = self.step - 1, True

    # Phases that the user names.

    @contextmanager
    def named_phase(self, name: str) -> Iterator[None]:
        """Record everything inside as one phase with this name."""
        self._training_thread = threading.get_ident()
        outer = self.phase
        self._named.append(name)
        self._advance(name)
        self._emit_last()
        began = self._clock.stamp()
        self.phase = name
        try:
            yield
        finally:
            self._emit(PendingPhase(name, self.step, began, self._clock.stamp()))
            self._updated = self._updated or name == "update"
            self._named.pop()
            self.phase = outer

    def next_step(self) -> None:
        """Begin the next step. From then on, updates no longer end steps."""
        self._counts_steps = False
        self._emit_last()
        self.step += 1
        self._on_step(self.step)

    # A Penstock engine, which reports its own phases.

    def enter_engine(self, *, begins_step: bool) -> None:
        """Stop deriving phases until `leave_engine`."""
        if begins_step and self._is_training_thread():
            self._advance("forward")
        self.enter(ENGINE)

    def leave_engine(self, *, ends_step: bool) -> None:
        """Derive phases from hooks again."""
        if self._training_thread == threading.get_ident() and self._stack:
            self._stack.pop()
            self._updated = self._updated or ends_step

    def close(self) -> None:
        """Emit the last phase."""
        self._emit_last()

    # Internals.

    def _is_training_thread(self) -> bool:
        """Whether this thread trains. The first caller does; when its thread has ended, the next
        caller takes its place."""
        current = threading.get_ident()
        if self._training_thread == current:
            return True
        alive = {thread.ident for thread in threading.enumerate()}
        if self._training_thread is None or self._training_thread not in alive:
            self._training_thread, self._stack = current, []
            return True
        return False

    def _begin(self, name: str) -> None:
        if name == ENGINE:
            self._emit_last()
            return
        self._advance(name)
        now = self._clock.stamp()
        last, self._began = self._last, now
        self._sees_forwards = self._sees_forwards or name == "forward"
        if name == "backward" and not self._follows_forward(last):
            self._infer_forward(now)
        elif last is not None and last.name == name and last.step == self.step:
            self._began, self._last = last.start, None  # one phase with the call before
        elif last is not None and (last.name, name) == ("forward", "backward"):
            last.end = now  # the loss belongs to forward
        elif last is not None and (last.name, name) == ("backward", "update"):
            self._began = last.end  # clipping belongs to the update
        self._emit_last()
        self.phase = name

    def _end(self, name: str) -> None:
        if name == ENGINE or self._began is None:
            return
        self._last = PendingPhase(name, self.step, self._began, self._clock.stamp())
        self._updated = self._updated or name == "update"
        # The loss follows a forward and belongs to it, until something else begins.
        self.phase = name if name == "forward" else None

    def _follows_forward(self, last: PendingPhase | None) -> bool:
        """Whether a backward's forward was seen. A second backward may belong to the same forward,
        provided that forwards are seen at all."""
        if last is None or last.step != self.step:
            return False
        return last.name == "forward" or (last.name == "backward" and self._sees_forwards)

    def _infer_forward(self, now: Timestamp) -> None:
        """Record the time since the last phase as the forward that must have preceded."""
        self.unseen_forwards += 1
        last = self._last
        self._emit_last()
        if last is not None:
            self._emit(PendingPhase("forward", self.step, last.end, now))

    def _advance(self, name: str) -> None:
        """Begin the next step if the current one has had its update."""
        self._advanced = self._updated and name in BEGINS_A_STEP and self._counts_steps
        if self._updated and name in BEGINS_A_STEP:
            self._updated = False
        if self._advanced:
            self.step += 1
            self._on_step(self.step)

    def _emit_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            self._emit(last)
