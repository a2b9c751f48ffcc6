"""What a disk may carry that somebody would miss. Room: hold. Pure.

Places and magic numbers from the kernel's headers and util-linux's libblkid. Better one too many:
a disk refused costs a flag, a disk overwritten costs a disk.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from penstock.storage.header import MAGIC
from penstock.units import KiB, MiB

Read = Callable[[int, int], bytes]

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

# Distances back from the device's end.
FROM_END = [
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4 * KiB, b"EFI PART"),
    ("an Intel RAID member", 1024, b"Intel Raid ISM Cfg"),
    ("a DDF RAID member", 512, b"\xde\x11\xde\x11"),
]

_ZFS_UBERBLOCK = 0x00BAB10C
_ZFS_LABEL = 256 * KiB
_MD = 0xA92B4EFC


def find_signatures(read: Read, nbytes: int) -> list[str]:
    """Everything known that `read(offset, length)` shows on a device of `nbytes`."""
    found = [name for name, offset, magic in FROM_START if read(offset, len(magic)) == magic]
    for name, back, magic in FROM_END:
        if nbytes >= back and read(nbytes - back, len(magic)) == magic:
            found.append(name)
    if _has_raid_at_end(read, nbytes):
        found.append("a Linux RAID member")
    if _has_zfs(read, nbytes):
        found.append("a ZFS pool member")
    return list(dict.fromkeys(found))


def _has_raid_at_end(read: Read, nbytes: int) -> bool:
    """Superblock 0.90 in the last whole 64 KiB but one; 1.0 about 8 KiB before the end."""
    places = [nbytes // (64 * KiB) * 64 * KiB - 64 * KiB, (nbytes // 512 - 16) // 8 * 8 * 512]
    magics = (struct.pack("<I", _MD), struct.pack(">I", _MD))
    return any(place >= 0 and read(place, 4) in magics for place in places)


def _has_zfs(read: Read, nbytes: int) -> bool:
    """An uberblock in one of the two labels at the front or the two at the end."""
    end = nbytes // _ZFS_LABEL * _ZFS_LABEL
    magics = (struct.pack("<Q", _ZFS_UBERBLOCK), struct.pack(">Q", _ZFS_UBERBLOCK))
    for label in (0, _ZFS_LABEL, end - 2 * _ZFS_LABEL, end - _ZFS_LABEL):
        if label < 0:
            continue
        ring = read(label + 128 * KiB, 128 * KiB)
        if any(ring[at : at + 8] in magics for at in range(0, len(ring), KiB)):
            return True
    return False
