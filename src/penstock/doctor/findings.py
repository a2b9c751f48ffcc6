"""The result of a check, and how it is printed."""

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
    """The result of a check. Every finding that is not `ok` says why it matters and what to do."""

    check: str
    """Name of the check, the same on every machine."""

    status: Status
    """`ok`; `note`: little or no effect; `warn`: costs speed or memory; `bad`: a feature fails."""

    found: str
    """Result of the check, with numbers."""

    why: str = ""
    """Consequence for Penstock."""

    fix: str = ""
    """Instructions, with commands in backticks."""

    def __post_init__(self) -> None:
        assert self.status == "ok" or (self.why and self.fix), (
            f"{self.check} lacks a reason or a fix"
        )


def ok(check: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check=check, status="ok", found=found)


def render(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings as a table that is readable without color."""
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        # Use Text and not markup: rich would drop the kernel's "[madvise]" as an unknown tag.
        description = Text(finding.found)
        if finding.status != "ok":
            description.append(f"\n{finding.why}", style="dim")
            description.append(f"\n-> {finding.fix}")
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(status, Text(finding.check), description)
    console.print(table)
    counts = Counter[str](finding.status for finding in findings)
    console.print(Text(", ".join(f"{counts[status]} {status}" for status in _STYLES)))


def to_json(findings: Sequence[Finding]) -> object:
    """Return the findings for `--json`: a list of objects."""
    documents = []
    for finding in findings:
        document = records.to_json(finding)
        assert isinstance(document, dict)
        if "fix" in document:
            document["mend"] = document["fix"]  # deprecated name of the key, for existing scripts
        documents.append(document)
    return documents
