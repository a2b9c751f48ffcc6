"""A run's directory while it is written: parts that rotate, within a limit. Room: show.

Each kind of record has a file. When a part is full it gets a number and the next one begins; the
first part and the newest ones stay, so that a long run keeps its beginning and its end. An OSError
is the caller's business: recording ends there, and the program that is observed goes on.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import TypeVar

from penstock import records
from penstock.observe.errors import ObserveError
from penstock.observe.observation import OBSERVE_FILE, PROCESSES, SLOWEST_FILE, Observation
from penstock.observe.record_lines import Line, line_of, parse_line
from penstock.observe.records import Event, Phase, RecordedRun, Sample
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
        records.save(observation, self.path / OBSERVE_FILE, error=ObserveError)

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


# --------
# Which steps are kept in full: the first, the last, the slowest few, exact ones. Room: show.
#
# What a step did is a thousand events and more, so a step is only turned into events when it is
# to
# be kept: a long run costs no more for being long. What an engine sweeps apart is kept with the
# step
# that left it.

FIRST, LAST, SLOWEST = 3, 3, 3

EVERY = 5.0
"""Seconds after which the newest step is written anyway: a kill leaves no time for the last ones"""

Make = Callable[[], list[Event]]


@dataclass(slots=True, eq=False)
class Step:
    """A step that may be kept."""

    number: int
    seconds: float
    makes: list[Make]
    """What it did, and what followed it."""
    written: bool = False
    lines: list[str] = field(default_factory=list)
    """Its events, while it is among the slowest."""


class StepSelector:
    """For one thread."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.always: frozenset[int] = frozenset()
        """Steps that are kept whatever they took."""
        self._seen = 0
        self._last: deque[Step] = deque(maxlen=LAST)
        self._slowest: list[Step] = []
        self._written_at = 0.0

    def add(self, number: int, seconds: float, make: Make, now: float) -> None:
        """`make` is called now, later or never."""
        step = Step(number, seconds, [make])
        self._seen += 1
        self._last.append(step)
        wanted = self._seen <= FIRST or number in self.always
        if wanted or now - self._written_at >= EVERY:
            self._write(step)
            self._written_at = now
        if len(self._slowest) < SLOWEST or seconds > self._slowest[-1].seconds:
            self._keep_slow(step)

    def follow(self, make: Make) -> None:
        """With what ran after the newest step: it is kept where that one is."""
        step = self._last[-1] if self._last else None
        if step is None or step.written:
            self._write_events(make())
        else:
            step.makes.append(make)
        if step is not None and step in self._slowest:
            step.lines += map(line_of, make())
            self._write_slowest()

    def close(self) -> None:
        for step in self._last:
            if not step.written:
                self._write(step)
        self._last.clear()

    def _write(self, step: Step) -> None:
        for make in step.makes:
            self._write_events(make())
        step.written = True

    def _write_events(self, events: list[Event]) -> None:
        for event in events:
            self._folder.write(event)

    def _keep_slow(self, step: Step) -> None:
        step.lines = [line_of(event) for make in step.makes for event in make()]
        self._slowest.append(step)
        self._slowest.sort(key=lambda step: step.seconds, reverse=True)
        del self._slowest[SLOWEST:]
        self._write_slowest()

    def _write_slowest(self) -> None:
        self._folder.write_slowest("".join(line for step in self._slowest for line in step.lines))


# --------
# Reads a run back, whatever end it came to. Room: show.
#
# A program may be killed while it writes, so the last line of a file may be cut off; a long run
# has
# let go of parts in its middle. Neither is an error: both are told in the run's notes.

T = TypeVar("T", bound=Line)


def read_run(path: str | Path) -> RecordedRun:
    """Read the run and, where there are any, its processes."""
    folder = Path(path)
    own = _read_one(folder)
    found = sorted((path for pattern in PROCESSES for path in folder.glob(pattern)), key=_order)
    ranks = {path.name: _read_one(path) for path in found if (path / OBSERVE_FILE).exists()}
    return _joined(own, ranks) if ranks else own


