"""Decide whether a raw block device is safe to write on.

A device is refused if it, one of its partitions or a device stacked on it is in use, and, unless
erasing was requested, if it carries a known signature. The checks only read, and they run before
the device is opened for writing. Opening it exclusively (O_EXCL) makes the kernel refuse devices in
use as well; these checks add the reason.

Offsets and magic numbers of the signatures are those of the kernel headers and of util-linux's
libblkid. When in doubt a signature is listed: a refused disk costs a flag, an overwritten disk
costs its data.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.machine.sysfs import System
from penstock.storage.errors import DeviceInUseError, DeviceNotEmptyError
from penstock.storage.header import MAGIC
from penstock.units import KiB, MiB

Read = Callable[[int, int], bytes]
"""Reads `length` bytes at `offset`; returns fewer beyond the end of the device."""

SECTOR = 512
"""Unit of device sizes in /sys, independent of the block size of the device."""

FROM_START = [
    ("an ext2, ext3 or ext4 file system", 0x438, b"\x53\xef"),
    ("an XFS file system", 0, b"XFSB"),
    ("a Btrfs file system", 64 * KiB + 0x40, b"_BHRfS_M"),
    ("an F2FS file system", 0x400, b"\x10\x20\xf5\xf2"),
    ("a bcachefs file system", 4 * KiB + 24, bytes.fromhex("c68573f666ce90a9d96a60cf803df7ef")),
    ("a JFS file system", 32 * KiB, b"JFS1"),
    ("a ReiserFS file system", 64 * KiB + 0x34, b"ReIsEr"),
    ("a NILFS2 file system", 0x406, b"\x34\x34"),
    ("a GFS2 file system", 64 * KiB, b"\x01\x16\x19\x70"),
    ("an OCFS2 file system", 8 * KiB, b"OCFSV2"),
    ("an EROFS image", 0x400, b"\xe2\xe1\xf5\xe0"),
    ("a SquashFS image", 0, b"hsqs"),
    ("an NTFS file system", 3, b"NTFS    "),
    ("an exFAT file system", 3, b"EXFAT   "),
    ("a FAT file system", 0x36, b"FAT1"),
    ("a FAT file system", 0x52, b"FAT32"),
    ("an HFS+ file system", 0x400, b"H+"),
    ("an HFSX file system", 0x400, b"HX"),
    ("an APFS container", 32, b"NXSB"),
    ("an ISO 9660 image", 32 * KiB + 1, b"CD001"),
    ("an LVM physical volume", 512, b"LABELONE"),
    ("an LVM physical volume", 0, b"LABELONE"),
    ("an LVM physical volume", 1024, b"LABELONE"),
    ("an LVM physical volume", 1536, b"LABELONE"),
    ("a LUKS encrypted volume", 0, b"LUKS\xba\xbe"),
    ("a LUKS encrypted volume", 16 * KiB, b"SKUL\xba\xbe"),
    ("a Linux RAID member", 0, b"\xfc\x4e\x2b\xa9"),
    ("a Linux RAID member", 4 * KiB, b"\xfc\x4e\x2b\xa9"),
    ("a bcache device", 4 * KiB + 24, bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81")),
    ("a Ceph BlueStore device", 0, b"bluestore block device"),
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4 * KiB, b"EFI PART"),
    ("a partition table", 510, b"\x55\xaa"),
    ("swap space", 4 * KiB - 10, b"SWAPSPACE2"),
    ("swap space", 16 * KiB - 10, b"SWAPSPACE2"),
    ("swap space", 64 * KiB - 10, b"SWAPSPACE2"),
    ("a hibernated system", 4 * KiB - 10, b"S1SUSPEND"),
    ("a VMFS volume", 1 * MiB, b"\x0d\xd0\x01\xc0"),
    ("a Penstock store", 0, MAGIC),
]
"""Name, offset from the start of the device, and magic number of known signatures."""

FROM_END = [
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4 * KiB, b"EFI PART"),
    ("an Intel RAID member", 1024, b"Intel Raid ISM Cfg"),
    ("a DDF RAID member", 512, b"\xde\x11\xde\x11"),
]
"""Name, distance from the end of the device, and magic number of known signatures."""

_ZFS_UBERBLOCK = 0x00BAB10C
_ZFS_LABEL_NBYTES = 256 * KiB
_MD_MAGIC = 0xA92B4EFC


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A block device as the kernel describes it."""

    path: str
    number: str
    """Device number, `major:minor`."""
    model: str
    nbytes: int
    logical_block: int
    """Smallest transfer the device accepts, in bytes."""
    uses: tuple[str, ...]
    """What uses the device or one of its partitions: mounts, swap, RAID, LVM."""
    signatures: tuple[str, ...]
    """Known file systems, partition tables and the like on the device."""


