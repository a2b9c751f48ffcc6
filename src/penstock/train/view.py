"""What a person sees of a run. Room: show."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from rich.console import Console

from penstock.plan_view import plan_view, tier_table
from penstock.train.events import Event
from penstock.train.planning import Chosen
from penstock.train.words import duration, line_of

LINE_SECONDS = 10.0
"""On a pipe, at most one line of steps in so many seconds."""


class View(Protocol):
    """A listener that also sees what happens between events."""

    def hear(self, event: Event) -> None: ...

    def close(self) -> None: ...

    def show_plan(self, chosen: Chosen, steps: int) -> None: ...

    def progress(self, done: int, total: int, what: str) -> None:
        """Within a step."""

    def busy(self, done: int, total: int, what: str) -> None:
        """Something else: tokens are made, a checkpoint is written."""


class Silent:
    """For programs, which read events."""

    def hear(self, event: Event) -> None:
        return

    def close(self) -> None:
        return

    def show_plan(self, chosen: Chosen, steps: int) -> None:
        return

    def progress(self, done: int, total: int, what: str) -> None:
        return

    def busy(self, done: int, total: int, what: str) -> None:
        return


class Lines(Silent):
    """A line per interval, for pipes and logs."""

    def __init__(self, interval: float = LINE_SECONDS) -> None:
        self._interval, self._last = interval, 0.0
        self._steps = 0
        self._pending: str | None = None
        self._seconds: float | None = None

    def show_plan(self, chosen: Chosen, steps: int) -> None:
        self._steps = steps
        print_plan(Console(file=sys.stdout, width=120, highlight=False), chosen)

    def hear(self, event: Event) -> None:
        if event["event"] == "step":
            self._hear_step(event)
            return
        self._flush()
        line = line_of(event, self._steps)
        if line:
            print(line, flush=True)

    def _hear_step(self, event: Event) -> None:
        last = self._seconds
        self._seconds = event["seconds"] if last is None else 0.8 * last + 0.2 * event["seconds"]
        left = (self._steps - event["step"]) * self._seconds
        self._pending = f"{line_of(event, self._steps)}  {duration(left)} left"
        if time.monotonic() - self._last >= self._interval:
            self._flush()

    def _flush(self) -> None:
        if self._pending is not None:
            print(self._pending, flush=True)
            self._pending, self._last = None, time.monotonic()

    def close(self) -> None:
        self._flush()


def print_plan(console: Console, chosen: Chosen) -> None:
    """The table that `penstock plan` shows."""
    part: Any = tier_table(chosen.plan)
    if chosen.planned is not None:
        part = plan_view(chosen.planned, chosen.machine)
    console.print(part)
    console.print()