def _read_one(folder: Path) -> RecordedRun:
    if not (folder / OBSERVE_FILE).exists():
        raise ObserveError(
            "",
            f"holds no {OBSERVE_FILE}: it is no observed run; record one with "
            f"`penstock profile -o {folder} -- python ...` or `with penstock.observe(...)`",
            where=str(folder),
        )
    observation = records.load(Observation, folder / OBSERVE_FILE, error=ObserveError)
    notes = list(observation.notes)
    samples = sorted(_records(folder, Sample, notes), key=lambda sample: sample.t)
    phases = sorted(_records(folder, Phase, notes), key=lambda phase: (phase.start, -phase.end))
    events = _events(folder, notes)
    if observation.ended is None:
        notes.append("it does not say how it ended: cut off, or still going on")
    filled = _with_phases(samples, phases)
    return RecordedRun(observation, tuple(filled), tuple(phases), tuple(events), tuple(notes))


def _order(path: Path) -> tuple[bool, int]:
    kind, _, number = path.name.partition("-")
    return kind != "rank", int(number) if number.isdigit() else 1 << 62


# Lines.


def _events(folder: Path, notes: list[str]) -> list[Event]:
    """Those of a slow step may be among the others too; one of no step is known by itself."""
    found = _records(folder, Event, notes)
    known = {event if event.step is None else event.step for event in found}
    slowest = _lines(folder / SLOWEST_FILE, Event, notes)
    found += [e for e in slowest if (e if e.step is None else e.step) not in known]
    return sorted(found, key=lambda event: (event.start, event.end))


def _records(folder: Path, kind: type[T], notes: list[str]) -> list[T]:
    stem = f"{kind.__name__.lower()}s"
    found: list[T] = []
    for path in _parts(folder, stem, notes):
        found += _lines(path, kind, notes)
    return found


def _parts(folder: Path, stem: str, notes: list[str]) -> list[Path]:
    """Oldest first: those with numbers, then the one that was written to last."""
    numbered = {
        int(match[1]): path
        for path in folder.glob(f"{stem}.*.jsonl")
        if (match := re.fullmatch(rf"{stem}\.(\d+)\.jsonl", path.name))
    }
    if numbered and len(numbered) < max(numbered):
        gone = max(numbered) - len(numbered)
        notes.append(f"{stem}: {gone} parts between the first and the last were let go of")
    last = folder / f"{stem}.jsonl"
    return [numbered[number] for number in sorted(numbered)] + [last] * last.exists()


def _lines(path: Path, kind: type[T], notes: list[str]) -> list[T]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as failed:
        raise ObserveError("", f"cannot be read: {failed.strerror}", where=str(path)) from failed
    *whole, rest = text.split("\n")
    if rest:
        notes.append(f"{path.name}: the last line was cut off")
    made = [parse_line(kind, line) for line in whole]
    bad = sum(record is None for record in made)
    if bad:
        notes.append(f"{path.name}: {bad} of {len(whole)} lines could not be read")
    return [record for record in made if record is not None]


# Several processes.


def _joined(own: RecordedRun, ranks: dict[str, RecordedRun]) -> RecordedRun:
    """The machine's samples with those of the first process that did something: others are in
    `ranks`. All of them count time from one origin."""
    first = next((run for run in ranks.values() if run.phases), next(iter(ranks.values())))
    phases = first.phases
    outside = own.samples
    if any(sample.host.rss is not None for sample in first.samples):
        # A process knows its own. From outside its children's are added, and what they share with
        # each other is counted for each: sixteen forked compilers are sixteen times torch.
        outside = tuple(replace(s, host=replace(s.host, rss=None)) for s in outside)
    samples = _with_phases((*outside, *first.samples), phases)
    told, of_first = own.observation, first.observation
    notes = dict.fromkeys([*own.notes, *(note for run in ranks.values() for note in run.notes)])
    return RecordedRun(
        observation=replace(
            told,
            mode=of_first.mode,
            planned=of_first.planned,
            overhead=of_first.overhead,
            ceilings={**told.ceilings, **of_first.ceilings},
        ),
        samples=tuple(sorted(samples, key=lambda sample: sample.t)),
        phases=phases,
        events=first.events,
        notes=tuple(notes),
        ranks=ranks,
    )


def _with_phases(samples: Iterable[Sample], phases: Sequence[Phase]) -> list[Sample]:
    """Samples from outside do not know the phase: it follows from the time."""
    starts = [phase.start for phase in phases]
    found = []
    for sample in samples:
        at = bisect.bisect_right(starts, sample.t) - 1
        if sample.phase is None and at >= 0 and sample.t < phases[at].end:
            sample = replace(sample, phase=phases[at].name, step=phases[at].step)
        found.append(sample)
    return found
