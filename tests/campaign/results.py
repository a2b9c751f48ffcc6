"""The results of a campaign: one JSON line per case, and the table of all of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.records import parse_lines

Outcome = Literal["ok", "lost", "silent", "traceback", "hang"]
"""How a case ended.

- `ok`: with the right result, or with a message and a documented exit code.
- `lost`: a run could not be resumed, or a checkpoint was gone.
- `silent`: success, or no message, with a wrong result.
- `traceback`: an exception that Penstock did not expect, or a crash.
- `hang`: more time or memory than the case may use.
"""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class NotAvailableError(Exception):
    """This machine cannot run a kind of cases."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one case, and what happened."""

    outcome: Outcome
    detail: str = ""
    """A short description: what was done, and how the case failed."""


OK = Verdict("ok")


@dataclass(frozen=True)
class CaseResult:
    """One line of the results file."""

    kind: str
    seed: int
    number: int
    outcome: Outcome
    detail: str
    seconds: float

    @property
    def command(self) -> str:
        """The command that runs this case again."""
        return (
            f"python -m tests.campaign --kind {self.kind} --seed {self.seed} --only {self.number}"
        )


class ResultsFile:
    """A file of results that a later call continues."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[CaseResult]:
        """Return the last result of every case."""
        if not self.path.exists():
            return []
        results = {}
        # The last line may be cut off, if the campaign was killed.
        for _, fields in parse_lines(self.path.read_text()):
            one = CaseResult(**{k: v for k, v in fields.items() if k != "command"})
            results[one.kind, one.seed, one.number] = one
        return list(results.values())

    def numbers(self, kind: str, seed: int, *, again: bool = False) -> set[int]:
        """Return the cases of a kind that have run; with `again`, those that ended well."""
        return {
            one.number
            for one in self.read()
            if (one.kind, one.seed) == (kind, seed) and not (again and one.outcome != "ok")
        }

    def add(self, result: CaseResult) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = asdict(result)
        if result.outcome != "ok":
            line["command"] = result.command
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def count(results: list[CaseResult]) -> dict[str, dict[str, Any]]:
    """Count the outcomes of each kind, and its time."""
    counted: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(one.kind for one in results):
        of_kind = [one for one in results if one.kind == kind]
        outcomes = Counter(one.outcome for one in of_kind)
        counted[kind] = {
            "cases": len(of_kind),
            **{outcome: outcomes[outcome] for outcome in OUTCOMES},
            "seconds": round(sum(one.seconds for one in of_kind), 1),
            "seeds": sorted({one.seed for one in of_kind}),
        }
    return counted


def table(counted: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the counts as text."""
    columns = ("cases", *OUTCOMES, "seconds")
    lines = [f"{'kind':<12}" + "".join(f"{name:>11}" for name in columns)]
    for kind, row in counted.items():
        lines.append(f"{kind:<12}" + "".join(f"{row[name]:>11}" for name in columns))
    return "\n".join(lines)
