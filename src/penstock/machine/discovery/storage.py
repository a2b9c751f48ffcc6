"""Describe a storage path: the directory or raw device, its file system and its drive."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.machine.machine import StoragePath
from penstock.machine.sysfs import System

_SECTOR = 512  # device sizes are in sectors of 512 bytes, regardless of the block size


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """The file system mounted over a path."""

    device_number: str
    """`major:minor` of a block device, or a number invented by the file system."""

    file_system: str
    """Type of the file system."""

    source: str
    """Mounted source; usually a path under /dev if there is a device."""


def find_storage(system: System, path: str | Path) -> StoragePath:
    """Describe a storage path. A missing directory is described by its nearest existing parent."""
    here = system.root / str(Path(path).absolute()).lstrip("/")
    inside = "/" + os.path.relpath(os.path.realpath(here), os.path.realpath(system.root))
    device = _device_named(system, inside)
    if device is not None:
        nbytes = (system.number(device / "size") or 0) * _SECTOR or None
        on_device = _on_device(system, path, device)
        return replace(on_device, capacity=nbytes, free=nbytes, direct=_supports_direct(here))
    while not os.path.exists(here) and here != here.parent:
        here = here.parent
    mount = _mount_over(system, inside)
    total, free = _disk_space(here)
    return replace(
        _on_device(system, path, _device_of(system, mount) if mount else None),
        file_system=mount.file_system if mount else "",
        capacity=total or None,
        free=min(free, total) if total else None,
        direct=_supports_direct(here),
    )


def _disk_space(here: Path) -> tuple[int, int]:
    """Return total bytes, and the bytes still available to an unprivileged user."""
    try:
        space = os.statvfs(here)
    except OSError:
        return 0, 0
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize


def _on_device(system: System, path: str | Path, device: Path | None) -> StoragePath:
    if device is None:
        return StoragePath(path=str(path))
    # A partition has no queue of its own; its disk is the parent directory.
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
    """Return the drive's model name; for a mapped or striped device, that of its first drive."""
    if model := system.text(disk / "device/model"):
        return model.strip()
    below = system.names(disk / "slaves")
    if not below:
        return ""
    part = Path(os.path.realpath(disk / "slaves" / below[0]))
    return _model(system, part.parent if (part / "partition").exists() else part)


def _device_named(system: System, path: str) -> Path | None:
    """Return the kernel's directory for `path` if it is a block device."""
    if not path.startswith("/dev/"):
        return None
    return _existing(system.root / "sys/class/block" / path[5:].replace("/", "!"))


def _device_of(system: System, mount: Mount) -> Path | None:
    by_number = _existing(system.root / "sys/dev/block" / mount.device_number)
    if by_number is not None or not mount.source.startswith("/dev/"):
        return by_number
    # btrfs and others invent a device number, but their source is still a device or a link to one.
    source = os.path.realpath(system.root / mount.source.lstrip("/"))
    return _device_named(system, "/" + os.path.relpath(source, os.path.realpath(system.root)))


def _existing(link: Path) -> Path | None:
    return Path(os.path.realpath(link)) if link.exists() else None


def _mount_over(system: System, path: str) -> Mount | None:
    """Return the mount with the longest matching path; a later mount hides an earlier one."""
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
    """Decode the octal escapes for spaces and similar characters in the mount table."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _supports_direct(here: Path) -> bool | None:
    """Return whether O_DIRECT works here, using a nameless temporary file that stays empty."""
    flags = os.O_TMPFILE | os.O_RDWR if os.path.isdir(here) else os.O_RDONLY
    try:
        os.close(os.open(here, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        # Other errors (no permission, read-only, no O_TMPFILE) say nothing about O_DIRECT.
        return False if error.errno == errno.EINVAL else None
    return True
