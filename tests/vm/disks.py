"""The drives of the guest with disks, and device-mapper layers that break them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECTOR = 512
"""Device-mapper counts in these, whatever the drive's blocks."""

TOOLS = Path(os.environ.get("PENSTOCK_VM_TOOLS", "/usr"))


def drives() -> dict[str, str]:
    """The raw devices of the guest's drives, by serial number."""
    found = {}
    for block in Path("/sys/block").glob("nvme*"):
        device = Path("/dev") / block.name
        if device.is_block_device():  # and not one of several ways to it, which has no file
            with contextlib.suppress(FileNotFoundError):  # it is just being pulled out
                found[(block / "device/serial").read_text().strip()] = str(device)
    return found


def drive(serial: str) -> str:
    return drives()[serial]


def dmsetup(*arguments: str, table: str = "") -> str:
    libraries = TOOLS / "lib/x86_64-linux-gnu"
    done = subprocess.run(
        [TOOLS / "sbin/dmsetup", *arguments],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
        input=table, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"dmsetup {arguments}: {done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Mapped:
    """A drive seen through a table that can be changed while it is in use."""

    name: str
    under: str
    path: str

    def be(self, table: str) -> None:
        """Behave so from now on. What is under way ends first."""
        dmsetup("reload", self.name, table=table)
        dmsetup("suspend", "--nolockfs", self.name)
        dmsetup("resume", "--noudevsync", self.name)

    def be_well(self) -> None:
        self.be(well(self.under))

    def hang(self) -> None:
        """Answer nothing until it resumes."""
        dmsetup("suspend", "--noflush", "--nolockfs", self.name)

    def resume(self) -> None:
        dmsetup("resume", "--noudevsync", self.name)


@contextlib.contextmanager
def mapped(under: str, table: str = "") -> Iterator[Mapped]:
    """A layer over a raw device, passing everything on unless a table says otherwise."""
    name = f"penstock-{Path(under).name}"
    dmsetup("create", name, "--noudevsync", table=table or well(under))
    minor = dmsetup("info", "--columns", "--noheadings", "-o", "minor", name).strip()
    try:
        yield Mapped(name, under, f"/dev/dm-{minor}")
    finally:
        dmsetup("remove", "--retry", "--noudevsync", name)


def sectors(under: str) -> int:
    return int(Path("/sys/class/block", Path(under).name, "size").read_text())


def well(under: str) -> str:
    return f"0 {sectors(under)} linear {under} 0\n"


def bad_between(under: str, first: int, last: int) -> str:
    """Every request that touches bytes [first, last) fails."""
    low, high, end = first // SECTOR, last // SECTOR, sectors(under)
    return (
        f"0 {low} linear {under} 0\n"
        f"{low} {high - low} error\n"
        f"{high} {end - high} linear {under} {high}\n"
    )


def flakey(under: str, *features: str) -> str:
    """Down for good (up 0 s, down 1 s, and again), in the way that the features say."""
    asked = f" {len(features)} {' '.join(features)}" if features else ""
    return f"0 {sectors(under)} flakey {under} 0 0 1{asked}\n"


def slow(under: str, *, read_ms: int, write_ms: int) -> str:
    return f"0 {sectors(under)} delay {under} 0 {read_ms} {under} 0 {write_ms}\n"
