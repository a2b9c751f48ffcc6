"""Raw devices: their signatures and users, from synthetic disks and a synthetic /sys."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from penstock.machine.sysfs import System
from penstock.storage.devices import (
    FROM_END,
    FROM_START,
    Device,
    check_device,
    find_signatures,
    inspect_device,
    logical_block,
)
from penstock.storage.errors import DeviceInUseError, DeviceNotEmptyError
from penstock.storage.header import MAGIC
from penstock.units import KiB, MiB
from tests.support.disks import loop_device

DISK = 4 * MiB


def found_on(marks: dict[int, bytes], nbytes: int = DISK) -> list[str]:
    disk = bytearray(nbytes)
    for offset, mark in marks.items():
        disk[offset : offset + len(mark)] = mark
    return find_signatures(lambda offset, length: bytes(disk[offset : offset + length]), nbytes)


def test_an_empty_disk_has_no_signatures() -> None:
    assert found_on({}) == []
    assert found_on({}, nbytes=512) == []


@pytest.mark.parametrize(("name", "offset", "magic"), FROM_START)
def test_signatures_at_the_start_are_found(name: str, offset: int, magic: bytes) -> None:
    assert name in found_on({offset: magic})


@pytest.mark.parametrize(("name", "back", "magic"), FROM_END)
def test_signatures_at_the_end_are_found(name: str, back: int, magic: bytes) -> None:
    assert name in found_on({DISK - back: magic})


@pytest.mark.parametrize("offset", [0, 4 * KiB, DISK - 64 * KiB, DISK - 8 * KiB])
def test_raid_superblocks_of_every_version_are_found(offset: int) -> None:
    assert found_on({offset: struct.pack("<I", 0xA92B4EFC)}) == ["a Linux RAID member"]


@pytest.mark.parametrize("label", [0, 256 * KiB, DISK - 512 * KiB, DISK - 256 * KiB])
@pytest.mark.parametrize("order", ["<", ">"])
def test_zfs_labels_are_found(label: int, order: str) -> None:
    uberblock = struct.pack(f"{order}Q", 0x00BAB10C)

    assert found_on({label + 128 * KiB + 7 * KiB: uberblock}) == ["a ZFS pool member"]


MAKERS = {
    "ext4": (["mkfs.ext4", "-q", "-F"], "an ext2, ext3 or ext4 file system"),
    "xfs": (["mkfs.xfs", "-q", "-f"], "an XFS file system"),
    "btrfs": (["mkfs.btrfs", "-q", "-f"], "a Btrfs file system"),
    "swap": (["mkswap", "-q"], "swap space"),
    "gpt": (["sfdisk", "-q", "--label", "gpt"], "a GPT partition table"),
    "mbr": (["sfdisk", "-q", "--label", "dos"], "a partition table"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_disks_formatted_by_the_real_tools_are_recognized(kind: str, tmp_path: Path) -> None:
    command, expected = MAKERS[kind]
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    image = tmp_path / "disk"
    with image.open("wb") as disk:
        disk.truncate(320 * MiB)
    made = subprocess.run(
        [*command, image], input="2048,\n", capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"{command[0]}: {made.stderr.strip()[:100]}")
    with image.open("rb") as disk:

        def read(offset: int, length: int) -> bytes:
            disk.seek(offset)
            return disk.read(length)

        assert expected in find_signatures(read, 320 * MiB)


def device(**changes: object) -> Device:
    fields: dict[str, object] = {
        "path": "/dev/nvme9n1",
        "number": "259:9",
        "model": "ACME 990",
        "nbytes": DISK,
        "logical_block": 512,
        "uses": (),
        "signatures": (),
    }
    return Device(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_device_with_data_is_refused_and_its_signature_named() -> None:
    full = device(signatures=("an XFS file system",))

    with pytest.raises(DeviceNotEmptyError, match=r"990, 4\.00 MiB\) holds an XFS .* erase=True"):
        check_device(full, erase=False)
    check_device(full, erase=True)
    check_device(device(), erase=False)


def test_a_device_in_use_is_refused_even_with_erase() -> None:
    with pytest.raises(DeviceInUseError, match="nvme9n1p1 is mounted on /home"):
        check_device(device(uses=("nvme9n1p1 is mounted on /home",)), erase=True)


def make_system(root: Path, files: dict[str, str]) -> System:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return System(root)


SYS = {
    "sys/dev/block/7:0/size": "8192",
    "sys/dev/block/7:0/uevent": "DEVNAME=sda\n",
    "sys/dev/block/7:0/queue/logical_block_size": "4096\n",
    "sys/dev/block/7:0/device/model": "Disk  \n",
    "proc/self/mountinfo": "36 35 0:5 / / rw - ext4 /dev/root rw\n",
    "proc/swaps": "Filename Type Size Used Priority\n",
}


def uses(tmp_path: Path, extra: dict[str, str]) -> tuple[str, ...]:
    from penstock.storage.devices import _uses

    return tuple(_uses("7:0", make_system(tmp_path, {**SYS, **extra})))


def test_a_mounted_device_is_in_use(tmp_path: Path) -> None:
    mounts = {"proc/self/mountinfo": "36 35 7:0 / /data rw - xfs /dev/sda rw\n"}

    assert uses(tmp_path, {}) == ()
    assert uses(tmp_path, mounts) == ("sda is mounted on /data",)


def test_a_device_with_a_mounted_partition_is_in_use(tmp_path: Path) -> None:
    found = uses(
        tmp_path,
        {
            "sys/dev/block/7:0/sda2/partition": "2",
            "sys/dev/block/7:0/sda2/dev": "7:2",
            "sys/dev/block/7:2/uevent": "DEVNAME=sda2\n",
            "proc/self/mountinfo": "36 35 7:2 / /home rw - ext4 /dev/sda2 rw\n",
        },
    )

    assert found == ("sda2 is mounted on /home",)


def test_swap_and_stacked_devices_count_as_uses(tmp_path: Path) -> None:
    found = uses(
        tmp_path,
        {
            "proc/swaps": "Filename Type Size Used Priority\n/dev/sda partition 1 0 -2\n",
            "sys/dev/block/7:0/holders/dm-3": "",
            "sys/class/block/dm-3/dev": "253:3",
            "proc/self/mountinfo": "1 2 253:3 / /srv rw - ext4 /dev/dm-3 rw\n",
        },
    )

    assert found == ("sda is swap space", "sda is part of dm-3", "dm-3 is mounted on /srv")


def test_the_block_size_is_read_from_sys_or_512(tmp_path: Path) -> None:
    system = make_system(tmp_path, SYS)
    (tmp_path / "sys/dev/block/7:0/part").mkdir()

    assert logical_block("7:0", system) == 4096
    assert logical_block("9:9", system) == 512


@pytest.mark.parametrize("sector", [512, 4096])
def test_a_real_device_is_described(tmp_path: Path, sector: int) -> None:
    with loop_device(tmp_path, DISK, sector=sector) as path:
        seen = inspect_device(path)
        with open(path, "r+b", buffering=0) as disk:
            disk.write(MAGIC.ljust(4096, b"\0"))
        marked = inspect_device(path)

    assert (seen.nbytes, seen.logical_block) == (DISK, sector)
    assert (seen.uses, seen.signatures) == ((), ())
    assert "loop device over" in seen.model
    assert marked.signatures == ("a Penstock store",)
