"""HTML and SVG as text, escaped where it is made. Room: show."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence

from penstock.observe.labels import fit

COLOURS = 8
"""Lines and boxes of the page's palette: c0 to c7 in page.css."""

_COLOUR = {"gpu": 0, "h2d": 1, "d2h": 2, "cpu sweep": 3}


def colour_of(resource: str) -> int:
    """The same colour for the same thing on all of a page."""
    if resource in _COLOUR:
        return _COLOUR[resource]
    if resource.startswith("disk:"):
        return 6 if resource.endswith(":write") else 4
    return 5 if resource.startswith("node") else 7


def text(value: str) -> str:
    """Text of anybody's, safe within an element or an attribute's quotes."""
    return html.escape(fit(value), quote=True)


def tag(name: str, *children: str, **attributes: object) -> str:
    """An element. Children are markup already; attributes are text. `class_` is class, an
    underscore is a hyphen, and None leaves an attribute out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(children)}</{name}>"


def _plain(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """Short, and without an exponent: a plot needs no more than three digits after the point."""
    return f"{value:.3f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, class_: str | None = None
) -> str:
    """Cells are text. The first of each row is its heading."""
    titles = "".join(tag("th", text(cell), scope="col") for cell in head)
    body = "".join(
        tag(
            "tr",
            tag("th", text(row[0]), scope="row"),
            *(tag("td", text(cell)) for cell in row[1:]),
        )
        for row in rows
    )
    inner = tag("caption", text(caption)) + tag("thead", tag("tr", titles)) + tag("tbody", body)
    # Wider than a phone: the table scrolls, not the page.
    made = tag("table", inner)
    return tag("div", made, class_=f"scroll {class_ or ''}".strip(), tabindex="0", role="region",
               aria_label=caption)  # fmt: skip


def folded(summary: str, inner: str) -> str:
    return tag("details", tag("summary", text(summary)), inner)


def data_block(data: object) -> str:
    """JSON that no name in it can break out of: `<` never stands there."""
    written = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        written = written.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="data">{written}</script>'
