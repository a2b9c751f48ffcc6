"""When something happened: on the host, or on the GPU where work is still queued. Room: show.

A program runs ahead of its GPU: when `backward` returns, its kernels may not have begun. So a
moment is noted on both, with an event in the stream that costs no waiting, and becomes a time once
the GPU has passed it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class Tick(NamedTuple):
    """A moment."""

    host: float
    """By `time.perf_counter`."""

    event: Any = None
    """In the GPU's stream; None where there is none."""


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
        self._first: Tick | None = None

    def tick(self) -> Tick:
        event = self._event()
        tick = Tick(self._now(), event)
        if self._first is None and event is not None:
            # Once: host and GPU agree at a moment when nothing is under way.
            event.synchronize()
            tick = self._first = Tick(self._now(), event)
        return tick

    def when(self, tick: Tick) -> float | None:
        if tick.event is None or self._first is None:
            return tick.host - self.origin
        if not tick.event.query():
            return None
        passed = self._first.event.elapsed_time(tick.event) / 1e3
        return float(max(tick.host, self._first.host + passed) - self.origin)

    def _event(self) -> Any:
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        if torch.cuda.is_current_stream_capturing():
            return None  # an event would become part of the graph
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
