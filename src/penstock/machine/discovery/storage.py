"""Directories and raw devices where bytes may rest, and what is below them. Room: measure."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.machine.machine import StoragePath
from penstock.machine.sysfs import System

_SECTOR = 512  # the kernel counts a device's size in these, whatever its blocks are


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """What is mounted over a path."""

    device_number: str
    """`major:minor`, of a block device or made up by the file system."""

    file_system: str
    """Its kind."""

    source: str
    """What was mounted; a path under /dev for most that have a device."""


def find_storage(system: System, path: str | Path) -> StoragePath:
    """What is known of one path. A directory yet to be made is judged by its nearest parent."""
    here = system.root / str(Path(path).absolute()).lstrip("/")
    inside = "/" + os.path.relpath(os.path.realpath(here), os.path.realpath(system.root))
    device = _device_named(system, inside)
    if device is not None:
        nbytes = (system.number(device / "size") or 0) * _SECTOR or None
        on_device = _on_device(system, path, device)
        return replace(on_device, capacity=nbytes, free=nbytes, direct=_direct(here))
    while not os.path.exists(here) and here != here.parent:
        here = here.parent
    mount = _mount_over(system, inside)
    total, free = _space(here)
    return replace(
        _on_device(system, path, _device_of(system, mount) if mount else None),
        file_system=mount.file_system if mount else "",
        capacity=total or None,
        free=min(free, total) if total else None,
        direct=_direct(here),
    )


def _space(here: Path) -> tuple[int, int]:
    """Bytes in all, and bytes a user without privileges could still take."""
    try:
        space = os.statvfs(here)
    except OSError:
        return 0, 0
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize


def _on_device(system: System, path: str | Path, device: Path | None) -> StoragePath:
    if device is None:
        return StoragePath(path=str(path))
    # A partition has no queue of its own; its disk is the directory above.
    disk = device.parent if (device / "partition").exists() else device
    rotational = system.number(disk / "queue/rotational")
    return StoragePath(
        path=str(path),
        device="/dev/" + device.name.replace("!", "/"),
        model=_model(system, disk),
        block=system.number(disk / "queue/logical_block_size") or 512,
        rotational=None if rotational is None else bool(rotational),
    )


def _model(system: System, disk: Path) -> str:
    """The drive's name for itself; of a mapped or striped device, the first drive's below it."""
    if model := system.text(disk / "device/model"):
        return model.strip()
    below = system.names(disk / "slaves")
    if not below:
        return ""
    part = Path(os.path.realpath(disk / "slaves" / below[0]))
    return _model(system, part.parent if (part / "partition").exists() else part)


def _device_named(system: System, path: str) -> Path | None:
    """The kernel's directory of the block device that `path` is, if it is one."""
    if not path.startswith("/dev/"):
        return None
    return _existing(system.root / "sys/class/block" / path[5:].replace("/", "!"))


def _device_of(system: System, mount: Mount) -> Path | None:
    by_number = _existing(system.root / "sys/dev/block" / mount.device_number)
    if by_number is not None or not mount.source.startswith("/dev/"):
        return by_number
    # btrfs and others make up a device number; their source still is a device, perhaps by a link.
    source = os.path.realpath(system.root / mount.source.lstrip("/"))
    return _device_named(system, "/" + os.path.relpath(source, os.path.realpath(system.root)))


def _existing(link: Path) -> Path | None:
    return Path(os.path.realpath(link)) if link.exists() else None


def _mount_over(system: System, path: str) -> Mount | None:
    """The mount with the longest path; of two on one path the later hides the earlier."""
    best, length = None, -1
    for line in (system.text("proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) < 5 or len(right) < 2:
            continue
        point = _unescape(left[4]).rstrip("/")
        if (path == point or path.startswith(point + "/")) and len(point) >= length:
            length = len(point)
            best = Mount(device_number=left[2], file_system=right[0], source=_unescape(right[1]))
    return best


def _unescape(text: str) -> str:
    """Spaces and the like are octal in the kernel's table."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _direct(here: Path) -> bool | None:
    """Whether O_DIRECT opens here. Nothing is written: the file has no name and no bytes."""
    how = os.O_TMPFILE | os.O_RDWR if os.path.isdir(here) else os.O_RDONLY
    try:
        os.close(os.open(here, how | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError as refused:
        # Other refusals (no permission, read-only, no nameless files) say nothing about O_DIRECT.
        return False if refused.errno == errno.EINVAL else None
    return True
