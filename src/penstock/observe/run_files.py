"""Write a run's directory while the program runs, and read it back however the run ended.

Each kind of record has its own file. When a file is full it is renamed to a numbered part and a
new one is started. The first part and the newest ones are kept, so a long run keeps its beginning
and its end within the size limit.

The writer lets OSError propagate: the recorder then stops recording, and the observed program
continues. The reader treats a last line that was cut off (the program was killed while writing)
and parts that were deleted as normal, and reports both in the run's notes.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import TypeVar

from penstock import records
from penstock.durable_files import PRIVATE, replace_file
from penstock.observe.errors import ObserveError
from penstock.observe.record_lines import Record, line_of, parse_line
from penstock.observe.records import (
    OBSERVE_FILE,
    PROCESS_PATTERNS,
    SLOWEST_FILE,
    TRAIN_PROFILE,
    Event,
    Observation,
    Phase,
    RecordedRun,
    Sample,
)
from penstock.units import KiB, MiB

LIMIT = 256 * MiB
"""Default size limit of a run's directory."""

_SHARES = {Sample: 8, Phase: 2, Event: 6}
"""Share of the limit for each kind of record, in sixteenths. Half of the events' share is for the
slowest steps."""

_PARTS = 8
"""Number of parts of each file."""

_OWN_FILES = (
    "samples.*jsonl", "phases.*jsonl", "events.*jsonl", OBSERVE_FILE, "trace.json", "report.html",
)  # fmt: skip
"""Files that a new recording deletes from the directory."""

_BUFFERED = 256 * KiB
"""Characters that are buffered before they are written."""

R = TypeVar("R", bound=Record)


# Writing.


