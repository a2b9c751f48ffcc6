"""When something happened: on the host, or on the GPU where work is still queued. Room: show.

A program runs ahead of its GPU: when `backward` returns, its kernels may not have begun. So a
moment is noted on both, with an event in the stream that costs no waiting, and becomes a time once
the GPU has passed it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Tick(NamedTuple):
    """A moment."""

    host: float
    """By `time.perf_counter`."""

    event: Any = None
    """In the GPU's stream; None where there is none."""

    device: int = -1
    """Which GPU's."""


class Clock(Protocol):
    """What notes moments."""

    def tick(self) -> Tick:
        """Now, after all that was issued so far."""

    def when(self, tick: Tick) -> float | None:
        """Seconds since the origin; None while the GPU is not there yet."""


class HostClock:
    """Without a GPU."""

    def __init__(self, origin: float, now: Callable[[], float] = time.perf_counter) -> None:
        self.origin, self._now = origin, now

    def tick(self) -> Tick:
        return Tick(self._now())

    def when(self, tick: Tick) -> float | None:
        return tick.host - self.origin


class TorchClock(HostClock):
    """With a GPU as soon as the program has begun to use one. Never the first to touch it."""

    def __init__(self, origin: float, now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(origin, now)
        self._first: dict[int, Tick] = {}
        """By device: when host and GPU agreed, with nothing under way."""

    def tick(self) -> Tick:
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return Tick(self._now())
        if torch.cuda.is_current_stream_capturing():
            return Tick(self._now())  # an event would become part of the graph
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        device = torch.cuda.current_device()
        if device not in self._first:
            event.synchronize()  # this once
            self._first[device] = Tick(self._now(), event, device)
        return Tick(self._now(), event, device)

    def when(self, tick: Tick) -> float | None:
        first = self._first.get(tick.device)
        if tick.event is None or first is None:
            return tick.host - self.origin
        if not tick.event.query():
            return None
        passed = first.event.elapsed_time(tick.event) / 1e3
        return float(max(tick.host, first.host + passed) - self.origin)


# --------
# Which step and phase a training loop is in. Room: show.
#
# Told when forward, backward and the like begin and end, it decides what that means:
#
# - only the outermost call counts, in the one thread that trains;
# - what is alike and follows one another is one phase: the steps of several optimizers, or of one
#   that is called for every part of a model;
# - a forward lasts until its backward begins, so the loss is in it; an update begins where
# backward
#   ended, so clipping is in it;
# - a step ends with its update: the next forward, backward or batch of data begins the next one.

BEGINS_A_STEP = ("forward", "backward", "data")


@dataclass(slots=True)
class Stretch:
    """A phase, by the moments of its ends."""

    name: str
    step: int
    start: Tick
    end: Tick


class Tracker:
    """Called from any thread."""

    def __init__(
        self,
        clock: Clock,
        emit: Callable[[Stretch], None],
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._clock, self._emit, self._on_step = clock, emit, on_step
        self.step = 1
        self.phase: str | None = None
        """Now; read by the thread that samples."""
        self.unseen_forwards = 0
        """Backwards that came without a forward: of a module nobody told us of."""
        self._lead: int | None = None
        self._stack: list[tuple[str, object]] = []
        self._named: list[str] = []
        self._began: Tick | None = None
        self._last: Stretch | None = None
        self._counts_steps = True
        self._updated = False
        self._sees_forwards = False
        self._advanced = False
        """Whether what was entered last began a step."""

    # What is found.

    def enter(self, name: str, owner: object = None) -> None:
        """`owner` is what calls: an optimizer whose step raised is known by its next one."""
        if not self._leads():
            return
        if owner is not None and (name, owner) in self._stack:
            self._stack.clear()
        self._stack.append((name, owner))
        if len(self._stack) == 1 and not self._named:
            self._begin(name)

    def leave(self) -> None:
        """What was entered last in this thread."""
        if self._lead != threading.get_ident() or not self._stack:
            return
        name, _ = self._stack.pop()
        if not self._stack and not self._named:
            self._end(name)

    def retract(self) -> None:
        """What was entered last came to nothing: there was no more data."""
        if self._lead != threading.get_ident() or not self._stack:
            return
        self._stack.pop()
        if not self._stack and not self._named:
            self.phase = None
            if self._advanced:
                self.step, self._updated = self.step - 1, True

    # What the user names.

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """What is found inside does not count."""
        self._lead = threading.get_ident()
        outer = self.phase
        self._named.append(name)
        self._advance(name)
        self._let_go()
        began = self._clock.tick()
        self.phase = name
        try:
            yield
        finally:
            self._emit(Stretch(name, self.step, began, self._clock.tick()))
            self._updated = self._updated or name == "update"
            self._named.pop()
            self.phase = outer

    def next_step(self) -> None:
        """As the user says; from then on nothing else ends a step."""
        self._counts_steps = False
        self._let_go()
        self.step += 1
        self._on_step(self.step)

    # An engine that knows its own phases.

    def take_over(self, *, begins_step: bool) -> None:
        """What runs until `give_back` is told by somebody else."""
        if begins_step and self._leads():
            self._advance("forward")
        self.enter("engine")

    def give_back(self, *, ends_step: bool) -> None:
        if self._lead == threading.get_ident() and self._stack:
            self._stack.pop()
            self._updated = self._updated or ends_step

    def close(self) -> None:
        self._let_go()

    # Within.

    def _leads(self) -> bool:
        me = threading.get_ident()
        if self._lead == me:
            return True
        alive = {thread.ident for thread in threading.enumerate()}
        if self._lead is None or self._lead not in alive:
            self._lead, self._stack = me, []
            return True
        return False

    def _begin(self, name: str) -> None:
        if name == "engine":
            self._let_go()
            return
        self._advance(name)
        now = self._clock.tick()
        last, self._began = self._last, now
        self._sees_forwards = self._sees_forwards or name == "forward"
        if name == "backward" and not self._has_had_forward(last):
            self._unseen(now)
        elif last is not None and last.name == name and last.step == self.step:
            self._began, self._last = last.start, None
        elif last is not None and (last.name, name) == ("forward", "backward"):
            last.end = now
        elif last is not None and (last.name, name) == ("backward", "update"):
            self._began = last.end
        self._let_go()
        self.phase = name

    def _end(self, name: str) -> None:
        if name == "engine" or self._began is None:
            return
        self._last = Stretch(name, self.step, self._began, self._clock.tick())
        self._updated = self._updated or name == "update"
        # What follows a forward is its loss, until something else begins.
        self.phase = name if name == "forward" else None

    def _has_had_forward(self, last: Stretch | None) -> bool:
        """A second backward may be of the same forward, as long as forwards are seen at all."""
        if last is None or last.step != self.step:
            return False
        return last.name == "forward" or (last.name == "backward" and self._sees_forwards)

    def _unseen(self, now: Tick) -> None:
        """A backward has had a forward: what lies since the last thing that was seen."""
        self.unseen_forwards += 1
        last = self._last
        self._let_go()
        if last is not None:
            self._emit(Stretch("forward", self.step, last.end, now))

    def _advance(self, name: str) -> None:
        self._advanced = self._updated and name in BEGINS_A_STEP and self._counts_steps
        if self._updated and name in BEGINS_A_STEP:
            self._updated = False
        if self._advanced:
            self.step += 1
            self._on_step(self.step)

    def _let_go(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            self._emit(last)
