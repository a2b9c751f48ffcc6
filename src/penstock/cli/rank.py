"""Run a command as one rank of several: what to print, and how to end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from penstock.cli.failures import report_failure
from penstock.cli.output import EXIT_ERROR, EXIT_INTERRUPTED, print_errors
from penstock.rank_place import CODE, LAUNCH, RankPlace, pid_name

if TYPE_CHECKING:
    from penstock.distributed.rank_group import RankGroup

INTERRUPTED = "interrupted before the first step; no progress was lost"


def begin_rank(place: RankPlace) -> None:
    """Prepare this process to be a rank. Call this before torch is imported."""
    folder = os.environ.get(LAUNCH)
    if folder is not None:
        Path(folder, pid_name(place.rank)).write_text(str(os.getpid()))
        threading.Thread(target=_watch_launcher, args=(os.getppid(),), daemon=True).start()
    elif place.local_world > 1 and _is_set_by_torchrun("OMP_NUM_THREADS"):
        # torchrun sets it to 1, but a single process uses all CPUs, and the bits of a CPU depend
        # on the number of threads.
        del os.environ["OMP_NUM_THREADS"]
    if place.rank > 0:
        warnings.simplefilter("ignore")  # rank 0 warns of the same


def run_rank(place: RankPlace, work: Callable[[RankGroup], int]) -> int:
    """Call `work` with the group of this rank, and return the exit code of the process.

    One rank prints why a run failed. The process then ends immediately: its connections close, and
    so the others end, too.
    """
    from penstock.distributed.rank_group import open_rank_group

    group = open_rank_group(place)
    try:
        with group:
            code = work(group)
    except KeyboardInterrupt as interrupted:
        if group.claim_report(interrupted):
            print_errors(INTERRUPTED)
        end_process(EXIT_INTERRUPTED)
    except Exception as problem:
        code = EXIT_ERROR
        if group.claim_report(problem):
            # An error about another rank names it.
            named = place.rank == 0 or hasattr(problem, "rank")
            code = report_failure(problem, "" if named else f"rank {place.rank}: ")
        end_process(code)
    if group.launched:
        # The agent would end all ranks when the first one exits with another code than 0.
        if group.talks:
            group.tell_launcher(CODE, str(code))
        return 0
    return code


def end_process(code: int) -> NoReturn:
    """Exit without waiting for threads and connections, which may wait for other ranks."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a closed pipe
            stream.flush()
    os._exit(code)


def _is_set_by_torchrun(name: str) -> bool:
    """Return whether a variable of this process was not set yet when torchrun was started."""
    if name not in os.environ:
        return False
    try:
        started_with = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True
    return not any(each.startswith(f"{name}=".encode()) for each in started_with.split(b"\0"))


def _watch_launcher(launcher: int) -> None:
    """Stop the run, as after a signal, if the launcher was killed and could not pass one on."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
