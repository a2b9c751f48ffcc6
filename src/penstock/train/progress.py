"""Events in words. Room: show."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

import rich.live
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.planner.plan_view import plan_view, tier_table
from penstock.train.events import Event
from penstock.train.plan_choice import Chosen
from penstock.units import format_bytes, format_seconds


def line_of(event: Event, steps: int) -> str:
    """One line; "" for what needs none."""
    match event["event"]:
        case "step":
            return f"step {event['step']}/{steps}  {numbers(event)}"
        case "skipped":
            return (
                f"step {event['step']}/{steps} left out: not finite; "
                f"loss scale {event['loss_scale']:g} now"
            )
        case "eval":
            return f"held-out loss {event['loss']:.4f} at step {event['step']}"
        case "sample":
            return f"sample at step {event['step']}: {event['prompt']!r} -> {event['text']!r}"
        case "save":
            size = format_bytes(event["bytes"])
            return f"saved {event['path']} ({size}, {format_seconds(event['seconds'])})"
        case "stopped":
            return f"stopped after step {event['step']}/{steps}; --resume goes on from there"
        case "done":
            return (
                f"done: {event['steps']} steps; the model is in {event['out']}; "
                f"most host memory {format_bytes(event['peak_host_bytes'])}"
            )
        case "note":
            return str(event["text"])
    return ""


def numbers(event: Event) -> str:
    return (
        f"loss {event['loss']:.4f}  norm {event['grad_norm']:.3g}  lr {event['lr']:.3g}  "
        f"{event['tokens_per_second']:,.0f} tokens/s"
    )


def duration(seconds: float) -> str:
    """`2 h 05 min`, `3 min 20 s`, `14 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s"


# --------
# What a person sees of a run. Room: show.

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


# --------
# The live view of a terminal. Room: show.

REFRESH = 8
"""Times a second."""

SMOOTHING = 0.2


class Live:
    """A few lines at the bottom that move; what was said scrolls above them."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._steps = self._step = 0
        self._within = 0.0
        self._what = self._bound = ""
        self._numbers = ""
        self._seconds: float | None = None
        self._begun: float | None = None
        self._tiers: Mapping[str, Mapping[str, int]] = {}
        self._live = rich.live.Live(
            console=self.console, get_renderable=self.render, refresh_per_second=REFRESH,
            transient=True,
        )  # fmt: skip

    # What happens.

    def show_plan(self, chosen: Chosen, steps: int) -> None:
        self._stop()
        print_plan(self.console, chosen)
        self._steps, self._bound = steps, chosen.bound

    def hear(self, event: Event) -> None:
        kind = event["event"]
        if kind in ("step", "skipped", "eval", "save"):
            self._step, self._within, self._begun = event["step"], 0.0, None
        if kind == "plan":
            self._tiers = event["tiers"]
        elif kind == "step":
            self._numbers = numbers(event)
            self._tiers = event["tiers"]
            last, now = self._seconds, event["seconds"]
            self._seconds = now if last is None else (1 - SMOOTHING) * last + SMOOTHING * now
        elif line := line_of(event, self._steps):
            self.console.print(line, markup=False)

    def progress(self, done: int, total: int, what: str) -> None:
        if self._begun is None:
            self._begun = time.monotonic()
        self._within, self._what = done / max(total, 1), what
        self._start()

    def busy(self, done: int, total: int, what: str) -> None:
        share = f" {done / total:.0%}" if total else ""
        self._what = f"{what}{share}"
        self._start()

    def close(self) -> None:
        self._stop()

    # What is shown.

    def render(self) -> RenderableType:
        if not self._steps:
            return Text(self._what)
        done = self._step + self._within
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            f"step {self._step}/{self._steps}",
            ProgressBar(total=self._steps, completed=min(done, self._steps), width=40),
            f"{done / self._steps:.1%}",
            self._left(done),
        )
        rows: list[RenderableType] = [bar]
        if self._numbers:
            rows.append(Text(self._numbers))
        rows.append(self._fullness())
        bound = f"; bound by {self._bound}" if self._bound else ""
        rows.append(Text(f"{self._what}{bound}", style="dim"))
        return Group(*rows)

    def _left(self, done: float) -> str:
        each = self._seconds
        if each is None and self._begun is not None and self._within > 0.05:
            each = (time.monotonic() - self._begun) / self._within
        return "" if each is None else f"{duration((self._steps - done) * each)} left"

    def _fullness(self) -> Table:
        table = Table.grid(padding=(0, 1))
        cells: list[Any] = []
        for tier, held in self._tiers.items():
            if held["budget"]:
                full = held["peak"] / held["budget"]
                cells += [
                    Text(tier),
                    ProgressBar(total=1.0, completed=min(1.0, full), width=10),
                    Text(f"{format_bytes(held['peak'])} of {format_bytes(held['budget'])}  "),
                ]
        table.add_row(*cells)
        return table

    def _start(self) -> None:
        if not self._live.is_started and self.console.is_terminal:
            self._live.start()

    def _stop(self) -> None:
        if self._live.is_started:
            self._live.stop()
