"""One path of a store: a preallocated file or a raw device, open and locked.

A file is `penstock-<uuid>/data` below the given path, so two runs never name the same file. The
directory and the file are created under a hidden name, locked, given a header, and only then
renamed. A directory `penstock-<uuid>` therefore holds either a complete store or one whose owner is
gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from penstock import _native
from penstock.durable_files import name_file
from penstock.io_retries import repeat
from penstock.storage.devices import (
    check_device,
    device_number,
    filesystem_of,
    inspect_device,
    logical_block,
)
from penstock.storage.direct_file import DirectFile
from penstock.storage.errors import (
    DeviceInUseError,
    DiskFullError,
    PathError,
    StorageWarning,
    StoreInUseError,
)
from penstock.storage.header import DATA_OFFSET, HEADER_NBYTES, Header
from penstock.storage.layout import MIN_ALIGNMENT

DIRECTORY_PREFIX = "penstock-"
"""Start of the name of a store's directory; the store's uuid follows."""

DATA_NAME = "data"
"""Name of the file that holds a store's bytes."""

_LARGEST_FILE = (1 << 63) - 1
"""Offsets in files are signed 64-bit numbers."""

_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}


@dataclass(slots=True)
class Volume:
    """An open path with an exclusive lock.

    The kernel holds the lock (`flock`) and drops it when the process ends, however it ends.
    """

    path: str
    """The path as given: a directory or a device."""
    data_path: str
    """The file or device that holds the bytes."""
    file: DirectFile
    is_device: bool
    reserved: int = 0
    """Bytes of data allocated on the disk."""
    is_new: bool = False
    """Whether the bytes are those of a new file: zeros, except where the store has written."""

    @property
    def fd(self) -> int:
        return self.file.fd

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self.file.direct

    @property
    def alignment(self) -> int:
        """Offsets, lengths and addresses of transfers are multiples of this."""
        return self.file.alignment

    def reserve(self, nbytes: int) -> None:
        """Allocate disk space for `nbytes` of data now. Raises DiskFullError."""
        if self.is_device:
            available = os.lseek(self.fd, 0, os.SEEK_END) - DATA_OFFSET
            if nbytes > available:
                raise DiskFullError(path=self.path, wanted=nbytes, free=max(0, available))
        elif code := self._allocate(DATA_OFFSET + nbytes):
            if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                usage = os.statvfs(self.path)
                free = usage.f_bavail * usage.f_frsize
                raise DiskFullError(path=self.path, wanted=nbytes, free=free)
            raise PathError(self.path, f"could not allocate {nbytes} B: {os.strerror(code)}")
        self.reserved = nbytes

    def _allocate(self, nbytes: int) -> int:
        """Allocate the file's space. Return an errno, or 0."""
        if nbytes > _LARGEST_FILE:  # the kernel cannot be asked for more
            return errno.EFBIG
        return _native.allocate_space(self.fd, nbytes)

    def write_block(self, offset: int, block: bytes) -> None:
        """Write whole blocks to stable storage. For headers; data goes through the engine."""

        def write() -> None:
            self.file.write_blocks(offset, block)
            os.fdatasync(self.fd)

        with name_file(self.data_path):
            repeat(write, self.data_path)

    def read_block(self, offset: int, nbytes: int) -> bytes:
        """Read `nbytes` at `offset`, or fewer if the file ends before that."""
        return self.file.read_blocks(offset, nbytes)

    def remove(self) -> None:
        """Free the disk space and drop the lock. On a device, erase the header."""
        try:
            if self.is_device:
                self.write_block(0, bytes(HEADER_NBYTES))
            else:
                remove_files(Path(self.data_path), self.fd)
        finally:
            self.close()

    def close(self) -> None:
        """Drop the lock and leave the bytes on disk."""
        self.file.close()


def create_volume(path: str | Path, uuid: UUID, header: Header, *, erase: bool) -> Volume:
    """Create and lock a volume that carries `header`. A failure leaves nothing behind."""
    if _is_device(path):
        volume = _claim_device(path, erase=erase)
    else:
        volume = _create_file(Path(path), uuid)
    try:
        # This first write also finds out whether O_DIRECT really works (see DirectFile).
        volume.write_block(0, header.to_bytes())
        if not volume.direct:
            _warn_not_direct(volume)
        if not volume.is_device:
            hidden = Path(volume.data_path).parent
            final = hidden.with_name(hidden.name.lstrip("."))
            os.rename(hidden, final)
            volume.data_path = str(final / DATA_NAME)
    except BaseException:
        with contextlib.suppress(OSError):
            volume.remove()
        raise
    return volume


