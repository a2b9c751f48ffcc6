"""Writes a run's page. Room: show."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from penstock.observe.errors import ObserveError

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
