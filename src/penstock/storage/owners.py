"""Who made a store, and whether they are gone. Room: hold."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from uuid import UUID

from penstock.machine.sysfs import System
from penstock.storage.header import Header

_NO_BOOT = UUID(int=0)
_START_FIELD = 19
"""Of /proc/PID/stat, counted after the name: when the process started, in ticks since boot."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that no other can be mistaken for."""

    pid: int
    started: int
    boot: UUID
    host: str


def this_process(system: System | None = None) -> Owner:
    system = system or System()
    pid = os.getpid()
    return Owner(pid, _started(pid, system) or 0, _boot(system), platform.node()[:200])


def owner_of(header: Header) -> Owner:
    return Owner(header.pid, header.started, header.boot, header.host)


def is_gone(owner: Owner, system: System | None = None) -> bool | None:
    """True, False, or None for a process of another machine, which cannot be asked from here.

    A pid in another container's namespace cannot be seen either; the file's lock is what decides
    there, and this only adds to it.
    """
    system = system or System()
    if owner.host != platform.node()[:200]:
        return None
    if owner.boot != _boot(system):
        return True
    return _started(owner.pid, system) != owner.started


def _boot(system: System) -> UUID:
    try:
        return UUID((system.text("proc/sys/kernel/random/boot_id") or "").strip())
    except ValueError:
        return _NO_BOOT


def _started(pid: int, system: System) -> int | None:
    stat = system.text(f"proc/{pid}/stat")
    # The name is in parentheses and may hold anything, parentheses too.
    fields = stat.rpartition(")")[2].split() if stat else []
    return int(fields[_START_FIELD]) if len(fields) > _START_FIELD else None
