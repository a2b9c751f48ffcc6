"""Plot the result of a probe. matplotlib is imported only when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ProbeError
from penstock.machine.machine import Figure, Machine
from penstock.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = ("-", "--", ":", "-.")


@dataclass(slots=True)
class Panel:
    """The data of one set of axes: x on a logarithmic scale, y a rate."""

    title: str
    """Title of the axes."""

    x_label: str
    """Label of the x axis."""

    x_text: Callable[[int], str]
    """Formats an x value for its tick label."""

    lines: dict[str, dict[int, Figure]] = field(default_factory=dict)
    """The figures of each line, by x value."""

    def add(self, line: str, x: int, figure: Figure) -> None:
        """Add a point to a line."""
        self.lines.setdefault(line, {})[x] = figure


def check_plot(path: Path) -> None:
    """Raise ProbeError if a plot cannot be saved as `path`. Call it before the measurements."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ProbeError("a plot needs matplotlib: pip install 'penstock[plot]'") from error
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise ProbeError(
            f"{path} cannot be plotted: its name must end in one of .{', .'.join(known)}"
        )


def save_plot(machine: Machine, path: Path) -> None:
    """Plot memory rates over threads; sweeps, GPU copies and storage over size."""
    check_plot(path)
    from matplotlib.figure import Figure as Picture

    panels = [memory(machine), sweeps(machine), transfers(machine), *storage(machine)]
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        raise ProbeError("there is nothing to plot because nothing was measured")
    picture = Picture(figsize=(6.5 * len(panels), 6.5), layout="constrained")
    picture.suptitle(": ".join(filter(None, (machine.name, machine.cpu.model))))
    for place, panel in enumerate(panels, start=1):
        _draw(picture.add_subplot(1, len(panels), place), panel)
    try:
        picture.savefig(path, dpi=150)
    # OSError: a full disk or a missing directory. RuntimeError: a format that needs LaTeX.
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ProbeError(f"{path} cannot be written: {reason}") from error


def memory(machine: Machine) -> Panel:
    """Return the rates of memory nodes over threads."""
    panel = Panel("Memory", "threads", str)
    for node in machine.nodes:
        for rate in node.rates:
            if rate.operation not in ("sweep", "shared"):
                line = f"node {node.id} ({node.kind}) {rate.operation}"
                panel.add(line, rate.threads, rate.bytes_per_second)
    return panel


def sweeps(machine: Machine) -> Panel:
    """Return the sweeps that state their size, with the largest number of threads."""
    panel = Panel("Sweeps, all threads", "parameters", lambda n: f"{n / 1e6:g} M")
    for node in machine.nodes:
        rates = [r for r in node.rates if r.operation == "sweep" and r.parameters is not None]
        most = max((rate.threads for rate in rates), default=0)
        for rate in rates:
            if rate.threads == most:
                line = f"node {node.id} ({node.kind}) {rate.moments or 'any'} moments"
                panel.add(line, rate.parameters or 0, rate.bytes_per_second)
    return panel


def transfers(machine: Machine) -> Panel:
    """Return the rates of GPU copies over their size."""
    panel = Panel("Copies to and from GPUs", "size of one copy", format_bytes)
    for t in machine.transfers:
        gpus = "+".join(map(str, t.gpus))
        streams = f", {t.streams} streams" if t.streams > 1 else ""
        line = f"node {t.node}, GPU {gpus} {t.direction}{streams}"
        panel.add(line, t.nbytes, t.bytes_per_second)
    return panel


def storage(machine: Machine) -> list[Panel]:
    """Return the rates of each storage path over the request size."""
    panels = []
    for path in machine.storage:
        panel = Panel(f"Storage: {path.path}", "size of one request", format_bytes)
        for rate in path.rates:
            line = f"{rate.operation}, {rate.depth} in flight"
            panel.add(line, rate.block, rate.bytes_per_second)
        panels.append(panel)
    return panels


def _draw(axes: Axes, panel: Panel) -> None:
    for number, (name, points) in enumerate(panel.lines.items()):
        xs = sorted(points)
        medians = [points[x].median / 1e9 for x in xs]
        below = [(points[x].median - points[x].low) / 1e9 for x in xs]
        above = [(points[x].high - points[x].median) / 1e9 for x in xs]
        style = _STYLES[number // 10 % len(_STYLES)]  # matplotlib repeats its colors after ten
        axes.errorbar(xs, medians, [below, above], fmt=f"o{style}", ms=4, capsize=3, label=name)
    ticks = sorted({x for points in panel.lines.values() for x in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [panel.x_text(x) for x in ticks], rotation=30)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel="GB/s (median, minimum, maximum)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.22))
