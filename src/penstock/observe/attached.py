"""Inside a program that `penstock profile` started. Room: show.

Not every process is one to record: a launcher's ranks are, workers that load data are not.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock.observe.observer import Observer

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
