"""Storage errors that a user can act on.

Each message says what failed, how much it needed, how much there was, and what to do next. The
numbers are attributes as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock.errors import PenstockError
from penstock.units import format_bytes


class StorageError(PenstockError):
    """Base class of every error of the NVMe tier."""


class StorageWarning(UserWarning):
    """The store works, but slower or less cleanly than it could."""


class TransferError(StorageError, OSError):
    """A read or write failed, also after retries."""

    def __init__(
        self, *, verb: str, extent: str, path: str, offset: int, length: int, errno: int
    ) -> None:
        self.extent, self.path, self.offset, self.length = extent, path, offset, length
        # errno is set below: OSError(errno, text) would turn into a subclass of its own choice.
        super().__init__(
            f"{verb} of {extent} failed: {path}, {length} B left at offset {offset}: "
            f"{os.strerror(errno)} (errno {errno}). Check the drive with `smartctl -a`, then "
            f"resume from the last checkpoint with a store on another drive"
        )
        # strerror stays unset, because str() would print it instead of the message above.
        self.errno = errno


class TruncatedStoreError(StorageError):
    """A store's file is shorter than the data in it."""

    def __init__(self, *, extent: str, path: str, offset: int, length: int) -> None:
        self.extent, self.path, self.offset, self.length = extent, path, offset, length
        super().__init__(
            f"{extent}: {path} ends before offset {offset + length}; something has truncated it. "
            f"Resume from the last checkpoint"
        )


class ChecksumError(StorageError):
    """The bytes read differ from the bytes written."""

    def __init__(self, *, extent: str, path: str, offset: int, extent_offset: int) -> None:
        self.extent, self.path = extent, path
        self.offset, self.extent_offset = offset, extent_offset
        super().__init__(
            f"{extent}: the disk returned different bytes than were written, also when they were "
            f"read again: {path}, in the unit at offset {offset}. "
            f"Check the drive with `smartctl -a` and the host memory, then resume from the last "
            f"checkpoint with a store on another drive"
        )


class UnwrittenExtentError(StorageError):
    """A read covers bytes that were never written, so they mean nothing."""

    def __init__(self, *, extent: str, offset: int) -> None:
        self.extent, self.offset = extent, offset
        super().__init__(
            f"{extent}: the unit at {offset} was never written; write it before you read it"
        )


class LostExtentError(StorageError):
    """A read covers bytes whose last write failed."""

    def __init__(self, *, extent: str, offset: int, length: int, why: str) -> None:
        self.extent, self.offset, self.length = extent, offset, length
        super().__init__(
            f"{extent}: {length} B at {offset} were lost when their write failed ({why}); write "
            f"them again before you read them"
        )


class ExtentBusyError(StorageError):
    """A transfer covers bytes that another transfer is still moving."""

    def __init__(self, *, extent: str, verb: str, other: str) -> None:
        self.extent = extent
        super().__init__(
            f"{extent}: {verb} of bytes that a {other} is still moving; wait for its ticket first"
        )


class StoreFullError(StorageError):
    """An extent does not fit in the free part of the store."""

    def __init__(self, *, name: str, wanted: int, free: int, capacity: int) -> None:
        self.name, self.wanted, self.free, self.capacity = name, wanted, free, capacity
        super().__init__(
            f"{name} needs {format_bytes(wanted)} in a store of {format_bytes(capacity)} that has "
            f"{format_bytes(free)} left; create the store with a larger capacity"
        )


class DiskFullError(StorageError):
    """A disk has too little free space for the store."""

    def __init__(self, *, path: str, wanted: int, free: int) -> None:
        self.path, self.wanted, self.free = path, wanted, free
        super().__init__(
            f"{path}: the store needs {format_bytes(wanted)}, and {format_bytes(free)} are free; "
            f"free some space, add a path, or look for stores of killed runs with "
            f"`penstock store ls {path}`"
        )


class PathError(StorageError, ValueError):
    """A path cannot hold a store."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


class DeviceInUseError(StorageError):
    """A raw device is mounted or claimed. `erase=True` does not override this."""

    def __init__(self, path: str, uses: Sequence[str]) -> None:
        self.path, self.uses = path, tuple(uses)
        super().__init__(f"{path} is in use: {'; '.join(uses)}. Use another device or a directory")


class DeviceNotEmptyError(StorageError):
    """A raw device holds data, or may hold some, and erasing it was not requested."""

    def __init__(self, path: str, *, signatures: Sequence[str], model: str, nbytes: int) -> None:
        self.path, self.signatures = path, tuple(signatures)
        self.model, self.nbytes = model, nbytes
        holds = ", ".join(signatures) or "nothing with a known signature, but may hold data"
        super().__init__(
            f"{path} ({model}, {format_bytes(nbytes)}) holds {holds}; all of it would be lost. To "
            f"erase it, pass erase=True or --erase-device"
        )


class AlignmentError(StorageError, ValueError):
    """An address, offset or length does not meet the alignment that direct I/O requires."""


class HeaderError(StorageError, ValueError):
    """A block is not a valid store header. `kind` is "foreign", "newer" or "corrupt"."""

    def __init__(self, kind: str, problem: str) -> None:
        self.kind = kind
        super().__init__(problem)


class StoreInUseError(StorageError):
    """The owner of a store is alive, or cannot be shown to be gone."""

    def __init__(self, path: str, owner: str) -> None:
        self.path, self.owner = path, owner
        super().__init__(f"{path} belongs to {owner}; stop that run first")


class StoreClosedError(StorageError):
    """A store, or one of its tickets, was used after `close()`."""

    def __init__(self, message: str = "the store is closed") -> None:
        super().__init__(message)


class EngineError(StorageError):
    """The requested I/O engine cannot run here."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(f"engine {name!r}: {reason}; use engine='threads' or 'auto'")
