"""Exit codes, JSON, messages and progress bars that the commands share."""

from __future__ import annotations

import codecs
import contextlib
import json
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

EXIT_ERROR = 1
"""The user can fix the problem, which is described in one message."""

EXIT_BUG = 70
EXIT_INTERRUPTED = 130

_CONTROL = ("Cc", "Cs")
"""Unicode categories of control characters, such as ESC, and of surrogates."""

_BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that reverse the order of the text after them."""

_FORMAT_WARNING = warnings.formatwarning

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

ReportProgress = Callable[[int, int, str], None]
"""Called with the work done, the total, and a description of the current work."""


def print_json(data: object) -> None:
    """Print data on standard output. NaN and infinity are errors, as JSON has neither."""
    print(json.dumps(data, indent=2, allow_nan=False))


def print_errors(*lines: str) -> None:
    """Print lines on standard error, where they never mix with JSON."""
    for line in lines:
        print(line, file=sys.stderr)


def format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Format a warning. One of Penstock needs no line of code: the user did not call that line."""
    if category.__module__.startswith("penstock."):
        return f"warning: {message}\n"
    return _FORMAT_WARNING(message, category, filename, lineno, line)


def printable(text: str) -> str:
    """Spell out control characters, which could change the terminal or hide text.

    Line feeds and tabs stay.
    """
    return "".join(
        sign if sign in "\n\t" or not _changes_terminal(sign) else _escaped(sign) for sign in text
    )


def _changes_terminal(sign: str) -> bool:
    return unicodedata.category(sign) in _CONTROL or sign in _BIDI


def _escaped(sign: str) -> str:
    return sign.encode("unicode_escape", "surrogatepass").decode()


def register_ascii_fallback() -> None:
    """Register the error handler "penstock", which spells out what an encoding lacks in ASCII."""
    codecs.register_error("penstock", _spell_out)


def _spell_out(failed: UnicodeError) -> tuple[str, int]:
    assert isinstance(failed, UnicodeEncodeError)
    lacking = failed.object[failed.start : failed.end]
    return "".join({"±": "+-"}.get(sign, "?") for sign in lacking), failed.end


class EncodingConsole(Console):
    """A console that replaces characters its encoding lacks before it measures table columns.

    The replacement may be longer than the character, so a later replacement would shift columns.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        with contextlib.suppress(LookupError):
            text = text.encode(self.encoding, "penstock").decode(self.encoding)
        return super().render_str(text, **options)


@contextlib.contextmanager
def progress_bar(description: str, *, quiet: bool) -> Iterator[ReportProgress]:
    """Show a progress bar on standard error, unless `quiet` or standard error is no terminal."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(description, total=None)

        def report(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        yield report
