"""The NVMe drives of the guest, and device-mapper tables that make them fail."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECTOR = 512
"""Unit of device-mapper tables in bytes, independent of the drive's block size."""

TOOLS = Path(os.environ.get("PENSTOCK_VM_TOOLS", "/usr"))


def drives() -> dict[str, str]:
    """Return the raw devices of the guest's drives by serial number."""
    devices = {}
    for block in Path("/sys/block").glob("nvme*"):
        device = Path("/dev") / block.name
        if (
            device.is_block_device()
        ):  # skip the paths of a multipath device, which have no device file
            with contextlib.suppress(FileNotFoundError):  # the drive is being removed
                devices[(block / "device/serial").read_text().strip()] = str(device)
    return devices


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
    """A drive behind a device-mapper table that can be changed while it is in use."""

    name: str
    under: str
    path: str

    def load(self, table: str) -> None:
        """Switch to another table, after the requests in flight have finished."""
        dmsetup("reload", self.name, table=table)
        dmsetup("suspend", "--nolockfs", self.name)
        dmsetup("resume", "--noudevsync", self.name)

    def repair(self) -> None:
        """Pass every request to the drive again."""
        self.load(healthy(self.under))

    def hang(self) -> None:
        """Answer no request until `resume`."""
        dmsetup("suspend", "--noflush", "--nolockfs", self.name)

    def resume(self) -> None:
        dmsetup("resume", "--noudevsync", self.name)


@contextlib.contextmanager
def mapped(under: str, table: str = "") -> Iterator[Mapped]:
    """Create a device-mapper device over a raw device. Without a table it passes every request."""
    name = f"penstock-{Path(under).name}"
    dmsetup("create", name, "--noudevsync", table=table or healthy(under))
    minor = dmsetup("info", "--columns", "--noheadings", "-o", "minor", name).strip()
    try:
        yield Mapped(name, under, f"/dev/dm-{minor}")
    finally:
        dmsetup("remove", "--retry", "--noudevsync", name)


def sectors(under: str) -> int:
    return int(Path("/sys/class/block", Path(under).name, "size").read_text())


def healthy(under: str) -> str:
    return f"0 {sectors(under)} linear {under} 0\n"


def bad_between(under: str, first: int, last: int) -> str:
    """Return a table that fails every request to bytes [first, last)."""
    low, high, end = first // SECTOR, last // SECTOR, sectors(under)
    return (
        f"0 {low} linear {under} 0\n"
        f"{low} {high - low} error\n"
        f"{high} {end - high} linear {under} {high}\n"
    )


def flakey(under: str, *features: str) -> str:
    """Return a table of a permanently failing drive (up 0 s, down 1 s), as `features` describe."""
    options = f" {len(features)} {' '.join(features)}" if features else ""
    return f"0 {sectors(under)} flakey {under} 0 0 1{options}\n"


def slow(under: str, *, read_ms: int, write_ms: int) -> str:
    """Return a table that delays reads and writes."""
    return f"0 {sectors(under)} delay {under} 0 {read_ms} {under} 0 {write_ms}\n"
