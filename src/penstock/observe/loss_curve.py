"""Draw the loss of a training from its metrics.jsonl, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock import records
from penstock.observe.markup import number, tag, text
from penstock.observe.plots import BUCKETS, HEIGHT, MARGIN, WIDTH
from penstock.observe.records import TRAIN_PROFILE
from penstock.observe.series import Point, thin

METRICS_FILE = "metrics.jsonl"
"""File in the output directory of a training that has the loss of each step."""

X_LABELS = 5


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Losses by step."""

    training: tuple[Point, ...]
    evaluation: tuple[Point, ...]

    @property
    def points(self) -> tuple[Point, ...]:
        return (*self.training, *self.evaluation)


def read_loss_curve(folder: Path) -> LossCurve | None:
    """Read the losses of the training that a recording belongs to; None if there are none."""
    path = folder / METRICS_FILE
    if folder.name == TRAIN_PROFILE and not path.exists():
        path = folder.parent / METRICS_FILE
    losses: dict[str, list[Point]] = {"step": [], "eval": []}
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for _, event in records.parse_lines(content):
        kind = event.get("event")
        step, loss = (records.finite_number(event.get(name)) for name in ("step", "loss"))
        if isinstance(kind, str) and kind in losses and step is not None and loss is not None:
            losses[kind].append((step, loss))
    curve = LossCurve(tuple(losses["step"]), tuple(losses["eval"]))
    return curve if curve.points else None


def draw_loss_curve(curve: LossCurve) -> str:
    """Return the figure: training loss and evaluation loss over steps."""
    axes = _Axes.around(curve.points)
    lines = {"training": (curve.training, "c0 only"), "evaluation": (curve.evaluation, "c1")}
    shown = {name: line for name, line in lines.items() if line[0]}
    grid = "".join(f"M0 {y}H{WIDTH}" for y in (0, HEIGHT // 2, HEIGHT))
    drawing = tag("path", d=grid, class_="grid")
    for points, class_ in shown.values():
        drawing += tag("path", d=axes.path(points), class_=f"line {class_}")
    spoken = "; ".join(f"{name} loss {_change(points)}" for name, (points, _) in shown.items())
    box = f"0 -{MARGIN} {WIDTH} {HEIGHT + 2 * MARGIN}"
    svg = tag("svg", drawing, viewBox=box, preserveAspectRatio="none", role="img",
              aria_label=f"Loss by step: {spoken}")  # fmt: skip
    frame = tag("div", axes.y_labels(), tag("div", svg, class_="area"), axes.x_labels(),
                class_="frame")  # fmt: skip
    legend = "".join(
        tag("li", tag("span", class_=f"dot {class_[:2]}"), text(f"{name} {_change(points)}"))
        for name, (points, class_) in shown.items()
    )
    caption = tag("figcaption", tag("h3", "Loss by step"), tag("ul", legend, class_="legend"))
    return tag("figure", caption, frame, class_="curve")


@dataclass(frozen=True, slots=True)
class _Axes:
    """The range of steps and losses that the drawing shows."""

    first: float
    last: float
    low: float
    high: float

    @classmethod
    def around(cls, points: Sequence[Point]) -> _Axes:
        """Return axes for all points. The loss rarely comes near 0, so its axis starts above."""
        steps, losses = zip(*points, strict=True)
        low, high = min(losses), max(losses)
        spare = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(min(steps), max(*steps, min(steps) + 1), low - spare, high + spare)

    def path(self, points: Sequence[Point]) -> str:
        """Return the line through points; a single one is a dot."""
        d = ""
        for x, y in thin(points, BUCKETS):
            right = WIDTH * (x - self.first) / (self.last - self.first)
            down = HEIGHT * (self.high - y) / (self.high - self.low)
            d += f"{'L' if d else 'M'}{number(right)} {number(down)}"
        return f"{d}h0.01"

    def y_labels(self) -> str:
        labels = "".join(
            tag("span", text(f"{self.low + (self.high - self.low) * k / 2:.3g}"),
                style=f"bottom:{50 * k}%")
            for k in range(3)
        )  # fmt: skip
        return tag("div", labels, class_="y", aria_hidden="true")

    def x_labels(self) -> str:
        shares = [k / (X_LABELS - 1) for k in range(X_LABELS)]
        labels = "".join(
            tag("span", text(f"{self.first + (self.last - self.first) * share:,.0f}"),
                style=f"left:{number(100 * share)}%")
            for share in shares
        )  # fmt: skip
        return tag("div", labels, class_="x", aria_hidden="true")


def _change(points: Sequence[Point]) -> str:
    return f"from {points[0][1]:.4g} to {points[-1][1]:.4g}, lowest {min(y for _, y in points):.4g}"
