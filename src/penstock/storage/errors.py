"""What can go wrong with a disk that a user can mend. Room: names.

Like penstock.errors: which thing, how much it wanted, how much there was, what to do next; the
numbers are attributes too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock.errors import PenstockError
from penstock.units import format_bytes


class StorageError(PenstockError):
    """Bytes could not be kept on, or had back from, a disk. Every error here is one."""


class StorageWarning(UserWarning):
    """The store works, but not as well as it could."""


class TransferError(StorageError, OSError):
    """A read or write failed for good, after retries."""

    def __init__(
        self, *, verb: str, extent: str, path: str, offset: int, length: int, errno: int
    ) -> None:
        self.extent, self.path, self.offset, self.length = extent, path, offset, length
        # errno is set by hand: OSError(errno, text) would turn into a subclass of its own choosing
        super().__init__(
            f"{verb} of {extent} failed: {path}, {length} B left at offset {offset}: "
            f"{os.strerror(errno)} (errno {errno}). Run `smartctl -a` on the drive and resume from "
            f"the last checkpoint with a store on another one"
        )
        self.errno = errno  # and no strerror, which str() would print in place of the above


class TruncatedStoreError(StorageError):
    """The file is shorter than what was laid in it."""

    def __init__(self, *, extent: str, path: str, offset: int, length: int) -> None:
        self.extent, self.path, self.offset, self.length = extent, path, offset, length
        super().__init__(
            f"{extent}: {path} ends before offset {offset + length}; something has truncated it. "
            f"Resume from the last checkpoint"
        )


class ChecksumError(StorageError):
    """What was read is not what was written."""

    def __init__(self, *, extent: str, path: str, offset: int, length: int) -> None:
        self.extent, self.path, self.offset, self.length = extent, path, offset, length
        super().__init__(
            f"{extent}: {path} gave back other bytes than were written, in the unit at offset "
            f"{offset}, also when read again. Check the drive and the host's memory, and resume "
            f"from the last checkpoint"
        )


class LostExtentError(StorageError):
    """A read of bytes whose last write failed."""

    def __init__(self, *, extent: str, offset: int, length: int, why: str) -> None:
        self.extent, self.offset, self.length = extent, offset, length
        super().__init__(
            f"{extent}: {length} B at {offset} were lost when their write failed ({why}); write "
            f"them again before reading"
        )


class ExtentBusyError(StorageError):
    """A transfer over bytes that another one is still moving."""

    def __init__(self, *, extent: str, verb: str, other: str) -> None:
        self.extent = extent
        super().__init__(
            f"{extent}: {verb} of bytes that a {other} is still moving; wait for its ticket first"
        )


class StoreFullError(StorageError):
    """An extent does not fit in what was reserved."""

    def __init__(self, *, name: str, wanted: int, free: int, capacity: int) -> None:
        self.name, self.wanted, self.free, self.capacity = name, wanted, free, capacity
        super().__init__(
            f"{name} needs {format_bytes(wanted)} in a store of {format_bytes(capacity)} that has "
            f"{format_bytes(free)} left; create it with a larger capacity"
        )


class DiskFullError(StorageError):
    """A disk has too little room for the store."""

    def __init__(self, *, path: str, wanted: int, free: int) -> None:
        self.path, self.wanted, self.free = path, wanted, free
        super().__init__(
            f"{path}: {format_bytes(wanted)} wanted, {format_bytes(free)} free; free some, add a "
            f"path, or look for stores of killed runs with `penstock store ls {path}`"
        )


class PathError(StorageError, ValueError):
    """A path that cannot hold a store."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


class DeviceInUseError(StorageError):
    """A raw device that somebody is using. `erase=True` does not help, and should not."""

    def __init__(self, path: str, uses: Sequence[str]) -> None:
        self.path, self.uses = path, tuple(uses)
        super().__init__(f"{path} is in use: {'; '.join(uses)}. Give another device or a directory")


class DeviceNotEmptyError(StorageError):
    """A raw device that carries something known, or that a command was not told to erase."""

    def __init__(self, path: str, *, signatures: Sequence[str], model: str, nbytes: int) -> None:
        self.path, self.signatures = path, tuple(signatures)
        self.model, self.nbytes = model, nbytes
        holds = ", ".join(signatures) or "nothing with a known signature, but may hold data"
        super().__init__(
            f"{path} ({model}, {format_bytes(nbytes)}) holds {holds}; all of it would be lost. If "
            f"that is meant: erase=True, or --erase-device"
        )


class AlignmentError(StorageError, ValueError):
    """An address, offset or length that a disk cannot take as it is."""


class HeaderError(StorageError, ValueError):
    """Bytes that are not a store's header. `kind` says in what way."""

    def __init__(self, kind: str, problem: str) -> None:
        self.kind = kind
        super().__init__(problem)


class StoreInUseError(StorageError):
    """A store whose owner is alive, or cannot be shown to be gone."""

    def __init__(self, path: str, owner: str) -> None:
        self.path, self.owner = path, owner
        super().__init__(f"{path} belongs to {owner}; stop that run first")


class StoreClosedError(StorageError):
    """A store, or a ticket of one, used after close()."""

    def __init__(self, what: str = "the store is closed") -> None:
        super().__init__(what)


class EngineError(StorageError):
    """The engine that was asked for cannot run here."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(f"engine {name!r}: {reason}; use engine='threads' or 'auto'")
