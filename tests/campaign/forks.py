"""Run a function in a fork of this process, within limits, and see how it ends.

Importing torch and transformers takes seconds, and a fork of a process that has imported them
takes milliseconds. The process that forks must never have computed anything with torch: the locks
of threads that a fork does not copy would stay locked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import penstock as penstock_package
from penstock.units import GiB

CPU_SECONDS = 10
"""Processor time that a command may use."""

MEMORY = 2 * GiB
"""Memory that a command may map in addition to what the process had mapped before."""

WALL_SECONDS = 120
"""Time after which a fork that uses no processor time counts as hanging, on a busy machine."""

NOT_RUN = 99
"""Exit code of a fork whose function raised an exception: a mistake in the test itself."""

_DOES_NOT_EXIT = 124
"""Signal number that is none: the time limit ended the fork."""


@dataclass(frozen=True)
class Ended:
    """How a fork ended."""

    code: int
    """Exit code, or the negative number of a signal."""
    output: str
    errors: str
    seconds: float
    """Processor time."""

    @property
    def hung(self) -> bool:
        """Whether a limit of time ended it."""
        return self.code in (-signal.SIGXCPU, -_DOES_NOT_EXIT)


@dataclass(frozen=True)
class Limits:
    """What a fork may use."""

    cpu_seconds: int = CPU_SECONDS
    memory: int | None = MEMORY
    wall_seconds: float = WALL_SECONDS


class Fork:
    """A running fork of this process."""

    def __init__(
        self, function: Callable[[], int], folder: Path, limits: Limits | None = None
    ) -> None:
        self._limits = limits or Limits()
        self._output, self._errors = folder / "stdout.txt", folder / "stderr.txt"
        for path in (self._output, self._errors):
            path.write_text("")  # so that they can be read immediately
        self._deadline = time.monotonic() + self._limits.wall_seconds
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(function)
        self._ended: Ended | None = None
        self._pidfd = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """Kill the fork and everything it has started."""
        if self._ended is None:
            # It may not have become the leader of its group yet, or have ended.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> Ended | None:
        """Wait for the end. Return None if it is still running after `seconds`."""
        if self._ended is not None:
            return self._ended
        left = max(0.0, self._deadline - time.monotonic())
        timeout = left if seconds is None else min(left, seconds)
        if not select.select([self._pidfd], [], [], timeout)[0]:
            if time.monotonic() < self._deadline:
                return None
            self.kill()
            return self._reap(timed_out=True)
        return self._reap()

    def end(self) -> Ended:
        """Wait for the end, at most as long as the limit says."""
        while (ended := self.wait()) is None:
            pass
        return ended

    def _reap(self, *, timed_out: bool = False) -> Ended:
        _, status, usage = os.wait4(self.pid, 0)
        os.close(self._pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it has started and not ended
        code = -_DOES_NOT_EXIT if timed_out else os.waitstatus_to_exitcode(status)
        texts = [
            path.read_text(errors="replace") if path.exists() else ""
            for path in (self._output, self._errors)
        ]
        self._ended = Ended(code, *texts, usage.ru_utime + usage.ru_stime)
        return self._ended

    def _run(self, function: Callable[[], int]) -> None:
        code = NOT_RUN
        try:
            os.setsid()
            for number, path in ((1, self._output), (2, self._errors)):
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                os.dup2(file, number)
                os.close(file)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            _apply(self._limits)
            code = function()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _apply(limits: Limits) -> None:
    cpu = limits.cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits.memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + limits.memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def run_fork(function: Callable[[], int], folder: Path, limits: Limits | None = None) -> Ended:
    """Run a function in a fork, wait for it, and return how it ended."""
    return Fork(function, folder, limits).end()


def penstock(arguments: list[str]) -> Callable[[], int]:
    """Return a function that runs a command line of Penstock, for a fork."""

    def run() -> int:
        from penstock.cli import main

        return main.run(arguments)

    return run


def import_what(function: Callable[[], object], folder: Path) -> None:
    """Run a function in a fork, and import here what it imported, so that later forks need not."""
    names = folder / "modules.txt"

    def run() -> int:
        function()
        names.write_text("\n".join(sys.modules))
        return 0

    ended = run_fork(run, folder, Limits(cpu_seconds=600, memory=None, wall_seconds=600))
    assert ended.code == 0, f"{ended.output}\n{ended.errors}"
    own = [module.name for module in pkgutil.walk_packages(penstock_package.__path__, "penstock.")]
    # All modules of Penstock: a source that changes during a campaign must not mix versions.
    for name in [*names.read_text().splitlines(), *own]:
        if name.endswith("__main__") or ".injected" in name:
            continue  # they act when they are imported
        # Some modules are only made by code, and some refuse to be imported first.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all objects