def open_volume(data_path: str | Path) -> Volume:
    """Open and lock an existing volume. Raises StoreInUseError while its owner is alive.

    The name of a file may lead elsewhere by the time it is locked; `remove_files` checks that.
    """
    is_device = _is_device(data_path)
    # Devices have links in /dev/disk. A store's file is never a link, so one is somebody's trap.
    # O_NONBLOCK: opening a FIFO must not wait for its other end.
    flags = os.O_EXCL if is_device else os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = _open(data_path, os.O_RDWR | flags)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise StoreInUseError(str(data_path), "another user of the device") from None
        raise
    status = os.fstat(file.fd)
    number = status.st_rdev if is_device else status.st_dev
    file.alignment = max(MIN_ALIGNMENT, logical_block(device_number(number)))
    try:
        _lock(file.fd, str(data_path))
    except BaseException:
        file.close()
        raise
    return Volume(path=str(data_path), data_path=str(data_path), file=file, is_device=is_device)


def remove_files(data: Path, fd: int | None) -> bool:
    """Remove a store's file, and its directory if nothing else is in it.

    `fd` is the open and locked file. Another process may have removed it, or put something else in
    its place; nothing but this file is removed, and links are not followed. None removes any file
    of that name, in a directory that the caller has just created. Returns whether the file was
    removed.
    """
    removed = False
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        directory = os.open(data.parent, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if fd is None or _is_entry(data.name, directory, fd):
                os.unlink(data.name, dir_fd=directory)
                removed = True
        finally:
            os.close(directory)
    with contextlib.suppress(OSError):  # holds a foreign file, or is in a read-only directory
        data.parent.rmdir()
    return removed


def _is_entry(name: str, directory: int, fd: int) -> bool:
    """Return whether the directory's entry `name` is the open file."""
    entry = os.stat(name, dir_fd=directory, follow_symlinks=False)
    return os.path.samestat(entry, os.fstat(fd))


def _create_file(path: Path, uuid: UUID) -> Volume:
    if path.exists() and not path.is_dir():
        raise PathError(str(path), "neither a directory nor a block device")
    path.mkdir(parents=True, exist_ok=True)
    directory = path / f".{DIRECTORY_PREFIX}{uuid.hex}"
    directory.mkdir(mode=0o700)
    data = directory / DATA_NAME
    file = None
    try:
        file = _open(data, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        _lock(file.fd, str(data))
    except BaseException:
        remove_files(data, None if file is None else file.fd)
        if file is not None:
            file.close()
        raise
    block = logical_block(device_number(os.fstat(file.fd).st_dev))
    file.alignment = max(MIN_ALIGNMENT, block)
    return Volume(path=str(path), data_path=str(data), file=file, is_device=False, is_new=True)


def _claim_device(path: str | Path, *, erase: bool) -> Volume:
    device = inspect_device(path)
    check_device(device, erase=erase)
    try:
        file = _open(path, os.O_RDWR | os.O_EXCL)
    except OSError as error:
        if error.errno == errno.EBUSY:  # another process claimed it after the check
            raise DeviceInUseError(device.path, ["the kernel says it is busy"]) from None
        raise
    file.alignment = max(MIN_ALIGNMENT, device.logical_block)
    volume = Volume(path=device.path, data_path=device.path, file=file, is_device=True)
    try:
        _lock(file.fd, device.path)
        if device.signatures:
            _wipe_signatures(volume, device.nbytes)
    except BaseException:
        volume.close()
        raise
    return volume


def _wipe_signatures(volume: Volume, nbytes: int) -> None:
    """Zero the start and the end, so that udev does not half recognize the old contents."""
    for offset in {0, max(0, nbytes // DATA_OFFSET * DATA_OFFSET - DATA_OFFSET)}:
        length = min(2 * DATA_OFFSET, nbytes - offset) // volume.alignment * volume.alignment
        volume.write_block(offset, bytes(length))


def _open(path: str | Path, flags: int) -> DirectFile:
    # New kernels accept O_DIRECT on memory file systems, but copy all the same: do not ask there.
    if filesystem_of(Path(path).parent) in _MEMORY_FILE_SYSTEMS and not _is_device(path):
        return DirectFile(os.open(path, flags | os.O_CLOEXEC, 0o600), direct=False)
    return DirectFile.open(path, flags)


def _warn_not_direct(volume: Volume) -> None:
    warnings.warn(
        f"{volume.path}: this file system has no O_DIRECT, so every byte is copied through the "
        f"page cache, which is slower and uses host memory that the plan does not count. Use a "
        f"directory on a local ext4 or XFS file system, or a raw device",
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
