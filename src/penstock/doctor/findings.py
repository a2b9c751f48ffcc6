"""One thing the doctor looked at, and how it is shown. Room: show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock import records

Status = Literal["ok", "note", "warn", "bad"]

_STYLES = {"ok": "green", "note": "cyan", "warn": "yellow", "bad": "bold red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check found. Whatever is not fine says why it matters and what to do."""

    check: str
    """The check's name, the same on every machine."""

    status: Status
    """`note` costs nothing or little, `warn` costs speed or room, `bad` stops a feature."""

    found: str
    """How things are, with the numbers."""

    why: str = ""
    """What it means for Penstock."""

    mend: str = ""
    """The way out; commands stand in backticks."""

    def __post_init__(self) -> None:
        assert self.status == "ok" or (self.why and self.mend), f"{self.check} leaves one guessing"


def fine(check: str, found: str) -> Finding:
    return Finding(check=check, status="ok", found=found)


def render(findings: Sequence[Finding], console: Console) -> None:
    """A table that reads the same without colour."""
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        # Text, not markup: "[madvise]" is the kernel's writing and would vanish as a tag.
        says = Text(finding.found)
        if finding.status != "ok":
            says.append(f"\n{finding.why}", style="dim")
            says.append(f"\n-> {finding.mend}")
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(status, Text(finding.check), says)
    console.print(table)
    counts = Counter[str](finding.status for finding in findings)
    console.print(Text(", ".join(f"{counts[status]} {status}" for status in _STYLES)))


def to_json(findings: Sequence[Finding]) -> object:
    """For `--json`: a list of objects with the fields of a Finding."""
    return [records.to_json(finding) for finding in findings]
