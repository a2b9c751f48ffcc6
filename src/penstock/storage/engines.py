"""Which of the two engines to use, and why. Room: hold."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import Literal

from penstock import _native
from penstock.machine.sysfs import System
from penstock.storage.errors import EngineError

EngineName = Literal["auto", "io_uring", "threads"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the kernel gives no io_uring, and what would change its mind."""

    why: str
    mend: str

    def __str__(self) -> str:
        return f"{self.why} ({self.mend})"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and the sentence that `doctor` prints about it."""

    name: Literal["io_uring", "threads"]
    reason: str
    refusal: Refusal | None = None
    """Why it is not io_uring, if that was tried."""


def choose_engine(wanted: EngineName = "auto", system: System | None = None) -> EngineChoice:
    """io_uring where the kernel gives one, threads where not.

    Raises EngineError if io_uring was asked for by name and is not to be had.
    """
    if wanted not in ("auto", "io_uring", "threads"):
        raise EngineError(wanted, "there is no such engine")
    if wanted == "threads":
        return EngineChoice("threads", "asked for")
    refused = _native.io_uring_errno()
    if refused == 0:
        asked = "asked for" if wanted == "io_uring" else "the kernel allows it"
        return EngineChoice("io_uring", asked)
    refusal = find_refusal(refused, system or System())
    if wanted == "io_uring":
        raise EngineError(wanted, str(refusal))
    return EngineChoice("threads", f"no io_uring: {refusal}", refusal)


def find_refusal(refused: int, system: System) -> Refusal:
    """What stands behind the errno of io_uring_setup."""
    told = os.strerror(refused)
    disabled = system.number("proc/sys/kernel/io_uring_disabled")
    if disabled:
        return Refusal(
            f"kernel.io_uring_disabled={disabled}", "`sudo sysctl kernel.io_uring_disabled=0`"
        )
    if refused == errno.ENOSYS:
        return Refusal("the kernel has none", "boot Linux 5.6 or newer, built with CONFIG_IO_URING")
    if refused == errno.ENOMEM:
        return Refusal("the memlock limit is too low for its rings", "`ulimit -l unlimited`")
    if _has_seccomp_filter(system):
        return Refusal(
            f"a seccomp filter refuses it ({told})",
            "`docker run --security-opt seccomp=PROFILE.json ...` with io_uring calls allowed",
        )
    return Refusal(f"refused: {told}", "look for a security module's denial: `sudo dmesg | tail`")


def _has_seccomp_filter(system: System) -> bool:
    return re.search(r"^Seccomp:\s*2$", system.text("proc/self/status") or "", re.M) is not None
