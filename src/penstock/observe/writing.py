"""A run's directory while it is written: parts that rotate, within a limit. Room: show.

Each kind of record has a file. When a part is full it gets a number and the next one begins; the
first part and the newest ones stay, so that a long run keeps its beginning and its end. An OSError
is the caller's business: recording ends there, and the program that is observed goes on.
"""

from __future__ import annotations

import contextlib
import os
from io import FileIO
from pathlib import Path

from penstock import record_files
from penstock.observe.errors import ObserveError
from penstock.observe.lines import Line, line_of
from penstock.observe.observation import OBSERVE_FILE, PROCESSES, SLOWEST_FILE, Observation
from penstock.observe.records import Event, Phase, Sample
from penstock.units import KiB, MiB

LIMIT = 256 * MiB
"""What a run may take on disk, where nobody says otherwise."""

_SHARES = {Sample: 8, Phase: 2, Event: 6}
"""Of the limit, in sixteenths. Half of the events' is for the slowest steps."""

_PARTS = 8

_OURS = (
    "samples.*jsonl", "phases.*jsonl", "events.*jsonl", OBSERVE_FILE, "trace.json", "report.html",
)  # fmt: skip


_HELD = 256 * KiB
"""What waits to be written at most."""


class LineFile:
    """Lines into numbered parts. For one thread. What is held is written whole by `flush`, past
    any buffer of Python's: a child that is forked meanwhile has nothing to write twice."""

    def __init__(self, folder: Path, stem: str, *, limit: int, parts: int = _PARTS) -> None:
        self._folder, self._stem = folder, stem
        self._part_nbytes, self._parts = max(1, limit // parts), parts
        self._numbers: list[int] = []
        self._held: list[str] = []
        self._held_nbytes = self._written = 0
        self._file: FileIO | None = None

    def write(self, text: str) -> None:
        """One line, or several that stay together."""
        self._held.append(text)
        self._held_nbytes += len(text)
        if self._held_nbytes >= min(_HELD, self._part_nbytes):
            self.flush()

    def flush(self) -> None:
        """So that a kill loses nothing that came before."""
        data = memoryview("".join(self._held).encode())
        self._held, self._held_nbytes = [], 0
        self._written += len(data)
        while data:
            if self._file is None:
                self._file = FileIO(self._path, "w")
            data = data[self._file.write(data) :]
        if self._written >= self._part_nbytes:
            self._turn()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Without writing what is held."""
        self._held = []
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._stem}.jsonl"

    def _turn(self) -> None:
        self.abandon()
        self._written = 0
        number = self._numbers[-1] + 1 if self._numbers else 1
        os.replace(self._path, self._folder / f"{self._stem}.{number}.jsonl")
        self._numbers.append(number)
        while len(self._numbers) >= self._parts > 1:  # with the one that is begun next
            gone = self._numbers.pop(1 if len(self._numbers) > 1 else 0)
            (self._folder / f"{self._stem}.{gone}.jsonl").unlink(missing_ok=True)


class RunFolder:
    """A run's directory, emptied of what an earlier run left. ObserveError if it cannot be."""

    def __init__(
        self,
        path: str | Path,
        observation: Observation,
        *,
        limit: int = LIMIT,
        clears: bool = True,
    ) -> None:
        self.path = Path(path)
        self.observation = observation
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if clears:
                _clear(self.path)
        except OSError as failed:
            raise ObserveError(
                "",
                f"cannot be written to: {failed.strerror}; name a directory where files can be "
                f"made, with {limit // MiB} MiB of room",
                where=str(path),
            ) from failed
        self.save(observation)
        self._files = {
            kind: LineFile(self.path, f"{kind.__name__.lower()}s", limit=limit * share // 16)
            for kind, share in _SHARES.items()
        }

    def save(self, observation: Observation) -> None:
        """What is known by now, whole or not at all."""
        self.observation = observation
        record_files.save(observation, self.path / OBSERVE_FILE, error=ObserveError)

    def write(self, record: Line) -> None:
        self._files[type(record)].write(line_of(record))

    def write_slowest(self, text: str) -> None:
        """Lines of events, in place of those that were there."""
        draft = self.path / f".{SLOWEST_FILE}.tmp"
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, self.path / SLOWEST_FILE)

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def abandon(self) -> None:
        """In a process that was forked: the files are its parent's."""
        for file in self._files.values():
            file.abandon()


def _clear(folder: Path) -> None:
    """What an earlier run left, and nothing else."""
    for pattern in PROCESSES:
        for process in folder.glob(pattern):
            if (process / OBSERVE_FILE).exists():
                _clear(process)
                with contextlib.suppress(OSError):  # something of the user's is in it
                    process.rmdir()
    for pattern in _OURS:
        for old in folder.glob(pattern):
            old.unlink()
