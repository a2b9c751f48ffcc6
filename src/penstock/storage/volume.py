"""One path of a store: a preallocated file, or a raw device. Room: hold.

A file lies in a directory of its own, `penstock-<uuid>/data` below the path that was given, so two
runs never name the same file. Directory and file are made under a hidden name, locked and given
their header, and only then renamed: whoever finds `penstock-<uuid>` finds a whole store or one
whose owner is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from penstock import _native
from penstock.storage.devices import (
    check_device,
    device_number,
    filesystem_of,
    inspect_device,
    logical_block,
)
from penstock.storage.errors import (
    DeviceInUseError,
    DiskFullError,
    PathError,
    StorageWarning,
    StoreInUseError,
)
from penstock.storage.header import DATA_OFFSET, HEADER_NBYTES, Header
from penstock.storage.layout import MIN_ALIGNMENT

DIRECTORY = "penstock-"
DATA = "data"
_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}


@dataclass(slots=True)
class Volume:
    """An open, locked path. The lock is the kernel's: it ends with the process, however it ends."""

    path: str
    """What was given: a directory or a device."""
    data_path: str
    """What the bytes are in."""
    fd: int
    is_device: bool
    direct: bool
    """True where transfers go past the page cache."""
    alignment: int
    reserved: int = 0
    """Bytes of data taken on the disk."""

    def reserve(self, nbytes: int) -> None:
        """Take the room for `nbytes` of data now. Raises DiskFullError."""
        if self.is_device:
            held = os.lseek(self.fd, 0, os.SEEK_END) - DATA_OFFSET
            if nbytes > held:
                raise DiskFullError(path=self.path, wanted=nbytes, free=max(0, held))
        elif failed := _native.allocate_space(self.fd, DATA_OFFSET + nbytes):
            if failed in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                found = os.statvfs(self.path)
                free = found.f_bavail * found.f_frsize
                raise DiskFullError(path=self.path, wanted=nbytes, free=free)
            raise PathError(self.path, f"could not take {nbytes} B: {os.strerror(failed)}")
        self.reserved = nbytes

    def write_block(self, offset: int, block: bytes) -> None:
        """Whole blocks, to stable storage: for headers, not for data."""
        with mmap.mmap(-1, _blocks(len(block), self.alignment)) as aligned:
            aligned.write(block)
            view = memoryview(aligned)
            try:
                written = os.pwritev(self.fd, [view], offset)
            finally:
                view.release()
            if written != len(aligned):
                raise PathError(self.data_path, f"{written} of {len(aligned)} B of header written")
        os.fdatasync(self.fd)

    def read_block(self, offset: int, nbytes: int) -> bytes:
        """What is there, up to the end of the file."""
        with mmap.mmap(-1, _blocks(nbytes, self.alignment)) as aligned:
            view = memoryview(aligned)
            try:
                return bytes(view[: min(os.preadv(self.fd, [view], offset), nbytes)])
            finally:
                view.release()

    def remove(self) -> None:
        """Let go of the disk space and the lock. A device loses its header."""
        try:
            if self.is_device:
                self.write_block(0, bytes(HEADER_NBYTES))
            else:
                remove_files(Path(self.data_path))
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the lock; what is on disk stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create_volume(path: str | Path, uuid: UUID, header: Header, *, erase: bool) -> Volume:
    """A locked volume that carries `header`. A failure leaves nothing behind."""
    if _is_device(path):
        volume = _claim_device(path, erase=erase)
    else:
        volume = _create_file(Path(path), uuid)
    try:
        _write_first(volume, header.to_bytes())
        if not volume.is_device:
            hidden = Path(volume.data_path).parent
            final = hidden.with_name(hidden.name.lstrip("."))
            os.rename(hidden, final)
            volume.data_path = str(final / DATA)
    except BaseException:
        with contextlib.suppress(OSError):
            volume.remove()
        raise
    return volume


