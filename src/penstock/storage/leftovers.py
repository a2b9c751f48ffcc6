"""Find and remove stores whose runs are over.

A store's header names the process that created it. The lock on its file decides whether that
process is alive; the header only helps where locks do not reach, such as a network file system
that is shared with other machines.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import pwd
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import UUID

from penstock.machine.sysfs import System
from penstock.storage.errors import HeaderError, PathError, StoreInUseError
from penstock.storage.header import HEADER_NBYTES, Header, parse_header
from penstock.storage.volume import DATA_NAME, DIRECTORY_PREFIX, open_volume, remove_files
from penstock.units import format_bytes, round_up

_GRACE_SECONDS = 60.0
"""A directory with a hidden name that is younger than this may be a store being created."""

_LOCK_SECONDS = 2.0
"""How long `clear_leftovers` waits for locks that are not those of a living run."""

_DIRECTORY_NAME = re.compile(rf"\.?{DIRECTORY_PREFIX}[0-9a-f]{{32}}")

_UNKNOWN_BOOT = UUID(int=0)

_START_FIELD = 19
"""Index, counted after the process name, of the start time in /proc/PID/stat."""

State = Literal["in use", "left", "elsewhere", "damaged", "newer", "unreadable"]


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, identified so that a later process with the same pid is not mistaken for it."""

    pid: int
    started: int
    """Start time in clock ticks since boot."""
    boot: UUID
    """The kernel's boot id."""
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStore:
    """A store's file or device, as found on disk."""

    data_path: str
    state: State
    """"left": its run is over. "elsewhere": it belongs to another machine, whose processes cannot
    be checked from here. "damaged" or "newer": its header cannot be parsed. "unreadable": the
    file cannot be opened, in general because it belongs to another user."""
    nbytes: int | None
    """Disk space that the store occupies; None if it cannot be read."""
    header: Header | None
    """None if the header cannot be read."""
    is_device: bool
    uid: int
    """The user whose store it is."""
    reason: str = ""
    """Why the store is unreadable."""

    @property
    def removable(self) -> bool:
        return self.state in ("left", "damaged", "newer")

    @property
    def is_own(self) -> bool:
        return self.uid == os.geteuid()

    @property
    def user(self) -> str:
        """Name of the user whose store it is."""
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:  # common in containers
            return f"uid {self.uid}"


def find_stores(paths: Iterable[str | Path]) -> list[FoundStore]:
    """List every store on these devices and directly below these directories.

    Other processes may create and remove stores meanwhile. One that disappears is left out.
    """
    found: list[FoundStore] = []
    for path in map(Path, paths):
        if path.is_block_device():
            found += _inspect_device(path)
        elif path.is_dir():
            with contextlib.suppress(FileNotFoundError):
                found += filter(None, map(_inspect_directory, _store_directories(path)))
        else:
            raise PathError(str(path), "neither a directory nor a block device")
    return found


def clear_leftovers(directories: Iterable[str | Path]) -> tuple[str, ...]:
    """Remove what this user's killed runs left below the directories.

    Nothing that another process does there is an error: several runs may start together and clear
    the same directory. Returns sentences for the user about what stays and could be removed.
    """
    notes: list[str] = []
    deadline = time.monotonic() + _LOCK_SECONDS
    for directory in filter(Path.is_dir, map(Path, directories)):
        try:
            stores = find_stores([directory])
        except OSError as error:
            notes.append(f"{directory}: not searched for stores of killed runs: {error.strerror}")
            continue
        own = [store for store in stores if store.is_own]
        notes += filter(None, (_clear(store, deadline) for store in own))
        notes += _describe_others(directory, [store for store in stores if not store.is_own])
        remove_empty_directories([directory])
    return tuple(notes)


def remove_empty_directories(paths: Iterable[str | Path]) -> list[Path]:
    """Remove directories of stores without a file, which killed processes left; return them.

    A process is killed between creating the directory and the file, or between removing them.
    """
    removed = []
    for path in filter(Path.is_dir, map(Path, paths)):
        with contextlib.suppress(OSError):
            for entry in _store_directories(path):
                # A directory with a file in it cannot be removed this way, so no store is lost.
                with contextlib.suppress(OSError):
                    if _is_own_and_old(entry):
                        entry.rmdir()
                        removed.append(entry)
    return removed


def remove_store(found: FoundStore, *, force: bool = False) -> int:
    """Remove a store whose owner is gone. Return how many bytes this freed.

    With `force`, also remove a store of another machine. A store whose lock is held is never
    removed.
    """
    if found.state == "unreadable":
        raise PathError(found.data_path, f"{found.reason}; it belongs to {found.user}")
    try:
        volume = open_volume(found.data_path)  # takes the lock, or raises StoreInUseError
    except FileNotFoundError:
        return 0  # another process has removed it
    try:
        # Read the header again under the lock: it may have changed since the store was found.
        state, header = _classify(volume.read_block(0, HEADER_NBYTES))
        if found.is_device and state == "damaged":
            raise PathError(found.data_path, "no longer holds a store")
        if state == "elsewhere" and not force:
            host = header.host if header else "another machine"
            raise StoreInUseError(found.data_path, f"a run on {host}; use --force if it is over")
        if found.is_device:
            volume.write_block(0, bytes(round_up(HEADER_NBYTES, volume.alignment)))
        elif not remove_files(Path(found.data_path), volume.fd):
            return 0
    finally:
        volume.close()
    return found.nbytes or 0