class LineFile:
    """A file of lines that is split into numbered parts. Used by one thread at a time.

    Lines are collected in a list and written by `flush` with one unbuffered write. A buffered
    Python file would be flushed a second time by a forked child.
    """

    def __init__(self, folder: Path, stem: str, *, limit: int, parts: int = _PARTS) -> None:
        self._folder, self._stem = folder, stem
        self._part_nbytes, self._parts = max(1, limit // parts), parts
        self._numbers: list[int] = []
        self._buffer: list[str] = []
        self._buffer_length = self._written = 0
        self._file: FileIO | None = None

    def write(self, text: str) -> None:
        """Add one line, or several that must stay in the same part."""
        self._buffer.append(text)
        self._buffer_length += len(text)
        if self._buffer_length >= min(_BUFFERED, self._part_nbytes):
            self.flush()

    def flush(self) -> None:
        """Write all buffered lines, so that they survive if the process is killed."""
        data = memoryview("".join(self._buffer).encode())
        self._buffer, self._buffer_length = [], 0
        self._written += len(data)
        while data:
            if self._file is None:
                self._file = FileIO(self._path, "w", opener=_open_private)
            data = data[self._file.write(data) :]
        if self._written >= self._part_nbytes:
            self._start_new_part()

    def close(self) -> None:
        """Write all buffered lines and close the file."""
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without writing buffered lines."""
        self._buffer = []
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._stem}.jsonl"

    def _start_new_part(self) -> None:
        self.abandon()
        self._written = 0
        number = self._numbers[-1] + 1 if self._numbers else 1
        os.replace(self._path, self._folder / f"{self._stem}.{number}.jsonl")
        self._numbers.append(number)
        # `>=`: the part that is written next counts towards the limit too. Part 1 is always kept.
        while len(self._numbers) >= self._parts > 1:
            oldest = self._numbers.pop(1 if len(self._numbers) > 1 else 0)
            (self._folder / f"{self._stem}.{oldest}.jsonl").unlink(missing_ok=True)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, PRIVATE)


class RunFolder:
    """A run's directory, open for writing.

    Files of an earlier run are deleted first. Raises ObserveError if the directory cannot be
    created or written.
    """

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
                _delete_earlier_run(self.path)
        except OSError as failed:
            raise ObserveError(
                "",
                f"cannot be written to: {failed.strerror}; choose a writable directory with "
                f"{limit // MiB} MiB of free space",
                where=str(path),
            ) from failed
        self.save(observation)
        self._files = {
            kind: LineFile(self.path, f"{kind.__name__.lower()}s", limit=limit * share // 16)
            for kind, share in _SHARES.items()
        }

    def save(self, observation: Observation) -> None:
        """Replace `observe.json` atomically."""
        self.observation = observation
        records.save(observation, self.path / OBSERVE_FILE, error=ObserveError, mode=PRIVATE)

    def write(self, record: Record) -> None:
        """Add a record to the file of its kind."""
        self._files[type(record)].write(line_of(record))

    def write_slowest(self, text: str) -> None:
        """Replace the events of the slowest steps, given as lines."""
        replace_file(self.path / SLOWEST_FILE, text, mode=PRIVATE)

    def flush(self) -> None:
        """Write all buffered records."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Write all buffered records and close the files."""
        for file in self._files.values():
            file.close()

    def abandon(self) -> None:
        """Close the files without writing, in a forked child: they belong to its parent."""
        for file in self._files.values():
            file.abandon()


def _delete_earlier_run(folder: Path) -> None:
    """Delete the files of an earlier run, and nothing else."""
    for pattern in PROCESS_PATTERNS:
        for process in folder.glob(pattern):
            if (process / OBSERVE_FILE).exists():
                _delete_earlier_run(process)
                with contextlib.suppress(OSError):  # the user has put files into it
                    process.rmdir()
    for pattern in _OWN_FILES:
        for path in folder.glob(pattern):
            path.unlink()


# Reading.


def recording_directory(path: str | Path) -> Path:
    """Return the directory of a recording: the path, or `profile` in the output of a training."""
    inside = Path(path) / TRAIN_PROFILE
    is_output = not (Path(path) / OBSERVE_FILE).exists() and (inside / OBSERVE_FILE).exists()
    return inside if is_output else Path(path)


def is_recording(folder: Path) -> bool:
    """Whether a directory has a recording."""
    return (folder / OBSERVE_FILE).exists()


def read_run(path: str | Path) -> RecordedRun:
    """Read a run and, if it has several, its processes.

    `penstock profile` records every process in a directory of its own. Rank 0 of `penstock train`
    records itself together with the machine, and the other ranks are next to it.

    Raises ObserveError if the directory does not contain a run.
    """
    folder = recording_directory(path)
    machine = _read_process(folder)
    processes = sorted(
        (path for pattern in PROCESS_PATTERNS for path in folder.glob(pattern)), key=_process_order
    )
    ranks = {path.name: _read_process(path) for path in processes if (path / OBSERVE_FILE).exists()}
    if ranks and machine.phases:
        return replace(machine, notes=_all_notes(machine, ranks), ranks={"rank-0": machine} | ranks)
    return _join_processes(machine, ranks) if ranks else machine


def _read_process(folder: Path) -> RecordedRun:
    if not is_recording(folder):
        advice = f"`penstock profile -o {folder} -- python ...` or `with penstock.observe(...)`"
        if (folder / "run.yaml").exists():
            advice = "`penstock train --profile 20`, with `--resume` for the next steps"
        raise ObserveError(
            "",
            f"is not an observed run (no {OBSERVE_FILE}); record one with {advice}",
            where=str(folder),
        )
    observation = records.load(Observation, folder / OBSERVE_FILE, error=ObserveError)
    notes = list(observation.notes)
    samples = sorted(_read_records(folder, Sample, notes), key=lambda sample: sample.t)
    phases = sorted(
        _read_records(folder, Phase, notes), key=lambda phase: (phase.start, -phase.end)
    )
    events = _read_events(folder, notes)
    if observation.ended is None:
        notes.append("the recording has no end: it was cut off, or is still running")
    with_phases = _fill_in_phases(samples, phases)
    return RecordedRun(observation, tuple(with_phases), tuple(phases), tuple(events), tuple(notes))


def _process_order(path: Path) -> tuple[bool, int]:
    """Sort ranks first, by number."""
    kind, _, number = path.name.partition("-")
    return kind != "rank", int(number) if number.isdigit() else 1 << 62


def _read_events(folder: Path, notes: list[str]) -> list[Event]:
    """Read all events, once each.

    The events of a slow step can also be in the ordinary files. A step is written whole, so its
    number is enough to recognize it; an event without a step is compared as such.
    """
    events = _read_records(folder, Event, notes)
    known = {event if event.step is None else event.step for event in events}
    slowest = _read_lines(folder / SLOWEST_FILE, Event, notes)
    events += [e for e in slowest if (e if e.step is None else e.step) not in known]
    return sorted(events, key=lambda event: (event.start, event.end))


def _read_records(folder: Path, kind: type[R], notes: list[str]) -> list[R]:
    stem = f"{kind.__name__.lower()}s"
    found: list[R] = []
    for path in _parts(folder, stem, notes):
        found += _read_lines(path, kind, notes)
    return found


def _parts(folder: Path, stem: str, notes: list[str]) -> list[Path]:
    """List a file's parts, oldest first: the numbered ones, then the one without a number."""
    numbered = {
        int(match[1]): path
        for path in folder.glob(f"{stem}.*.jsonl")
        if (match := re.fullmatch(rf"{stem}\.(\d+)\.jsonl", path.name))
    }
    if numbered and len(numbered) < max(numbered):
        deleted = max(numbered) - len(numbered)
        notes.append(
            f"{stem}: {deleted} parts between the first and the last were deleted to stay within "
            f"the size limit"
        )
    last = folder / f"{stem}.jsonl"
    return [numbered[number] for number in sorted(numbered)] + [last] * last.exists()


def _read_lines(path: Path, kind: type[R], notes: list[str]) -> list[R]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as failed:
        raise ObserveError("", f"cannot be read: {failed.strerror}", where=str(path)) from failed
    *lines, rest = text.split("\n")
    if rest:
        notes.append(f"{path.name}: the last line was cut off")
    parsed = [parse_line(kind, line) for line in lines]
    bad = sum(record is None for record in parsed)
    if bad:
        notes.append(f"{path.name}: {bad} of {len(lines)} lines could not be read")
    return [record for record in parsed if record is not None]


def _join_processes(machine: RecordedRun, ranks: dict[str, RecordedRun]) -> RecordedRun:
    """Combine the machine's samples with the first process that has phases.

    The other processes are only in `ranks`. All of them count time from one origin.
    """
    first = next((run for run in ranks.values() if run.phases), next(iter(ranks.values())))
    machine_samples = machine.samples
    if any(sample.host.rss is not None for sample in first.samples):
        # The process reports its own resident memory. The profiler's figure adds its children and
        # counts the pages they share once per child: sixteen forked compile workers would look
        # like sixteen copies of torch.
        machine_samples = tuple(replace(s, host=replace(s.host, rss=None)) for s in machine_samples)
    samples = _fill_in_phases((*machine_samples, *first.samples), first.phases)
    observation, of_first = machine.observation, first.observation
    return RecordedRun(
        observation=replace(
            observation,
            mode=of_first.mode,
            planned=of_first.planned,
            overhead=of_first.overhead,
            ceilings={**observation.ceilings, **of_first.ceilings},
        ),
        samples=tuple(sorted(samples, key=lambda sample: sample.t)),
        phases=first.phases,
        events=first.events,
        notes=_all_notes(machine, ranks),
        ranks=ranks,
    )


def _all_notes(machine: RecordedRun, ranks: dict[str, RecordedRun]) -> tuple[str, ...]:
    found = [*machine.notes, *(note for run in ranks.values() for note in run.notes)]
    return tuple(dict.fromkeys(found))


def _fill_in_phases(samples: Iterable[Sample], phases: Sequence[Phase]) -> list[Sample]:
    """Set step and phase, by time, of samples that were taken from outside the process."""
    starts = [phase.start for phase in phases]
    filled = []
    for sample in samples:
        at = bisect.bisect_right(starts, sample.t) - 1
        if sample.phase is None and at >= 0 and sample.t < phases[at].end:
            sample = replace(sample, phase=phases[at].name, step=phases[at].step)
        filled.append(sample)
    return filled
