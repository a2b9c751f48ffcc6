"""How worn a drive is, as it says itself. Room: hold.

The NVMe health log through the kernel's pass-through, which root alone may use; anybody else, and
any other drive, gets None.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path

_ADMIN_COMMAND = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD
_GET_LOG_PAGE = 0x02
_HEALTH_LOG = 0x02
_LOG_NBYTES = 512
_DATA_UNIT = 512_000  # the specification counts thousands of 512-byte units


@dataclass(frozen=True, slots=True)
class Wear:
    """A drive's health log, the part about writing."""

    percentage_used: int
    """Of the rated life; 100 is its end on paper, and it may go on to 255."""
    written_nbytes: int
    """Ever, by anybody."""

    def __str__(self) -> str:
        return f"{self.percentage_used} % of its rated life used"


class _Command(ctypes.Structure):
    """struct nvme_passthru_cmd."""

    _fields_ = [
        ("opcode", ctypes.c_uint8), ("flags", ctypes.c_uint8), ("rsvd1", ctypes.c_uint16),
        ("nsid", ctypes.c_uint32), ("cdw2", ctypes.c_uint32), ("cdw3", ctypes.c_uint32),
        ("metadata", ctypes.c_uint64), ("addr", ctypes.c_uint64),
        ("metadata_len", ctypes.c_uint32), ("data_len", ctypes.c_uint32),
        ("cdw10", ctypes.c_uint32), ("cdw11", ctypes.c_uint32), ("cdw12", ctypes.c_uint32),
        ("cdw13", ctypes.c_uint32), ("cdw14", ctypes.c_uint32), ("cdw15", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32), ("result", ctypes.c_uint32),
    ]  # fmt: skip


def parse_health_log(log: bytes) -> Wear:
    """NVMe base specification, figure "SMART / Health Information log page"."""
    if len(log) < _LOG_NBYTES:
        raise ValueError(f"a health log is {_LOG_NBYTES} B, got {len(log)}")
    return Wear(
        percentage_used=log[5],
        written_nbytes=int.from_bytes(log[48:64], "little") * _DATA_UNIT,
    )


def drive_of(block_name: str) -> str | None:
    """`nvme1n1p2` -> `/dev/nvme1n1`, which passes the question on to its controller.

    Whose number need not be the drive's: a drive with several ways to it has several controllers.
    """
    found = re.fullmatch(r"(nvme\d+n\d+)(?:p\d+)?", block_name)
    return f"/dev/{found[1]}" if found else None


def wear_of(path: str | Path) -> Wear | None:
    """The wear of the NVMe drive that holds `path`, or None where it cannot be asked."""
    try:
        found = os.stat(path)
        number = found.st_rdev or found.st_dev
        sys_path = os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
        drive = drive_of(os.path.basename(sys_path))
        return parse_health_log(_read_log(drive)) if drive else None
    except OSError:
        return None


def _read_log(drive: str) -> bytes:
    log = ctypes.create_string_buffer(_LOG_NBYTES)
    command = _Command(
        opcode=_GET_LOG_PAGE,
        nsid=0xFFFFFFFF,
        addr=ctypes.addressof(log),
        data_len=_LOG_NBYTES,
        cdw10=_HEALTH_LOG | (_LOG_NBYTES // 4 - 1) << 16,
    )
    fd = os.open(drive, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if status := fcntl.ioctl(fd, _ADMIN_COMMAND, command):
            raise OSError(f"{drive}: health log refused with status {status}")
    finally:
        os.close(fd)
    return log.raw
