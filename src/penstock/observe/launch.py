"""Inside a program that `penstock profile` started. Room: show.

Not every process is one to record: a launcher's ranks are, workers that load data are not.
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
from penstock.observe.gpu_samplers import Cards
from penstock.observe.hardware import hardware
from penstock.observe.injected import INJECTED, SETTINGS
from penstock.observe.observation import OBSERVE_FILE, PROCESSES, Observation
from penstock.observe.observer import Observer
from penstock.observe.recorder import INTERVAL, Recorder, now, wall_clock
from penstock.observe.run_files import LIMIT, RunFolder
from penstock.observe.samplers import Cores, Disks, MachineMemory, NodeMemory, ProcessMemory

CLAIM = ".first-process"

_WORKERS = ("--multiprocessing-fork", "multiprocessing.", "torch._inductor.compile_worker")


def begin(settings: Mapping[str, Any]) -> None:
    """Record this process, if it is one to record, until it ends."""
    folder = own_folder(Path(settings["path"]), os.environ, sys.orig_argv, all_=settings["all"])
    if folder is None:
        return
    observer = Observer(
        folder, interval=settings["interval"], exact=settings["exact"], limit=settings["limit"]
    ).within(settings["origin"])
    observer.start()
    atexit.register(observer.stop)
    _stop_before_leaving(observer)


def _stop_before_leaving(observer: Observer) -> None:
    """`os._exit` passes atexit by; training programs whose threads never end leave by it."""
    leave, owner = os._exit, os.getpid()

    def stopped(status: int) -> NoReturn:
        if os.getpid() == owner:  # a fork leaves without touching the recording
            observer.stop()
        leave(status)

    os._exit = stopped


def own_folder(
    run: Path, environment: Mapping[str, str], command: Sequence[str], *, all_: bool
) -> Path | None:
    """`rank-N` for a rank, `process-PID` for the first other one; None: not to be recorded."""
    if any(sign in word for sign in _WORKERS for word in command):
        return None
    rank = environment.get("RANK", "")
    if rank.isdigit() and _made(run / f"rank-{int(rank)}"):
        return run / f"rank-{int(rank)}"
    if rank.isdigit() and not all_:
        return None
    if not all_ and not _made(run / CLAIM):
        return None
    own = run / f"process-{os.getpid()}"
    return own if _made(own) else None


def _made(folder: Path) -> bool:
    """Only one process makes it."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


# --------
# `penstock profile`: any program, observed from outside and from within. Room: show.
#
# This process samples the machine and outlives the program, so that a run that is killed says so.
# The
# program itself is told by its environment to record what only it can know.

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

SENT_BY_TERMINAL = 0x80
"""What the kernel says of a Ctrl-C: the program has got it too."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What can be chosen."""

    interval: float = INTERVAL
    exact: Collection[int] = ()
    limit: int = LIMIT
    all_processes: bool = False
    ceilings: Mapping[str, float] | None = None


def profile(command: Sequence[str], path: str | Path, options: ProfileOptions) -> int:
    """Run the command to its end. Its exit code; 128 and the signal where one ended it."""
    origin = now()
    observation = Observation(
        began=wall_clock(origin),
        command=tuple(command),
        interval=options.interval,
        mode="exact" if options.exact else "sampling",
        hardware=hardware(),
        ceilings=options.ceilings or {},
    )
    folder = Path(os.path.abspath(path))
    RunFolder(folder, observation).close()  # before the program begins: what cannot be is told now
    with contextlib.suppress(OSError):
        (folder / CLAIM).rmdir()
    with _signals_held() as before:  # by the threads made here, too, and before there is a child:
        # a signal that came in between would end this program and not the other
        child = _start(command, _environment(folder, origin, options), before)
        return _observed(child, folder, origin, observation, options)


def _observed(
    child: subprocess.Popen[bytes], folder: Path, origin: float, observation: Observation,
    options: ProfileOptions,
) -> int:  # fmt: skip
    cards = Cards()
    disks = observation.hardware.disks
    recorder = Recorder(
        folder,
        [ProcessMemory(child.pid), MachineMemory(), NodeMemory(), Disks(disks), Cores(), cards],
        interval=options.interval,
        limit=options.limit,
        origin=origin,
        observation=replace(observation, pid=child.pid),
        outside=True,
        clears=False,
    ).start()
    try:
        code = _until_ended(child)
    finally:
        cards.close()
    if not any((at / OBSERVE_FILE).exists() for name in PROCESSES for at in folder.glob(name)):
        recorder.note("no process of the command imported torch: only the machine was sampled")
    ended_by = f"signal {-code}" if code < 0 else "exit"
    recorder.stop(ended_by, exit_code=code if code >= 0 else None)
    with contextlib.suppress(OSError):
        (folder / CLAIM).rmdir()
    return code if code >= 0 else 128 - code


def _start(
    command: Sequence[str], environment: Mapping[str, str], signals: Collection[int]
) -> subprocess.Popen[bytes]:
    """With these signals held, as its caller had them, and no others."""

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)

    try:
        # Safe here: no thread has been made yet.
        return subprocess.Popen(list(command), env=dict(environment), preexec_fn=restore)  # noqa: PLW1509
    except OSError as failed:
        raise ObserveError(
            "", f"cannot be run: {failed.strerror}; is it spelled right?", where=command[0]
        ) from None


def _environment(folder: Path, origin: float, options: ProfileOptions) -> dict[str, str]:
    settings = {
        "path": str(folder),
        "origin": origin,
        "interval": options.interval,
        "exact": sorted(options.exact),
        "limit": options.limit,
        "all": options.all_processes,
        "home": str(Path(__file__).parents[2]),
    }
    before = os.environ.get("PYTHONPATH")
    paths = [str(INJECTED), *([before] if before else [])]
    return {**os.environ, SETTINGS: json.dumps(settings), "PYTHONPATH": os.pathsep.join(paths)}


_HEARD = {*FORWARDED, signal.SIGCHLD}


@contextlib.contextmanager
def _signals_held() -> Iterator[Collection[int]]:
    """Those that were held before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _until_ended(child: subprocess.Popen[bytes]) -> int:
    """Signals go on to the program, and it decides. From a terminal it has got them itself."""
    while (code := child.poll()) is None:
        told = signal.sigtimedwait(_HEARD, 0.5)
        if told is None or told.si_signo == signal.SIGCHLD:
            continue
        if told.si_code != SENT_BY_TERMINAL:
            child.send_signal(told.si_signo)
    return code
