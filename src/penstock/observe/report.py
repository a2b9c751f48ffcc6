"""A run's report as a file and as JSON. Room: show."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.observe.errors import ObserveError
from penstock.observe.findings import Finding
from penstock.observe.measures import Measures
from penstock.observe.sections import missing, verdict

REPORT_FILE = "report.html"


def write_page(html: str, path: Path) -> None:
    """Whole or not at all: a reader never finds half a page."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if path.exists() and not path.is_file():
            # A device or a pipe is written to, not replaced; a directory says so itself.
            path.write_text(html, encoding="utf-8", errors="replace")
            return
        draft.write_text(html, encoding="utf-8", errors="replace")
        os.replace(draft, path)
    except OSError as refused:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ObserveError(
            "",
            f"cannot be written ({refused.strerror}); name another place with --out",
            where=str(path),
        ) from None


def report_json(m: Measures, findings: Sequence[Finding], path: Path) -> dict[str, Any]:
    """The frozen form that programs read."""
    return {
        "report": str(path),
        "verdict": verdict(m),
        "steps": len(m.steps),
        "step_seconds": m.seconds,
        "bound_by": m.bound.resource,
        "bound_share": m.bound.share,
        "phases": dict(m.phases),
        "busy": dict(m.busy),
        "waits": [{"for": list(names), "seconds": s} for names, s in m.waits.items()],
        "hidden": m.hidden,
        "exposed_seconds": m.exposed,
        "links": {
            name: {
                "nbytes": use.nbytes, "busy_seconds": use.busy, "hidden_seconds": use.hidden,
                "rate": use.rate, "ceiling": use.ceiling, "exact": use.exact,
            }
            for name, use in m.links.items()
        },
        "peaks": {
            peak.key: {"planned": peak.planned, "measured": peak.measured, "budget": peak.budget}
            for peak in m.peaks
        },
        "findings": [
            {"kind": f.kind, "level": f.level, "text": f.text, "seconds": f.seconds}
            for f in findings
        ],
        "missing": missing(m),
    }  # fmt: skip
