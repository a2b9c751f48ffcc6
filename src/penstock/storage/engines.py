"""Which of the two engines to use, and why. Room: hold."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Literal

from penstock import _native
from penstock.storage.errors import EngineError
from penstock.system import System

EngineName = Literal["auto", "io_uring", "threads"]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and the sentence that `doctor` prints about it."""

    name: Literal["io_uring", "threads"]
    reason: str


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
    why = explain_refusal(refused, system or System())
    if wanted == "io_uring":
        raise EngineError(wanted, why)
    return EngineChoice("threads", f"no io_uring: {why}")


def explain_refusal(refused: int, system: System) -> str:
    """Why io_uring_setup failed, and what would allow it."""
    if refused == errno.ENOSYS:
        return "this kernel has none (5.6 is the first that will do)"
    disabled = system.number("proc/sys/kernel/io_uring_disabled")
    if disabled:
        return (
            f"kernel.io_uring_disabled is {disabled}; `sysctl kernel.io_uring_disabled=0` allows it"
        )
    if refused in (errno.EPERM, errno.EACCES):
        return (
            "a seccomp filter forbids it, as containers do by default; "
            "--security-opt seccomp=unconfined, or a profile with the io_uring calls, allows it"
        )
    if refused == errno.ENOMEM:
        return "the memlock limit is too low for its rings; `ulimit -l unlimited` lifts it"
    return os.strerror(refused)
