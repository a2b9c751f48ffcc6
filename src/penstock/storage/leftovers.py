"""Stores that outlived their runs: found, told from living ones, removed. Room: hold."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.storage.errors import HeaderError, PathError, StoreInUseError
from penstock.storage.header import HEADER_NBYTES, Header, parse_header
from penstock.storage.owners import is_gone, owner_of
from penstock.storage.volume import DATA, DIRECTORY, open_volume, remove_files
from penstock.units import round_up

_GRACE = 60.0
"""Seconds for which a directory under its hidden name may be one that is being made."""

State = Literal["in use", "left", "elsewhere", "damaged", "newer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStore:
    """A store's file or device, as found on disk."""

    data_path: str
    state: State
    """"left": its run is over. "elsewhere": of another machine, which cannot be asked from here."""
    nbytes: int
    """That it takes on disk."""
    header: Header | None
    """None where it cannot be read."""
    is_device: bool

    @property
    def removable(self) -> bool:
        return self.state in ("left", "damaged", "newer")


def find_stores(paths: Iterable[str | Path]) -> list[FoundStore]:
    """Every store on these devices and directly below these directories."""
    found: list[FoundStore] = []
    for path in map(Path, paths):
        if path.is_block_device():
            found += _look_at_device(path)
        elif path.is_dir():
            found += [_look_at_file(data) for data in sorted(_data_files(path))]
        else:
            raise PathError(str(path), "neither a directory nor a block device")
    return found


def remove_store(found: FoundStore, *, force: bool = False) -> int:
    """Remove one whose owner is gone; the bytes that this frees. Looks again before it does.

    With `force` also one of another machine. One whose lock is held is never removed.
    """
    volume = open_volume(found.data_path)  # takes the lock, or raises StoreInUseError
    try:
        now = _judge(volume.read_block(0, HEADER_NBYTES))
        if found.is_device and now[0] == "damaged":
            raise PathError(found.data_path, "holds no store any more")
        if now[0] == "elsewhere" and not force:
            host = now[1].host if now[1] else "another machine"
            raise StoreInUseError(found.data_path, f"a run on {host}; --force if that is over")
        if found.is_device:
            volume.write_block(0, bytes(round_up(HEADER_NBYTES, volume.alignment)))
        else:
            remove_files(Path(found.data_path))
    finally:
        volume.close()
    return found.nbytes


def _data_files(directory: Path) -> Iterator[Path]:
    # The directory itself may be a run's, when somebody names it exactly.
    candidates = [directory, *(entry for entry in directory.iterdir() if entry.is_dir())]
    for entry in candidates:
        name = entry.name.lstrip(".")
        if not name.startswith(DIRECTORY) or not (entry / DATA).is_file():
            continue
        if entry.name.startswith(".") and time.time() - entry.stat().st_mtime < _GRACE:
            continue
        yield entry / DATA


def _look_at_file(data: Path) -> FoundStore:
    # Blocks, not length: a file that was being allocated has more of one than of the other.
    nbytes = data.stat().st_blocks * 512
    state, header = _look(data)
    return FoundStore(
        data_path=str(data), state=state, nbytes=nbytes, header=header, is_device=False
    )


def _look_at_device(path: Path) -> list[FoundStore]:
    state, header = _look(path)
    if header is None and state != "newer":
        return []
    nbytes = header.data_nbytes if header else 0
    return [
        FoundStore(data_path=str(path), state=state, nbytes=nbytes, header=header, is_device=True)
    ]


def _look(path: Path) -> tuple[State, Header | None]:
    """Reads without disturbing the owner."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        state, header = _judge(os.pread(fd, HEADER_NBYTES, 0))
        return ("in use" if _is_locked(fd) else state), header
    finally:
        os.close(fd)


def _judge(block: bytes) -> tuple[State, Header | None]:
    try:
        header = parse_header(block)
    except HeaderError as failed:
        return ("newer" if failed.kind == "newer" else "damaged"), None
    # A pid that seems to live while the lock is free is one of another namespace: the lock decides.
    return ("elsewhere" if is_gone(owner_of(header)) is None else "left"), header


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as failed:
        if failed.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return True
        raise
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
