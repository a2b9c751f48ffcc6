"""Read what a training wrote to its metrics.jsonl, and choose the plots of it.

Every training writes this file, with or without a recording of its memory and time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock import records
from penstock.observe.plots import Plot, Unit, make_line
from penstock.observe.records import TRAIN_PROFILE
from penstock.observe.series import Point

METRICS_FILE = "metrics.jsonl"
"""File in the output directory of a training that has the metrics of each step."""

_FIELDS = (
    *("loss", "grad_norm", "lr", "seconds", "tokens_per_second"),
    *("expert_load_max", "expert_load_min", "idle_experts"),
)
"""Fields of a step that are read."""


@dataclass(frozen=True, slots=True)
class TrainingCurves:
    """Metrics of a training by step."""

    loss: tuple[Point, ...]
    evaluation: tuple[Point, ...] = ()
    grad_norm: tuple[Point, ...] = ()
    lr: tuple[Point, ...] = ()
    seconds: tuple[Point, ...] = ()
    tokens_per_second: tuple[Point, ...] = ()
    expert_load_max: tuple[Point, ...] = ()
    """The most tokens of an expert, relative to the mean of its layer."""
    expert_load_min: tuple[Point, ...] = ()
    idle_experts: tuple[Point, ...] = ()
    """Number of experts without a token."""

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step, without the first, which warms up."""
        return _median(self.seconds)

    @property
    def speed(self) -> float | None:
        """Median of the tokens per second, without the first step."""
        return _median(self.tokens_per_second)

    @property
    def losses(self) -> dict[str, dict[str, float]]:
        """The first, the lowest and the last loss of training and of evaluation."""
        lines = {"training": self.loss, "evaluation": self.evaluation}
        return {
            name: {"first": values[0], "lowest": min(values), "last": values[-1]}
            for name, points in lines.items()
            if (values := [value for _, value in points])
        }

    def loss_plots(self) -> list[Plot]:
        """Return the plot of the training loss and the evaluation loss, if there are any."""
        lines = {"training": self.loss, "evaluation": self.evaluation}
        plot = _plot("loss", "Loss by step", "number", lines)
        return [plot] if plot is not None else []

    def other_plots(self) -> list[Plot]:
        """Return the plots of the other metrics."""
        plots = (
            _plot("grad-norm", "Gradient norm before clipping", "number", {"norm": self.grad_norm}),
            _plot("lr", "Learning rate", "number", {"learning rate": self.lr}),
            _plot("step-seconds", "Step time", "seconds", {"step time": self.seconds}),
            _plot(
                "expert-load", "Tokens of an expert, relative to the mean of its layer", "number",
                {"the busiest": self.expert_load_max, "the least busy": self.expert_load_min},
            ),
            _plot("idle-experts", "Experts without a token", "number",
                  {"idle experts": self.idle_experts}),
        )  # fmt: skip
        return [plot for plot in plots if plot is not None]


def _median(points: Sequence[Point]) -> float | None:
    values = [value for _, value in (points[1:] if len(points) > 1 else points)]
    return statistics.median(values) if values else None


def _plot(name: str, title: str, unit: Unit, lines: dict[str, tuple[Point, ...]]) -> Plot | None:
    points = [point for line in lines.values() for point in line]
    if not points:
        return None
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    spare = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    shown = [(key, line) for key, line in lines.items() if line]
    return Plot(
        id=name, title=title, unit=unit, x_unit="step", start=min(steps),
        end=max(*steps, min(steps) + 1), at_least=high + spare,
        bottom=0.0 if unit == "seconds" else max(low - spare, min(low, 0.0)),
        lines=tuple(make_line(key, line, colour) for colour, (key, line) in enumerate(shown)),
    )  # fmt: skip


def read_curves(folder: Path) -> TrainingCurves | None:
    """Read the metrics of the training that a directory belongs to; None if there are none.

    A run that was killed and resumed has some steps twice. The last one counts, since the weights
    of the first are lost.
    """
    path = folder / METRICS_FILE
    if folder.name == TRAIN_PROFILE and not path.exists():
        path = folder.parent / METRICS_FILE
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    steps: dict[float, dict[str, float]] = {}
    evaluations: dict[float, float] = {}
    for _, event in records.parse_lines(content):
        kind, step = event.get("event"), records.finite_number(event.get("step"))
        if step is None:
            continue
        found = {name: records.finite_number(event.get(name)) for name in _FIELDS}
        values = {name: value for name, value in found.items() if value is not None}
        if kind == "step":
            steps[step] = values
        elif kind == "eval" and "loss" in values:
            evaluations[step] = values["loss"]
    by_field = {
        name: tuple((step, steps[step][name]) for step in sorted(steps) if name in steps[step])
        for name in _FIELDS
    }
    curves = TrainingCurves(evaluation=tuple(sorted(evaluations.items())), **by_field)
    return curves if curves.loss or curves.evaluation else None
