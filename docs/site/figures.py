"""Draw the figures of the documentation: one SVG for light pages and one for dark ones.

    python docs/site/figures.py            # writes docs/img/*-light.svg and *-dark.svg

The figures are in the repository, so that pages show them without this script.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "img"
REPORT_STYLE = Path(__file__).parents[2] / "src/penstock/observe/page.css"

THEMES = {
    "light": {"text": "#263238", "muted": "#607d8b", "line": "#90a4ae", "panel": "#eceff1"},
    "dark": {"text": "#eceff1", "muted": "#b0bec5", "line": "#78909c", "panel": "#37474f"},
}
COLOUR_NUMBERS = {
    "compute": 0, "weights": 1, "gradients": 2, "states": 3, "sweep": 3, "activations": 4,
    "working": 7,
}  # fmt: skip
"""Colours of what is stored and done: those of the report page, where copies to the GPU have the
colour of weights and copies from the GPU that of gradients."""


def report_colours() -> dict[str, dict[str, str]]:
    """Return the colours of the report page (c0 to c7, and `on` for text on them), by theme."""
    light, dark = REPORT_STYLE.read_text().split("prefers-color-scheme: dark")[:2]
    return {
        theme: dict(re.findall(r"--(c\d|on): (#[0-9a-f]{6})", style))
        for theme, style in (("light", light), ("dark", dark))
    }


COLOURS = report_colours()


@dataclass
class Drawing:
    """An SVG under construction."""

    width: int
    height: int
    theme: str
    parts: list[str] = field(default_factory=list)

    @property
    def colours(self) -> dict[str, str]:
        return COLOURS[self.theme]

    def box(self, x: float, y: float, w: float, h: float, fill: str, label: str = "",
            size: int = 12) -> None:  # fmt: skip
        at = COLOUR_NUMBERS.get(fill)
        colour = THEMES[self.theme].get(fill, fill) if at is None else self.colours[f"c{at}"]
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{colour}"/>'
        )
        if label:
            on_colour = THEMES[self.theme]["text"] if at is None else self.colours["on"]
            self.text(x + w / 2, y + h / 2 + size * 0.35, label, size, "middle", on_colour)

    def text(self, x: float, y: float, words: str, size: int = 12, anchor: str = "start",
             colour: str | None = None, bold: bool = False) -> None:  # fmt: skip
        shown = THEMES[self.theme].get(colour or "text", colour)
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{shown}"{weight}>{escape(words)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, label: str = "") -> None:
        line = THEMES[self.theme]["line"]
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{line}" '
            f'stroke-width="2" marker-end="url(#head)"/>'
        )
        if label:
            self.text((x1 + x2) / 2 + 6, (y1 + y2) / 2 - 4, label, 11, colour="muted")

    def caption(self, y: float, *lines: str) -> None:
        for number, line in enumerate(lines):
            self.text(10, y + 18 * number, line, 12, colour="muted")

    def svg(self, title: str) -> str:
        line = THEMES[self.theme]["line"]
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
            f'markerHeight="6" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{line}"/>'
            "</marker></defs>"
        )
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'role="img" font-family="system-ui, sans-serif"><title>{escape(title)}</title>',
            head, *self.parts, "</svg>", "",
        ])  # fmt: skip


def where_bytes_live(draw: Drawing) -> None:
    tiers: list[tuple[str, str, list[tuple[str, str, int]]]] = [
        ("HBM", "the GPU's memory", [
            ("weights", "weight slots", 110), ("gradients", "gradient buffers", 110),
            ("working", "working memory", 130), ("states", "resident blocks", 150),
        ]),
        ("DRAM", "next to CPUs", [
            ("states", "master weights, moments", 300), ("weights", "weights", 110),
            ("gradients", "gradients", 90),
        ]),
        ("CXL", "cards behind a link", [
            ("weights", "weights", 150), ("activations", "activations", 200),
            ("gradients", "gradients", 150),
        ]),
        ("NVMe", "what fits nowhere else", [
            ("states", "states", 150), ("weights", "weights", 130),
            ("gradients", "gradients", 130), ("activations", "activations", 130),
        ]),
    ]  # fmt: skip
    for row, (name, what, parts) in enumerate(tiers):
        y = 16 + row * 66
        draw.box(10, y, 700, 54, "panel")
        draw.text(24, y + 24, name, 15, bold=True)
        draw.text(24, y + 42, what, 11, colour="muted")
        x = 160.0
        for hue, label, width in parts:
            draw.box(x, y + 9, width - 6, 36, hue, label, 11)
            x += width
    draw.caption(
        296,
        "An example: the planner chooses what is stored where so that the step is "
        "shortest, and never exceeds a budget.",
    )


def step_timeline(draw: Drawing) -> None:
    lanes = ["GPU compute", "weights to the GPU", "gradients from the GPU", "CPU optimizer sweep"]
    for row, lane in enumerate(lanes):
        draw.text(10, 52 + row * 40, lane, 12)
    left, unit = 200, 40
    draw.text(left, 22, "forward", 12, colour="muted")
    draw.text(left + 4.2 * unit, 22, "loss", 12, colour="muted")
    draw.text(
        left + 5.1 * unit,
        22,
        "backward: each block again, then its gradients",
        12,
        colour="muted",
    )
    for block in range(4):
        x = left + block * unit
        draw.box(x + 4, 36, unit - 6, 26, "compute", f"{block + 1}", 11)
        draw.box(x - 22, 76, unit - 10, 26, "weights", f"{block + 1}", 11)
        draw.box(x - 50, 156, unit - 10, 26, "sweep", f"{block + 1}", 11)
    draw.box(left + 4 * unit + 4, 36, unit - 10, 26, "working")
    for place, block in enumerate((4, 3, 2, 1)):
        x = left + 5 * unit + place * 1.65 * unit
        draw.box(x, 36, 1.58 * unit, 26, "compute", f"{block}", 11)
        draw.box(x - 34, 76, unit - 10, 26, "weights", f"{block}", 11)
        draw.box(x + 1.5 * unit, 116, unit - 10, 26, "gradients", f"{block}", 11)
    draw.caption(
        214,
        "Each block is fetched while the one before it computes. Its gradients leave "
        "while the next one computes.",
    )


def sweep_place(draw: Drawing) -> None:
    draw.text(10, 24, "step t", 13, bold=True)
    draw.text(410, 24, "step t + 1", 13, bold=True)
    draw.box(10, 40, 110, 34, "compute", "forward")
    draw.box(124, 40, 200, 34, "compute", "backward")
    draw.box(330, 40, 66, 34, "working", "norm, clip", 10)
    draw.box(410, 40, 150, 34, "compute", "forward")
    draw.box(564, 40, 146, 34, "compute", "backward")
    for block in range(4):
        draw.box(392 + block * 36, 96, 33, 30, "sweep", str(block + 1), 11)
        draw.arrow(408 + block * 36, 96, 428 + block * 36, 76)
    draw.text(10, 116, "optimizer sweep, block by block", 12)
    draw.caption(
        158,
        "The norm for clipping needs every gradient, so no update can start before "
        "backward ends. Block i is",
        "updated just before the next forward needs it: the sweep of later blocks "
        "hides behind the compute of earlier ones.",
    )


def cxl_striping(draw: Drawing) -> None:
    draw.box(10, 20, 150, 150, "panel", "")
    draw.text(85, 44, "CPU and DRAM", 13, "middle", bold=True)
    draw.box(24, 58, 122, 44, "states", "states of the sweep", 11)
    draw.box(24, 110, 122, 44, "weights", "staging", 11)
    for card in range(2):
        y = 20 + card * 80
        draw.box(330, y, 200, 70, "panel", "")
        draw.text(430, y + 20, f"CXL card {card + 1}", 13, "middle", bold=True)
        for part in range(4):
            hue = ("weights", "activations")[part % 2]
            draw.box(342 + part * 46, y + 30, 42, 28, hue, str(2 * part + card + 1), 11)
        draw.arrow(328, y + 40, 164, 80 + card * 24)
    draw.box(590, 50, 120, 80, "panel", "")
    draw.text(650, 86, "GPU", 13, "middle", bold=True)
    draw.arrow(532, 56, 588, 80)
    draw.arrow(532, 136, 588, 104)
    draw.caption(
        200,
        "What the CPU touches element by element stays in DRAM. What is only copied is "
        "striped over the cards in units",
        "of 2 MiB by their measured bandwidth, so that one copy uses all cards.",
    )


FIGURES: dict[str, tuple[str, int, int, Callable[[Drawing], None]]] = {
    "where-bytes-live": ("What each memory tier stores", 720, 306, where_bytes_live),
    "step": ("The timeline of one step", 720, 224, step_timeline),
    "sweep": ("The optimizer sweep between two steps", 720, 188, sweep_place),
    "cxl": ("Tensors striped over two CXL cards", 720, 228, cxl_striping),
}


def main() -> None:
    for name, (title, width, height, draw_into) in FIGURES.items():
        for theme in THEMES:
            drawing = Drawing(width, height, theme)
            draw_into(drawing)
            (IMAGES / f"{name}-{theme}.svg").write_text(drawing.svg(title))


if __name__ == "__main__":
    main()
