"""Disks for tests: directories, and loop devices if the tests run as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.memory.arena import Arena
from penstock.storage.devices import filesystem_of
from penstock.units import MiB


@contextlib.contextmanager
def loop_device(directory: Path, nbytes: int, *, sector: int = 512) -> Iterator[str]:
    """Create a raw block device over a file, or skip the test and name the missing requirement."""
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
    """Return the directory, or skip the test if its file system has no O_DIRECT."""
    if filesystem_of(directory) in ("tmpfs", "ramfs"):
        pytest.skip(f"needs a temporary directory with O_DIRECT; {directory} is in memory")
    return directory


@contextlib.contextmanager
def memory_directory(name: str) -> Iterator[Path]:
    """Create a directory on a file system without O_DIRECT."""
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
    """Allocates aligned buffers from one arena."""

    def __init__(self, nbytes: int = 32 * MiB) -> None:
        self.arena = Arena(nbytes)

    def random(self, nbytes: int, *, align: int = 4096) -> memoryview:
        buffer = self.zeros(nbytes, align=align)
        buffer[:] = os.urandom(nbytes)
        return buffer

    def zeros(self, nbytes: int, *, align: int = 4096) -> memoryview:
        buffer = memoryview(self.arena.take(nbytes, align=align))
        buffer[:] = bytes(nbytes)
        return buffer


@dataclass(frozen=True)
class FaultyDisk:
    """A raw device that fails while the file `switch` exists."""

    device: str
    switch: Path

    def fail(self) -> None:
        self.switch.touch()

    def repair(self) -> None:
        self.switch.unlink()


@contextlib.contextmanager
def faulty_device(directory: Path, nbytes: int, *options: str) -> Iterator[FaultyDisk]:
    """Create a loop device over FUSE over nbdkit, whose filters inject errors and delays."""
    missing = [t for t in ("nbdkit", "nbdfuse", "losetup", "fusermount3") if not shutil.which(t)]
    if os.geteuid() != 0 or missing or not os.path.exists("/dev/fuse"):
        pytest.skip(f"needs root, /dev/fuse and {', '.join(missing) or 'nbdkit'} for a faulty disk")
    mounted, switch = directory / "disk", directory / "broken"
    mounted.touch()
    filters = ["--filter=error", "--filter=delay", "memory", str(nbytes)]
    errors = [f"error-file={switch}", "error-rate=100%", "error=EIO", *options]
    with contextlib.ExitStack() as ending:
        socket = directory / "socket"
        server = subprocess.Popen(["nbdkit", "-f", "-U", socket, *filters, *errors])
        ending.callback(_end, server)
        _wait_until(socket.exists)
        fuse = subprocess.Popen(["nbdfuse", "-C", "4", mounted, "--unix", socket])
        ending.callback(_end, fuse)
        _wait_until(lambda: mounted.stat().st_size == nbytes)
        # Direct I/O, because the page cache in between would hide the faults.
        made = subprocess.run(
            ["losetup", "--direct-io=on", "-f", "--show", mounted],
            capture_output=True,
            text=True,
            check=True,
        )
        device = made.stdout.strip()
        ending.callback(subprocess.run, ["fusermount3", "-uqz", mounted], check=False)
        ending.callback(subprocess.run, ["losetup", "-d", device], check=False)
        yield FaultyDisk(device, switch)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        if time.monotonic() > end:
            pytest.skip("nbdkit did not start within 20 s")
        time.sleep(0.02)
