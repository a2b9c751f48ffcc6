"""Write the events of a run to metrics.jsonl."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from penstock.durable_files import replace_file
from penstock.records import finite_number, parse_lines
from penstock.train.events import Event, to_json_line

METRICS = "metrics.jsonl"

LOGGED = ("step", "skipped", "eval", "sample", "save", "done")
"""Events that metrics.jsonl contains."""

SYNCED = ("save", "done")
"""Events after which the file is synced. It is also synced before a checkpoint is saved: a run
resumed from it has all lines of earlier steps, even after a power cut."""

MEMORY = ("tiers", "host")
"""Fields of a step that metrics.jsonl leaves out: they rarely change from step to step."""


_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class MetricsFile:
    """Appends one line per event to metrics.jsonl, immediately.

    A resumed run continues the file after step `after`, that of its checkpoint. If the disk is full
    or fails, training goes on: `note` says so, and the lines are written as soon as that works.
    """

    def __init__(self, out: str | Path, *, after: int, note: Callable[[str], None]) -> None:
        self._path, self._note = Path(out) / METRICS, note
        _drop_later_lines(self._path, after)
        # Without Python's buffer, which would keep or lose an unknown part of what failed.
        self._fd = os.open(self._path, _APPEND, 0o666)
        self._waiting = b""
        self._failing = False

    def handle(self, event: Event) -> None:
        if event["event"] in LOGGED:
            logged = {name: value for name, value in event.items() if name not in MEMORY}
            line = to_json_line({**logged, "time": round(time.time(), 3)})
            self._waiting += f"{line}\n".encode()
            self._write()
            if event["event"] in SYNCED:
                self.sync()

    def follow(self, out: Path) -> None:
        """Continue in a directory that was moved, or created again after it was removed."""
        self._path = out / METRICS
        self._restore()

    def _restore(self) -> None:
        """Write the file again if it was removed: the open descriptor still has its lines."""
        if os.path.lexists(self._path):
            return
        with contextlib.suppress(OSError):
            size = os.fstat(self._fd).st_size
            replace_file(self._path, os.pread(self._fd, size, 0))
            former, self._fd = self._fd, os.open(self._path, _APPEND)
            os.close(former)

    def sync(self) -> None:
        """Make all lines so far survive a power cut."""
        self._restore()
        # A file system that cannot sync, or fails to, must not end the run.
        with contextlib.suppress(OSError):
            os.fsync(self._fd)

    def _write(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._fd, self._waiting) :]
        except OSError as problem:
            if not self._failing:
                self._failing = True
                self._note(
                    f"warning: {self._path} cannot be written: {problem.strerror}. Training "
                    f"continues, and the lines are written when there is space"
                )
        else:
            self._failing = False

    def close(self) -> None:
        self._write()
        if self._waiting:
            lost = self._waiting.count(b"\n")
            self._note(f"warning: {self._path} lacks the last {lost} lines of the run")
        os.close(self._fd)


def _drop_later_lines(path: Path, after: int) -> None:
    """Drop the lines of steps after the checkpoint: the resumed run takes these steps again."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    steps = ((line, finite_number(event.get("step"))) for line, event in parse_lines(text))
    kept = [line for line, step in steps if step is not None and step <= after]
    replace_file(path, "".join(f"{line}\n" for line in kept))
