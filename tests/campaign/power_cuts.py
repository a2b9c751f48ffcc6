"""Power cuts: copy the block device while a run writes to it, replay the journal, and resume.

The device is a file on an XFS file system, whose clone is a copy of one moment: a write to the
device is in it completely or not at all. What the kernel has not written to the device yet, such
as a file without fsync, is lost. Needs root, loop devices, and the mkfs tools of the file systems.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.units import GiB, MiB
from tests.campaign.forks import Fork, penstock
from tests.campaign.results import NotAvailableError, Verdict
from tests.campaign.tiny_runs import LIMITS, TinyRuns, saved_step

CASES = 100

SIZES = {"ext4": 64 * MiB, "xfs": 320 * MiB, "btrfs": 160 * MiB}
"""File systems, and the size of a device: near the smallest that each can have."""

MAKE = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f"),
        "btrfs": ("mkfs.btrfs", "-q", "-f")}  # fmt: skip

FICLONE = 0x40049409


class PowerCuts:
    """Cuts the power of runs on each file system in turn."""

    def __init__(self, folder: Path) -> None:
        _check_available()
        self.runs = TinyRuns(folder)
        self.place = folder / "devices"
        _make("xfs", folder / "devices.img", 4 * GiB)
        self.place.mkdir()
        _mount(folder / "devices.img", self.place)
        for name, nbytes in SIZES.items():
            _make(name, self.place / f"{name}.img", nbytes)
        self.seconds = self._measure()

    def close(self) -> None:
        subprocess.run(["umount", self.place], check=False)

    def _measure(self) -> float:
        here = self._new_case()
        start = time.monotonic()
        with _mounted(self._device("ext4"), here / "disk") as disk:
            self.runs.start(self.runs.flags(disk / "out"), here).end()
        return time.monotonic() - start

    def _new_case(self) -> Path:
        shutil.rmtree(self.runs.case, ignore_errors=True)
        self.runs.case.mkdir()
        return self.runs.case

    def _device(self, name: str) -> Path:
        """Return a new, empty device with a file system."""
        return _clone(self.place / f"{name}.img", self.place / "device.img")

    def run(self, seed: int, number: int) -> Verdict:
        rng = random.Random(f"{seed} {number}")
        here, name = self._new_case(), list(SIZES)[number % len(SIZES)]
        device, copy = self._device(name), self.place / "copy.img"
        done, saved = [name], 0
        with _mounted(device, here / "disk") as disk:
            out = disk / "out"
            for cut in range(1 + (rng.random() < 0.4)):
                # A second run is resumed, and its power is cut soon after that.
                command = self.runs.flags(out)
                if (out / "run.yaml").exists():
                    command = ["train", "--out", str(out), "--resume", "--json"]
                moment = rng.uniform(0, self.seconds * (0.6 if cut else 1))
                fork = Fork(penstock(command), here, LIMITS)
                self._wait(fork, moment, disk, rng)
                # A checkpoint that was reported before the cut must be there after it.
                saved = max(saved, saved_step((here / "stdout.txt").read_text()))
                _clone(device, copy)
                fork.kill()
                fork.end()
                done.append(f"power cut after {moment:.3f} s")
        with _mounted(copy, here / "disk") as disk:
            ended = self.runs.resume(disk / "out", here)
            verdict = self.runs.check(ended, disk / "out", saved)
        return Verdict(verdict.outcome, f"{', '.join(done)}: {verdict.detail}".rstrip(": "))

    def _wait(self, fork: Fork, moment: float, disk: Path, rng: random.Random) -> None:
        """Wait until a moment. Sometimes the kernel writes everything to the device before."""
        if rng.random() < 0.4:
            written = rng.uniform(0, moment)
            fork.wait(written)
            subprocess.run(["sync", "-f", disk], check=True)
            moment = max(0.0, moment - written)
        fork.wait(moment)


def _check_available() -> None:
    if os.geteuid() != 0:
        raise NotAvailableError("needs root, to mount file systems")
    for tool in ("losetup", *(command[0] for command in MAKE.values())):
        if shutil.which(tool) is None:
            raise NotAvailableError(f"needs {tool}; on Debian: apt install xfsprogs btrfs-progs")


def _make(name: str, path: Path, nbytes: int) -> None:
    with path.open("wb") as file:
        file.truncate(nbytes)
    subprocess.run([*MAKE[name], path], check=True, capture_output=True)


def _clone(source: Path, target: Path) -> Path:
    """Copy a device as it is at one moment."""
    with source.open("rb") as old, target.open("wb") as new:
        fcntl.ioctl(new, FICLONE, old.fileno())
    return target


def _mount(device: Path, place: Path) -> None:
    done = subprocess.run(
        ["mount", "-o", "loop", device, place], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise NotAvailableError(f"cannot mount {device}: {done.stderr.strip()}")


@contextlib.contextmanager
def _mounted(device: Path, place: Path) -> Iterator[Path]:
    """Mount a device, which replays the journal of its file system."""
    place.mkdir(exist_ok=True)
    _mount(device, place)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)
