"""`penstock profile`: run any program and record it, from outside and from inside.

The process of `penstock profile` samples the machine. It outlives the program, so even a program
that is killed leaves a record of how it ended. Each Python process of the program finds settings in
its environment (see `injected/sitecustomize.py`) and records what only the process itself can know.

Only some processes record themselves: the ranks of a launcher do, data-loading workers do not.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from penstock.observe.errors import ObserveError
from penstock.observe.hardware import describe_hardware
from penstock.observe.injected import INJECTED, SETTINGS
from penstock.observe.observer import Observer
from penstock.observe.recorder import INTERVAL, Recorder, now, wall_clock
from penstock.observe.records import OBSERVE_FILE, PROCESS_PATTERNS, Observation
from penstock.observe.redaction import redact
from penstock.observe.run_files import LIMIT, RunFolder
from penstock.observe.samplers import (
    CoreLoad,
    DiskTraffic,
    GpuDriver,
    MachineMemory,
    NodeMemory,
    ProcessMemory,
)

CLAIM = ".first-process"
"""Directory that the first process without a rank creates, so that only one of them records."""

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that are passed on to the program."""

SENT_BY_KERNEL = 0x80
"""`si_code` of a signal that the terminal sent to the whole process group, as Ctrl-C does: the
program has received it too."""

_WORKERS = ("--multiprocessing-fork", "multiprocessing.", "torch._inductor.compile_worker")
"""Words in the command line of processes that are not recorded."""

_AWAITED = {*FORWARDED, signal.SIGCHLD}


# The process of `penstock profile`.


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Options of `penstock profile`."""

    interval: float = INTERVAL
    exact: Collection[int] = ()
    limit: int = LIMIT
    all_processes: bool = False
    ceilings: Mapping[str, float] | None = None


def profile(command: Sequence[str], path: str | Path, options: ProfileOptions) -> int:
    """Run a command to its end and record it. Return its exit code, or 128 plus the number of the
    signal that ended it."""
    origin = now()
    observation = Observation(
        began=wall_clock(origin),
        command=redact(command),
        interval=options.interval,
        mode="exact" if options.exact else "sampling",
        hardware=describe_hardware(),
        ceilings=options.ceilings or {},
    )
    folder = Path(os.path.abspath(path))
    # A directory that cannot be written is reported before the program starts.
    RunFolder(folder, observation).close()
    with contextlib.suppress(OSError):
        (folder / CLAIM).rmdir()
    # Signals are blocked before the child exists: one that arrived in between would end this
    # process and leave the program running. Threads created here inherit the mask.
    with _blocked_signals() as previous_mask:
        child = _start(command, _environment(folder, origin, options), previous_mask)
        return _record_until_exit(child, folder, origin, observation, options)


def _record_until_exit(
    child: subprocess.Popen[bytes], folder: Path, origin: float, observation: Observation,
    options: ProfileOptions,
) -> int:  # fmt: skip
    gpus = GpuDriver()
    disks = DiskTraffic(observation.hardware.disks)
    recorder = Recorder(
        folder,
        [ProcessMemory(child.pid), MachineMemory(), NodeMemory(), disks, CoreLoad(), gpus],
        interval=options.interval,
        limit=options.limit,
        origin=origin,
        observation=replace(observation, pid=child.pid),
        outside=True,
        clears=False,
    ).start()
    try:
        code = _wait(child)
    finally:
        gpus.close()
    if not any(
        (process / OBSERVE_FILE).exists()
        for pattern in PROCESS_PATTERNS
        for process in folder.glob(pattern)
    ):
        recorder.note("no process of the command imported torch: only the machine was sampled")
    ended_by = f"signal {-code}" if code < 0 else "exit"
    recorder.stop(ended_by, exit_code=code if code >= 0 else None)
    with contextlib.suppress(OSError):
        (folder / CLAIM).rmdir()
    return code if code >= 0 else 128 - code


def _start(
    command: Sequence[str], environment: Mapping[str, str], signal_mask: Collection[int]
) -> subprocess.Popen[bytes]:
    """Start the program with the signal mask that this process had originally."""

    def restore_mask() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)

    try:
        # `preexec_fn` is safe here: this process has no other threads yet.
        return subprocess.Popen(list(command), env=dict(environment), preexec_fn=restore_mask)  # noqa: PLW1509
    except OSError as failed:
        raise ObserveError(
            "", f"cannot be run: {failed.strerror}; check the spelling", where=command[0]
        ) from None


def _environment(folder: Path, origin: float, options: ProfileOptions) -> dict[str, str]:
    """Return the program's environment, with the settings and the injected `sitecustomize`."""
    settings = {
        "path": str(folder),
        "origin": origin,
        "interval": options.interval,
        "exact": sorted(options.exact),
        "limit": options.limit,
        "all": options.all_processes,
        "home": str(Path(__file__).parents[2]),
    }
    python_path = os.environ.get("PYTHONPATH")
    paths = [str(INJECTED), *([python_path] if python_path else [])]
    return {**os.environ, SETTINGS: json.dumps(settings), "PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def _blocked_signals() -> Iterator[Collection[int]]:
    """Block the signals that `_wait` handles, and yield the previous signal mask."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    try:
        yield previous
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for the program, and pass signals on to it: the program decides what they mean."""
    while (code := child.poll()) is None:
        received = signal.sigtimedwait(_AWAITED, 0.5)
        if received is None or received.si_signo == signal.SIGCHLD:
            continue
        if received.si_code != SENT_BY_KERNEL:
            child.send_signal(received.si_signo)
    return code


# The processes of the program.


def begin(settings: Mapping[str, Any]) -> None:
    """Record this process until it ends, if it is one that should be recorded."""
    folder = claim_folder(Path(settings["path"]), os.environ, sys.orig_argv, all_=settings["all"])
    if folder is None:
        return
    observer = Observer(
        folder, interval=settings["interval"], exact=settings["exact"], limit=settings["limit"]
    ).within(settings["origin"])
    observer.start()
    atexit.register(observer.stop)
    _stop_before_os_exit(observer)


def _stop_before_os_exit(observer: Observer) -> None:
    """Wrap `os._exit`, which skips atexit handlers: training programs whose threads never end use
    it to exit."""
    os_exit, owner = os._exit, os.getpid()

    def stop_and_exit(status: int) -> NoReturn:
        if os.getpid() == owner:  # a forked child must not touch its parent's recording
            observer.stop()
        os_exit(status)

    os._exit = stop_and_exit


def claim_folder(
    run: Path, environment: Mapping[str, str], command: Sequence[str], *, all_: bool
) -> Path | None:
    """Create this process's directory: `rank-N` for a rank, `process-PID` for the first other
    process. Return None if this process should not be recorded."""
    if any(sign in word for sign in _WORKERS for word in command):
        return None
    rank = environment.get("RANK", "")
    if rank.isdigit() and _create(run / f"rank-{int(rank)}"):
        return run / f"rank-{int(rank)}"
    if rank.isdigit() and not all_:
        return None
    if not all_ and not _create(run / CLAIM):
        return None
    own = run / f"process-{os.getpid()}"
    return own if _create(own) else None


def _create(folder: Path) -> bool:
    """Create a directory, and return whether this process was the one that did."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True
