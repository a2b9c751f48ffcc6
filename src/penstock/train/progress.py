"""Show a run to the user: a live view on terminals, lines on pipes, nothing with --json."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import rich.live
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.checkpoint.adapter_files import CONFIG as ADAPTER_CONFIG
from penstock.engine.plan_choice import PlanChoice
from penstock.planner.plan_view import not_reproducible, plan_view, tier_table
from penstock.train.events import Event
from penstock.units import format_bytes, format_seconds

LINE_SECONDS = 10.0
"""On a pipe, the minimum number of seconds between two lines about steps."""

REFRESH_PER_SECOND = 8

SHORT_PHASE = 0.1
"""Phases of a start that take fewer seconds are not shown."""

SMOOTHING = 0.2
"""Weight of the newest step in the moving average of step times."""


class View(Protocol):
    """A listener that also shows work between events."""

    def handle(self, event: Event) -> None: ...

    def close(self) -> None: ...

    def show_plan(self, choice: PlanChoice, steps: int) -> None: ...

    def show_step_progress(self, done: int, total: int, text: str) -> None:
        """Show how far the current step is."""

    def show_work(self, done: int, total: int, text: str) -> None:
        """Show how far other work is, such as tokenizing data or saving a checkpoint."""


class SilentView:
    """Shows nothing, for programs that read the events."""

    def handle(self, event: Event) -> None:
        return

    def close(self) -> None:
        return

    def show_plan(self, choice: PlanChoice, steps: int) -> None:
        return

    def show_step_progress(self, done: int, total: int, text: str) -> None:
        return

    def show_work(self, done: int, total: int, text: str) -> None:
        return


class LineView(SilentView):
    """Prints lines, for pipes and log files: at most one about steps per interval."""

    def __init__(self, interval: float = LINE_SECONDS) -> None:
        self._interval, self._last = interval, 0.0
        self._steps = 0
        self._pending: str | None = None
        self._seconds: float | None = None

    def show_plan(self, choice: PlanChoice, steps: int) -> None:
        self._steps = steps
        print_plan(Console(file=sys.stdout, width=120, highlight=False), choice)

    def handle(self, event: Event) -> None:
        if event["event"] == "step":
            self._handle_step(event)
            return
        self._flush()
        line = format_event(event, self._steps)
        if line:
            print(line, flush=True)

    def _handle_step(self, event: Event) -> None:
        self._seconds = _smooth(self._seconds, event["seconds"])
        left = (self._steps - event["step"]) * self._seconds
        self._pending = f"{format_event(event, self._steps)}  {format_duration(left)} left"
        if time.monotonic() - self._last >= self._interval:
            self._flush()

    def _flush(self) -> None:
        if self._pending is not None:
            print(self._pending, flush=True)
            self._pending, self._last = None, time.monotonic()

    def close(self) -> None:
        self._flush()


class LiveView:
    """Updates a few lines at the bottom of a terminal; messages scroll above them."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._steps = self._step = 0
        self._within = 0.0
        self._activity = self._bottleneck = ""
        self._metrics = ""
        self._seconds: float | None = None
        self._step_started: float | None = None
        self._tiers: Mapping[str, Mapping[str, int]] = {}
        self._host: Mapping[str, int] = {}
        self._live = rich.live.Live(
            console=self.console, get_renderable=self.render,
            refresh_per_second=REFRESH_PER_SECOND, transient=True,
        )  # fmt: skip

    def show_plan(self, choice: PlanChoice, steps: int) -> None:
        self._stop()
        print_plan(self.console, choice)
        self._steps, self._bottleneck = steps, choice.bottleneck

    def handle(self, event: Event) -> None:
        kind = event["event"]
        if kind in ("step", "skipped", "eval", "save"):
            self._step, self._within, self._step_started = event["step"], 0.0, None
        if kind == "plan":
            self._tiers = event["tiers"]
        elif kind == "step":
            self._metrics = format_metrics(event)
            self._tiers, self._host = event["tiers"], event["host"]
            self._seconds = _smooth(self._seconds, event["seconds"])
        elif line := format_event(event, self._steps):
            self.console.print(line, markup=False)

    def show_step_progress(self, done: int, total: int, text: str) -> None:
        if self._step_started is None:
            self._step_started = time.monotonic()
        self._within, self._activity = done / max(total, 1), text
        self._start()

    def show_work(self, done: int, total: int, text: str) -> None:
        share = f" {done / total:.0%}" if total else ""
        self._activity = f"{text}{share}"
        self._start()

    def close(self) -> None:
        self._stop()

    def render(self) -> RenderableType:
        """Render the lines at the bottom: progress, metrics, memory and current activity."""
        if not self._steps:
            return Text(self._activity)
        done = self._step + self._within
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            f"step {self._step}/{self._steps}",
            ProgressBar(total=self._steps, completed=min(done, self._steps), width=40),
            f"{done / self._steps:.1%}",
            self._time_left(done),
        )
        rows: list[RenderableType] = [bar]
        if self._metrics:
            rows.append(Text(self._metrics))
        rows.append(self._memory_bars())
        bound = f"; limited by {self._bottleneck}" if self._bottleneck else ""
        rows.append(Text(f"{self._activity}{bound}", style="dim"))
        return Group(*rows)

    def _time_left(self, done: float) -> str:
        seconds = self._seconds
        # Extrapolate the first step, as soon as enough of it is done.
        if seconds is None and self._step_started is not None and self._within > 0.05:
            seconds = (time.monotonic() - self._step_started) / self._within
        if seconds is None:
            return ""
        return f"{format_duration((self._steps - done) * seconds)} left"

    def _memory_bars(self) -> Table:
        """Show what each tier holds now, and what the plan says; before a step, only the plan."""
        table = Table.grid(padding=(0, 1))
        cells: list[Any] = []
        for tier, usage in self._tiers.items():
            if not usage["budget"]:
                continue
            used = usage.get("used", 0)
            cells += [
                Text(tier),
                ProgressBar(total=1.0, completed=min(1.0, used / usage["budget"]), width=10),
                Text(format_usage(usage)),
            ]
        if self._host:
            cells += [Text("host"), Text(format_usage(self._host))]
        table.add_row(*cells)
        return table

    def _start(self) -> None:
        if not self._live.is_started and self.console.is_terminal:
            self._live.start()

    def _stop(self) -> None:
        if self._live.is_started:
            self._live.stop()


