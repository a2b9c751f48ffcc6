"""Files in the user's cache: results that take long to find and are the same the next time.

Whoever can write a file here decides what Penstock plans. So entries are private: a file that
others could have written is ignored.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TypeVar

from penstock import records
from penstock.errors import PenstockError

T = TypeVar("T")


def cache_directory() -> Path:
    """Return the directory of Penstock's cached files."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "penstock"


def load_entry(kind: type[T], path: Path) -> T | None:
    """Return a record, or None if there is none, it is damaged, or others could have written it."""
    try:
        if not (_is_private(path.parent) and _is_private(path)):
            return None
        return records.load(kind, path)
    except (OSError, PenstockError):
        return None


def save_entry(record: object, path: Path) -> None:
    """Write a record that only this user can read and write; without success if that fails."""
    # A cache that cannot be written must not end a run.
    with contextlib.suppress(OSError, PenstockError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        records.save(record, path)
        path.chmod(0o600)


def _is_private(path: Path) -> bool:
    """Return whether the path is this user's, and no one else can write to it."""
    found = path.lstat()
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.geteuid() and not others_write and not stat.S_ISLNK(found.st_mode)
