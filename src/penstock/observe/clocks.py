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
