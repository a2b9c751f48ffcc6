"""Build HTML and SVG as text. All text is escaped where the markup is made."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence

from penstock.observe.labels import sanitize

COLOURS = 8
"""Number of colours for lines and boxes: c0 to c7 in page.css."""

_CODE = re.compile(r"`([^`]+)`")

_COLOURS = {"gpu": 0, "h2d": 1, "d2h": 2, "cpu sweep": 3}


def colour_of(resource: str) -> int:
    """Return the colour of a resource, which is the same everywhere on a page."""
    if resource in _COLOURS:
        return _COLOURS[resource]
    if resource.startswith("disk:"):
        return 6 if resource.endswith(":write") else 4
    return 5 if resource.startswith("node") else 7


def text(value: str) -> str:
    """Escape any text for use in an element or in a quoted attribute."""
    return html.escape(sanitize(value), quote=True)


def prose(value: str) -> str:
    """Escape a sentence, and mark what it has in backticks as code."""
    return _CODE.sub(r"<code>\1</code>", text(value))


def tag(name: str, *children: str, **attributes: object) -> str:
    """Return an element. Children are markup; attributes are text and are escaped.

    `class_` becomes `class`, underscores become hyphens, and attributes that are None are left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(children)}</{name}>"


def _plain(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """Format a number without an exponent; three digits after the point are enough for a plot."""
    return f"{value:.3f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str) -> str:
    """Return a table. Cells are text, and the first cell of a row is the row's heading."""
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
    # On a narrow screen the table scrolls, not the page.
    return tag("div", tag("table", inner), class_="scroll", tabindex="0", role="region",
               aria_label=caption)  # fmt: skip


def details(summary: str, inner: str) -> str:
    """Return markup that is collapsed until the reader opens it."""
    return tag("details", tag("summary", text(summary)), inner)


def data_block(data: object) -> str:
    """Return JSON data for the page's script. `<`, `>` and `&` are escaped, so that no name in the
    data can end the element."""
    written = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        written = written.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="data">{written}</script>'