def current_owner(system: System | None = None) -> Owner:
    """Describe this process as the owner of a new store."""
    system = system or System()
    pid = os.getpid()
    return Owner(pid, _start_time(pid, system) or 0, _boot_id(system), platform.node()[:200])


def is_gone(owner: Owner, system: System | None = None) -> bool | None:
    """Return whether the owner has ended, or None if it runs on another machine.

    This cannot see processes in another container's pid namespace. The lock on the file decides
    there.
    """
    system = system or System()
    if owner.host != platform.node()[:200]:
        return None
    if owner.boot != _boot_id(system):
        return True
    return _start_time(owner.pid, system) != owner.started


def _clear(store: FoundStore, deadline: float) -> str:
    """Remove a store of this user if its run is over. Return why it could not be removed, or ""."""
    while store.state == "left" or (store.state == "in use" and _has_no_owner(store)):
        try:
            remove_store(store)
            break
        except StoreInUseError:
            # Another process lists or removes the store at this moment, or the kernel still tears
            # down the io_uring of the killed run. Its space is free only when that is over.
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        except OSError as error:
            return f"{store.data_path}: left by a killed run, not removed: {error.strerror}"
    return ""


def _has_no_owner(store: FoundStore) -> bool:
    header = store.header
    return header is not None and is_gone(_owner_of(header)) is True


def _describe_others(directory: Path, stores: Iterable[FoundStore]) -> Iterator[str]:
    """Describe stores of other users that may be leftovers, in one sentence."""
    kept = [store for store in stores if store.state in ("left", "unreadable")]
    if not kept:
        return
    users = ", ".join(sorted({store.user for store in kept}))
    sizes = [store.nbytes for store in kept if store.nbytes is not None]
    size = f", {format_bytes(sum(sizes))}" if len(sizes) == len(kept) else ""
    count = "1 store" if len(kept) == 1 else f"{len(kept)} stores"
    yield (
        f"{directory}: {count} of other users ({users}{size}) not touched; "
        f"`penstock store ls {directory}` lists them"
    )


def _store_directories(path: Path) -> list[Path]:
    """List the directories of stores in a directory; links to directories are no stores."""
    # The directory itself may be a store's, if the user named it exactly.
    candidates = [path, *sorted(path.iterdir())]
    return [
        entry
        for entry in candidates
        if _DIRECTORY_NAME.fullmatch(entry.name) and not entry.is_symlink() and entry.is_dir()
    ]


def _inspect_directory(directory: Path) -> FoundStore | None:
    """Describe the store in a directory; None if there is none, or it is being created."""
    try:
        status = directory.lstat()
        if directory.name.startswith(".") and time.time() - status.st_mtime < _GRACE_SECONDS:
            return None
        return _inspect_file(directory / DATA_NAME)
    except FileNotFoundError:
        return None
    except OSError as error:
        return FoundStore(
            data_path=str(directory / DATA_NAME), state="unreadable", nbytes=None, header=None,
            is_device=False, uid=status.st_uid, reason=error.strerror or str(error),
        )  # fmt: skip


def _is_own_and_old(directory: Path) -> bool:
    status = directory.lstat()
    return status.st_uid == os.geteuid() and time.time() - status.st_mtime >= _GRACE_SECONDS


def _inspect_file(data: Path) -> FoundStore | None:
    status = data.lstat()
    if not stat.S_ISREG(status.st_mode):
        return None
    # Count blocks, not the length: they differ in a file whose allocation was interrupted.
    nbytes = status.st_blocks * 512
    reason = ""
    state: State
    try:
        state, header = _read_state(data)
    except FileNotFoundError:
        raise
    except OSError as error:  # the size is known even so
        state, header, reason = "unreadable", None, error.strerror or str(error)
    return FoundStore(
        data_path=str(data), state=state, nbytes=nbytes, header=header, is_device=False,
        uid=status.st_uid, reason=reason,
    )  # fmt: skip


def _inspect_device(path: Path) -> list[FoundStore]:
    state, header = _read_state(path)
    if header is None and state != "newer":
        return []
    nbytes = header.data_nbytes if header else 0
    return [
        FoundStore(
            data_path=str(path), state=state, nbytes=nbytes, header=header, is_device=True,
            uid=path.stat().st_uid,
        )
    ]  # fmt: skip


def _read_state(path: Path) -> tuple[State, Header | None]:
    """Read a store's header and test its lock, without disturbing the owner."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state, header = _classify(os.pread(fd, HEADER_NBYTES, 0))
        return ("in use" if _is_locked(fd) else state), header
    finally:
        os.close(fd)


def _classify(block: bytes) -> tuple[State, Header | None]:
    """Return the state of a store whose lock is free, from its header."""
    try:
        header = parse_header(block)
    except HeaderError as error:
        return ("newer" if error.kind == "newer" else "damaged"), None
    # If the owner's pid exists although the lock is free, it is a process of another pid namespace:
    # the lock decides, so the store counts as left.
    return ("elsewhere" if is_gone(_owner_of(header)) is None else "left"), header


def _owner_of(header: Header) -> Owner:
    return Owner(header.pid, header.started, header.boot, header.host)


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return True
        raise
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _boot_id(system: System) -> UUID:
    try:
        return UUID((system.text("proc/sys/kernel/random/boot_id") or "").strip())
    except ValueError:
        return _UNKNOWN_BOOT


def _start_time(pid: int, system: System) -> int | None:
    stat = system.text(f"proc/{pid}/stat")
    # The process name is in parentheses and may itself contain any character, also parentheses.
    fields = stat.rpartition(")")[2].split() if stat else []
    return int(fields[_START_FIELD]) if len(fields) > _START_FIELD else None