def inspect_device(path: str | Path, system: System | None = None) -> Device:
    """Describe a device. Reads it, and writes nothing."""
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
    """Raise unless the device is unused, and either empty or to be erased.

    `erase` does not allow writing on a device in use: that is never intended.
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
    """Format a device number from `os.stat` as `major:minor`."""
    return f"{os.major(number)}:{os.minor(number)}"


def logical_block(number: str, system: System | None = None) -> int:
    """Return the smallest transfer the device accepts, or 512 if the kernel does not report it."""
    system = system or System()
    for directory in ("queue", "../queue"):  # a partition shares the queue of its disk
        nbytes = system.number(f"sys/dev/block/{number}/{directory}/logical_block_size")
        if nbytes:
            return nbytes
    return SECTOR


def filesystem_of(path: str | Path, system: System | None = None) -> str:
    """Return the type of the file system that holds `path`, or "" if it is unknown."""
    number = device_number(os.stat(path).st_dev)
    for line in ((system or System()).text("proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split(" ")[2] == number:
            return rest.split(" ")[0]
    return ""


def find_signatures(read: Read, nbytes: int) -> list[str]:
    """List the known signatures on a device of `nbytes` that `read` gives access to."""
    found = [name for name, offset, magic in FROM_START if read(offset, len(magic)) == magic]
    for name, back, magic in FROM_END:
        if nbytes >= back and read(nbytes - back, len(magic)) == magic:
            found.append(name)
    if _has_raid_at_end(read, nbytes):
        found.append("a Linux RAID member")
    if _has_zfs(read, nbytes):
        found.append("a ZFS pool member")
    return list(dict.fromkeys(found))


def _model(number: str, system: System) -> str:
    for name in ("device/model", "../device/model"):
        if model := (system.text(f"sys/dev/block/{number}/{name}") or "").strip():
            return model
    backing = system.text(f"sys/dev/block/{number}/loop/backing_file")
    return f"loop device over {backing}" if backing else "unknown model"


def _uses(number: str, system: System) -> list[str]:
    """List the mounts, swap areas and stacked devices of a device and its partitions."""
    uses = []
    for part in _with_partitions(number, system):
        name = _name(part, system)
        uses += [f"{name} is mounted on {mount}" for mount in _mounts(part, system)]
        if any(line.split()[0].endswith(f"/{name}") for line in _swaps(system)):
            uses.append(f"{name} is swap space")
        for holder in system.names(f"sys/dev/block/{part}/holders"):
            uses.append(f"{name} is part of {holder}")
            if above := system.text(f"sys/class/block/{holder}/dev"):
                uses += [f"{holder} is mounted on {mount}" for mount in _mounts(above, system)]
    return uses


def _with_partitions(number: str, system: System) -> list[str]:
    numbers = [number]
    for entry in system.names(f"sys/dev/block/{number}"):
        if system.text(f"sys/dev/block/{number}/{entry}/partition") is not None:
            numbers.append(system.text(f"sys/dev/block/{number}/{entry}/dev") or "")
    return [n for n in numbers if n]


def _name(number: str, system: System) -> str:
    match = re.search(r"^DEVNAME=(.*)$", system.text(f"sys/dev/block/{number}/uevent") or "", re.M)
    return match[1] if match else number


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
    """Read from a device, starting at a block boundary."""
    first = offset // (4 * KiB) * 4 * KiB
    return os.pread(fd, offset + length - first, first)[offset - first :]


def _has_raid_at_end(read: Read, nbytes: int) -> bool:
    """Look for Linux RAID superblocks near the end of the device.

    Version 0.90 is 64 to 128 KiB before the end, version 1.0 about 8 KiB before it.
    """
    offsets = [nbytes // (64 * KiB) * 64 * KiB - 64 * KiB, (nbytes // 512 - 16) // 8 * 8 * 512]
    magics = (struct.pack("<I", _MD_MAGIC), struct.pack(">I", _MD_MAGIC))
    return any(offset >= 0 and read(offset, 4) in magics for offset in offsets)


def _has_zfs(read: Read, nbytes: int) -> bool:
    """Look for a ZFS uberblock in the two labels at the start and the two at the end."""
    end = nbytes // _ZFS_LABEL_NBYTES * _ZFS_LABEL_NBYTES
    magics = (struct.pack("<Q", _ZFS_UBERBLOCK), struct.pack(">Q", _ZFS_UBERBLOCK))
    for label in (0, _ZFS_LABEL_NBYTES, end - 2 * _ZFS_LABEL_NBYTES, end - _ZFS_LABEL_NBYTES):
        if label < 0:
            continue
        ring = read(label + 128 * KiB, 128 * KiB)
        if any(ring[at : at + 8] in magics for at in range(0, len(ring), KiB)):
            return True
    return False
