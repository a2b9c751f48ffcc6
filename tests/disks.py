"""Disks that tests can have: directories, and loop devices where root allows."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.memory.arena import Arena
from penstock.storage.devices import filesystem_of
from penstock.units import MiB


@contextlib.contextmanager
def loop_device(directory: Path, nbytes: int, *, sector: int = 512) -> Iterator[str]:
    """A raw block device over a file. Skips, saying what is missing, where it cannot be had."""
    if os.geteuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("needs root and losetup for a loop device")
    backing = directory / f"disk{sector}"
    backing.write_bytes(bytes(nbytes))
    made = subprocess.run(
        ["losetup", "--direct-io=on", "-b", str(sector), "-f", "--show", backing],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        backing.unlink()
        pytest.skip(f"needs a loop device of {sector} B sectors: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "-d", device], check=True)
        backing.unlink()


def direct_directory(directory: Path) -> Path:
    """A directory whose file system has O_DIRECT."""
    if filesystem_of(directory) in ("tmpfs", "ramfs"):
        pytest.skip(f"needs a temporary directory with O_DIRECT, {directory} is in memory")
    return directory


@contextlib.contextmanager
def memory_directory(name: str) -> Iterator[Path]:
    """A directory without O_DIRECT."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or filesystem_of(shared) != "tmpfs":
        pytest.skip("needs a tmpfs on /dev/shm")
    directory = shared / f"penstock-test-{os.getpid()}-{name}"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


class Buffers:
    """Aligned buffers of one arena."""

    def __init__(self, nbytes: int = 32 * MiB) -> None:
        self.arena = Arena(nbytes)

    def random(self, nbytes: int, *, align: int = 4096) -> memoryview:
        made = self.zeros(nbytes, align=align)
        made[:] = os.urandom(nbytes)
        return made

    def zeros(self, nbytes: int, *, align: int = 4096) -> memoryview:
        made = memoryview(self.arena.take(nbytes, align=align))
        made[:] = bytes(nbytes)
        return made
