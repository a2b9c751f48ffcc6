"""The live view of a terminal. Room: show."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import rich.live
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.train.events import Event
from penstock.train.planning import Chosen
from penstock.train.view import print_plan
from penstock.train.words import duration, line_of, numbers
from penstock.units import format_bytes

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
