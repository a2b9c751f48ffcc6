"""What is made of a run when it has ended. Room: show."""

from __future__ import annotations

import contextlib
from pathlib import Path

from penstock.observe.errors import ObserveError
from penstock.observe.records import read_run
from penstock.observe.trace import TRACE_FILE, write_trace
from penstock.units import MiB

LARGEST = 32 * MiB
"""What a program that has just ended is made to wait for; `penstock report` renders more."""


def render(path: str | Path) -> None:
    """The trace, where it is made quickly. What cannot be written is no error of the program's."""
    recorded = sum(file.stat().st_size for file in Path(path).glob("*.jsonl"))
    if recorded <= LARGEST:
        with contextlib.suppress(OSError, ObserveError):
            write_trace(read_run(path), Path(path) / TRACE_FILE)


def finish(path: str | Path) -> str:
    """Render what can be; what became of it, in a line."""
    run = read_run(path)
    write_trace(run, Path(path) / TRACE_FILE)
    told = run.observation
    steps = len({phase.step for phase in run.phases} - {None})
    ended = "" if told.ended_by in (None, "exit") else f", ended by {told.ended_by}"
    notes = "".join(f"\n  {note}" for note in run.notes)
    return (
        f"{path}: {told.ended or 0:.1f} s{ended}, {steps} steps, {len(run.samples)} samples; "
        f"`penstock report {path}` shows them{notes}"
    )
