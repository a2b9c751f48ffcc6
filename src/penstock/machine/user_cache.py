"""Files in the user's cache: results that take long to find and are the same the next time.

A process that can write these files could change the plans that Penstock makes. Entries are
therefore private, and a file that other users could have written is ignored.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
from pathlib import Path
from typing import TypeVar

from penstock import records
from penstock.durable_files import PRIVATE
from penstock.errors import PenstockError

T = TypeVar("T")


def cache_directory() -> Path:
    """Return the directory of Penstock's cached files."""
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "penstock"
    try:
        return Path.home() / ".cache" / "penstock"
    except RuntimeError:
        # HOME is not set, and the user has no entry in the user database, as in some containers.
        # Nothing is ever found in this directory, and nothing can be saved in it.
        return Path("/nonexistent/.cache/penstock")


@functools.cache
def code_fingerprint() -> str:
    """Return a hash of Penstock's code, for keys of entries that this code computes.

    The version number alone is not enough: in a development checkout the code changes, and the
    version does not. It takes about ten milliseconds.
    """
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    native = package.glob("_native*.so")
    for path in sorted([*package.rglob("*.py"), *native]):
        digest.update(f"{path.relative_to(package)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


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
        records.save(record, path, mode=PRIVATE)


def _is_private(path: Path) -> bool:
    """Return whether the path is this user's, and no one else can write to it."""
    found = path.lstat()
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.geteuid() and not others_write and not stat.S_ISLNK(found.st_mode)
