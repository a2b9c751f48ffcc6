"""Is this raw device safe to write on? Room: hold.

Read-only, and asked before anything is opened for writing. The kernel's own claim (O_EXCL on a
block device) comes on top; this gives the reasons.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.storage.errors import DeviceInUseError, DeviceNotEmptyError
from penstock.storage.signatures import find_signatures
from penstock.system import System
from penstock.units import KiB

SECTOR = 512
"""/sys counts in these, whatever the device's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A block device as the kernel describes it."""

    path: str
    number: str
    """`major:minor`."""
    model: str
    nbytes: int
    logical_block: int
    uses: tuple[str, ...]
    """Who has it: mounts, swap, RAID, LVM; of its partitions too."""
    signatures: tuple[str, ...]
    """What it carries."""


def inspect_device(path: str | Path, system: System | None = None) -> Device:
    """Look without touching."""
    system = system or System()
    number = device_number(os.stat(path).st_rdev)
    nbytes = (system.number(f"sys/dev/block/{number}/size") or 0) * SECTOR
    return Device(
        path=os.fspath(path),
        number=number,
        model=_model(number, system),
        nbytes=nbytes,
        logical_block=logical_block(number, system),
        uses=tuple(_uses(number, system)),
        signatures=tuple(_read_signatures(path, nbytes)),
    )


def check_device(device: Device, *, erase: bool) -> None:
    """Raise unless the device is free, and empty or to be erased.

    Erasing what is mounted is never what was meant, so `erase` does not allow it.
    """
    if device.uses:
        raise DeviceInUseError(device.path, device.uses)
    if device.signatures and not erase:
        raise DeviceNotEmptyError(
            device.path,
            signatures=device.signatures,
            model=device.model,
            nbytes=device.nbytes,
        )


def device_number(number: int) -> str:
    return f"{os.major(number)}:{os.minor(number)}"


def logical_block(number: str, system: System | None = None) -> int:
    """The smallest transfer the device takes; 512 where the kernel does not say."""
    system = system or System()
    for place in ("queue", "../queue"):  # a partition's queue is its disk's
        found = system.number(f"sys/dev/block/{number}/{place}/logical_block_size")
        if found:
            return found
    return SECTOR


def filesystem_of(path: str | Path, system: System | None = None) -> str:
    """The type of the file system that holds `path`, or nothing where it cannot be told."""
    number = device_number(os.stat(path).st_dev)
    for line in ((system or System()).text("proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split(" ")[2] == number:
            return rest.split(" ")[0]
    return ""


def _model(number: str, system: System) -> str:
    for place in ("device/model", "../device/model"):
        if model := (system.text(f"sys/dev/block/{number}/{place}") or "").strip():
            return model
    backing = system.text(f"sys/dev/block/{number}/loop/backing_file")
    return f"loop device over {backing}" if backing else "unknown model"


def _uses(number: str, system: System) -> list[str]:
    """Mounts, swap and stacked devices of the device, its partitions and whatever lies on them."""
    uses = []
    for part in _with_partitions(number, system):
        name = _name(part, system)
        uses += [f"{name} is mounted on {where}" for where in _mounts(part, system)]
        if any(line.split()[0].endswith(f"/{name}") for line in _swaps(system)):
            uses.append(f"{name} is swap space")
        for holder in system.names(f"sys/dev/block/{part}/holders"):
            uses.append(f"{name} is part of {holder}")
            if above := system.text(f"sys/class/block/{holder}/dev"):
                uses += [f"{holder} is mounted on {where}" for where in _mounts(above, system)]
    return uses


def _with_partitions(number: str, system: System) -> list[str]:
    numbers = [number]
    for entry in system.names(f"sys/dev/block/{number}"):
        if system.text(f"sys/dev/block/{number}/{entry}/partition") is not None:
            numbers.append(system.text(f"sys/dev/block/{number}/{entry}/dev") or "")
    return [n for n in numbers if n]


def _name(number: str, system: System) -> str:
    found = re.search(r"^DEVNAME=(.*)$", system.text(f"sys/dev/block/{number}/uevent") or "", re.M)
    return found[1] if found else number


def _mounts(number: str, system: System) -> list[str]:
    lines = (system.text("proc/self/mountinfo") or "").splitlines()
    return [line.split(" ")[4] for line in lines if line.split(" ")[2] == number]


def _swaps(system: System) -> list[str]:
    return [line for line in (system.text("proc/swaps") or "").splitlines()[1:] if line.strip()]


def _read_signatures(path: str | Path, nbytes: int) -> list[str]:
    with open(path, "rb", buffering=0) as device:
        return find_signatures(
            lambda offset, length: _read(device.fileno(), offset, length), nbytes
        )


def _read(fd: int, offset: int, length: int) -> bytes:
    """What is there; nothing beyond the end. Whole blocks, so that 4Kn devices answer."""
    first = offset // (4 * KiB) * 4 * KiB
    return os.pread(fd, offset + length - first, first)[offset - first :]