def print_plan(console: Console, choice: PlanChoice) -> None:
    """Print the table that `penstock plan` shows."""
    table: Any = tier_table(choice.plan)
    if choice.planned is not None:
        table = plan_view(choice.planned, choice.machine)
    console.print(table)
    if choice.planned is None:  # the view of a new plan has these lines already
        for line in not_reproducible(choice.plan):
            console.print(line)
    console.print()


def format_event(event: Event, steps: int) -> str:
    """Describe an event in one line; "" for events that need none."""
    match event["event"]:
        case "step":
            return f"step {event['step']}/{steps}  {format_metrics(event)}"
        case "skipped":
            return (
                f"step {event['step']}/{steps} skipped: loss or gradient not finite; "
                f"the loss scale is now {event['loss_scale']:g}"
            )
        case "start_up":
            return format_start_up(event)
        case "eval":
            smoothing = event.get("label_smoothing")
            how = f" (with label smoothing {smoothing:g})" if smoothing else ""
            return f"evaluation loss {event['loss']:.4f}{how} at step {event['step']}"
        case "sample":
            return f"sample at step {event['step']}: {event['prompt']!r} -> {event['text']!r}"
        case "save":
            size = format_bytes(event["bytes"])
            return f"saved {event['path']} ({size}, {format_seconds(event['seconds'])})"
        case "stopped":
            return f"stopped after step {event['step']}/{steps}; continue with --resume"
        case "done":
            what = "adapter" if Path(event["model"], ADAPTER_CONFIG).is_file() else "model"
            return (
                f"done: {event['steps']} steps; the {what} is in {event['model']}; "
                f"peak host memory {format_bytes(event['peak_host_bytes'])}, "
                f"HBM {format_bytes(event['peak_hbm_bytes'])}"
            )
        case "note":
            return str(event["text"])
    return ""


def format_start_up(event: Event) -> str:
    """Say how long the run took to the end of its first step, and what took most of it."""
    long = {name: s for name, s in event["phases"].items() if s >= SHORT_PHASE}
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in long.items())
    return f"first step done after {event['seconds']:.1f} s" + (f": {phases}" if phases else "")


def format_usage(usage: Mapping[str, int]) -> str:
    """Format measured and planned bytes of a tier.

    Before the first step there is only the plan, whose bytes are in `peak`.
    """
    planned = format_bytes(usage.get("planned", usage["peak"]))
    measured = f"{format_bytes(usage['used'])} of " if "used" in usage else ""
    budget = f", budget {format_bytes(usage['budget'])}" if "budget" in usage else ""
    return f"{measured}{planned} planned{budget}  "


def format_metrics(event: Event) -> str:
    """Format loss, gradient norm, learning rate and throughput of a step."""
    return (
        f"loss {event['loss']:.4f}  norm {event['grad_norm']:.3g}  lr {event['lr']:.3g}  "
        f"{event['tokens_per_second']:,.0f} tokens/s"
    )


def format_duration(seconds: float) -> str:
    """Format a duration such as `2 h 05 min`, `3 min 20 s` or `14 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s"


def _smooth(average: float | None, newest: float) -> float:
    return newest if average is None else (1 - SMOOTHING) * average + SMOOTHING * newest
