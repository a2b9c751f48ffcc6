"""Choose the native I/O engine, and wait for its transfers.

There are two engines: io_uring where the kernel allows it, and a pool of threads with `preadv` and
`pwritev` elsewhere. Containers often forbid io_uring with a seccomp filter.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock import _native
from penstock.machine.sysfs import System
from penstock.storage.errors import EngineError

EngineName = Literal["auto", "io_uring", "threads"]

WAIT_SLICE = 0.1
"""Seconds of one native wait. Python handles signals in between, so that Ctrl-C ends a wait."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the kernel refuses io_uring, and what would enable it."""

    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.why} ({self.fix})"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The chosen engine, and the reason that `penstock doctor` prints."""

    name: Literal["io_uring", "threads"]
    reason: str
    refusal: Refusal | None = None
    """Why io_uring is not available, if it was tried."""


def choose_engine(wanted: EngineName = "auto", system: System | None = None) -> EngineChoice:
    """Choose io_uring if the kernel allows it, otherwise threads.

    Raises EngineError if io_uring was requested by name and is not available.
    """
    if wanted not in ("auto", "io_uring", "threads"):
        raise EngineError(wanted, "there is no such engine")
    if wanted == "threads":
        return EngineChoice("threads", "requested")
    refused = _native.io_uring_errno()
    if refused == 0:
        reason = "requested" if wanted == "io_uring" else "the kernel allows it"
        return EngineChoice("io_uring", reason)
    refusal = explain_refusal(refused, system or System())
    if wanted == "io_uring":
        raise EngineError(wanted, str(refusal))
    return EngineChoice("threads", f"no io_uring: {refusal}", refusal)


def explain_refusal(code: int, system: System) -> Refusal:
    """Find out why io_uring_setup failed with errno `code`."""
    message = os.strerror(code)
    disabled = system.number("proc/sys/kernel/io_uring_disabled")
    if disabled:
        return Refusal(
            f"kernel.io_uring_disabled={disabled}", "`sudo sysctl kernel.io_uring_disabled=0`"
        )
    if code == errno.ENOSYS:
        return Refusal(
            "the kernel does not support it", "boot Linux 5.6 or newer, built with CONFIG_IO_URING"
        )
    if code == errno.ENOMEM:
        return Refusal("the memlock limit is too low for its rings", "`ulimit -l unlimited`")
    if _has_seccomp_filter(system):
        return Refusal(
            f"a seccomp filter refuses it ({message})",
            "`docker run --security-opt seccomp=PROFILE.json ...` with io_uring calls allowed",
        )
    return Refusal(
        f"refused: {message}", "look for a denial by a security module: `sudo dmesg | tail`"
    )


def wait_for_transfers(
    engine: _native.StoreEngine,
    transfers: Sequence[_native.Transfer],
    *,
    wait_for_all: bool = True,
    timeout: float | None = None,
) -> bool:
    """Wait for one or all transfers. Return False if the timeout expires first.

    The native wait releases the GIL and does not see Python's signals, hence the short slices.
    """
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = WAIT_SLICE if end is None else min(WAIT_SLICE, max(0.0, end - time.monotonic()))
        if engine.wait(list(transfers), wait_for_all, left):
            return True
        if end is not None and time.monotonic() >= end:
            return False


def _has_seccomp_filter(system: System) -> bool:
    return re.search(r"^Seccomp:\s*2$", system.text("proc/self/status") or "", re.M) is not None