def open_volume(data_path: str | Path) -> Volume:
    """An existing one, locked. Raises StoreInUseError while its owner lives."""
    is_device = _is_device(data_path)
    try:
        fd, direct = _open(data_path, os.O_RDWR | (os.O_EXCL if is_device else 0))
    except OSError as failed:
        if failed.errno == errno.EBUSY:
            raise StoreInUseError(str(data_path), "whoever has the device") from None
        raise
    number = os.fstat(fd).st_rdev if is_device else os.fstat(fd).st_dev
    volume = Volume(
        path=str(data_path),
        data_path=str(data_path),
        fd=fd,
        is_device=is_device,
        direct=direct,
        alignment=max(MIN_ALIGNMENT, logical_block(device_number(number))),
    )
    try:
        _lock(fd, str(data_path))
    except BaseException:
        volume.close()
        raise
    return volume


def remove_files(data: Path) -> None:
    """The file and its directory, and nothing that is not ours."""
    with contextlib.suppress(FileNotFoundError):
        data.unlink()
    with contextlib.suppress(FileNotFoundError, OSError):  # not empty: somebody else's file
        data.parent.rmdir()


def _create_file(path: Path, uuid: UUID) -> Volume:
    if path.exists() and not path.is_dir():
        raise PathError(str(path), "neither a directory nor a block device")
    path.mkdir(parents=True, exist_ok=True)
    directory = path / f".{DIRECTORY}{uuid.hex}"
    directory.mkdir(mode=0o700)
    data = directory / DATA
    fd = -1
    try:
        fd, direct = _open(data, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        _lock(fd, str(data))
    except BaseException:
        if fd >= 0:
            os.close(fd)
        remove_files(data)
        raise
    block = logical_block(device_number(os.fstat(fd).st_dev))
    return Volume(
        path=str(path),
        data_path=str(data),
        fd=fd,
        is_device=False,
        direct=direct,
        alignment=max(MIN_ALIGNMENT, block),
    )


def _claim_device(path: str | Path, *, erase: bool) -> Volume:
    device = inspect_device(path)
    check_device(device, erase=erase)
    try:
        fd, direct = _open(path, os.O_RDWR | os.O_EXCL)
    except OSError as failed:
        if failed.errno == errno.EBUSY:  # somebody was faster
            raise DeviceInUseError(device.path, ["the kernel says it is busy"]) from None
        raise
    volume = Volume(
        path=device.path,
        data_path=device.path,
        fd=fd,
        is_device=True,
        direct=direct,
        alignment=max(MIN_ALIGNMENT, device.logical_block),
    )
    try:
        _lock(fd, device.path)
        if device.signatures:
            _wipe(volume, device.nbytes)
    except BaseException:
        volume.close()
        raise
    return volume


def _wipe(volume: Volume, nbytes: int) -> None:
    """What was there must not be found again by udev and half-recognised."""
    for offset in {0, max(0, nbytes // DATA_OFFSET * DATA_OFFSET - DATA_OFFSET)}:
        length = min(2 * DATA_OFFSET, nbytes - offset) // volume.alignment * volume.alignment
        volume.write_block(offset, bytes(length))


def _open(path: str | Path, flags: int) -> tuple[int, bool]:
    """A descriptor, and whether it goes past the page cache."""
    flags |= os.O_CLOEXEC
    # Memory file systems take the flag on new kernels and copy all the same.
    if filesystem_of(Path(path).parent) not in _MEMORY_FILE_SYSTEMS or _is_device(path):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as failed:
            if failed.errno != errno.EINVAL:
                raise
            if flags & os.O_CREAT:  # the file may have been made before the flag was refused
                flags &= ~os.O_EXCL
    return os.open(path, flags, 0o600), False


def _write_first(volume: Volume, block: bytes) -> None:
    """The first write finds out whether O_DIRECT was only promised."""
    try:
        volume.write_block(0, block)
    except OSError as failed:
        if failed.errno != errno.EINVAL or not volume.direct:
            raise
        flags = fcntl.fcntl(volume.fd, fcntl.F_GETFL)
        fcntl.fcntl(volume.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        volume.direct = False
        volume.write_block(0, block)
    if not volume.direct:
        warnings.warn(
            f"{volume.path}: this file system has no O_DIRECT, so every byte is copied through the "
            f"page cache: slower, and taking host memory that no plan knows of. A directory on a "
            f"local ext4 or XFS, or a raw device, avoids it",
            StorageWarning,
            stacklevel=5,
        )


def _lock(fd: int, path: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreInUseError(path, "a running process, which holds its lock") from None


def _is_device(path: str | Path) -> bool:
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _blocks(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
