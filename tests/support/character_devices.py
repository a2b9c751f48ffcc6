"""Character devices for tests.

Tests never use the machine's own devices: a bug that replaces /dev/null as root would break the
machine.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

_MINORS = {"null": 3, "full": 7}


def make_device(directory: Path, name: str) -> Path:
    """Create a device like /dev/`name` in `directory`; skip the test if that is not possible."""
    path = directory / name
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, _MINORS[name]))
        path.open("wb").close()
    except OSError as error:
        pytest.skip(f"no device can be created here: {error}")
    return path
