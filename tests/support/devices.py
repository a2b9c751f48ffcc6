"""Character devices of the tests' own.

Never the machine's: root's save over /dev/null, should it go wrong again, takes it from everyone.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

_MINORS = {"null": 3, "full": 7}


def make_device(directory: Path, name: str) -> Path:
    """A device like /dev/`name`, below `directory`; skips where none can be made and used."""
    path = directory / name
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, _MINORS[name]))
        path.open("wb").close()
    except OSError as refused:
        pytest.skip(f"no device can be made here: {refused}")
    return path
