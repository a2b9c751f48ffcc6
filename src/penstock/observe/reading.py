"""Reads a run back, whatever end it came to. Room: show.

A program may be killed while it writes, so the last line of a file may be cut off; a long run has
let go of parts in its middle. Neither is an error: both are told in the run's notes.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from penstock import record_files
from penstock.observe.errors import ObserveError
from penstock.observe.lines import Line, parse_line
from penstock.observe.observation import OBSERVE_FILE, PROCESSES, SLOWEST_FILE, Observation
from penstock.observe.records import Event, Phase, Run, Sample

T = TypeVar("T", bound=Line)


def read(folder: Path) -> Run:
    """The run and, where there are any, its processes."""
    own = _read_one(folder)
    found = sorted((path for pattern in PROCESSES for path in folder.glob(pattern)), key=_order)
    ranks = {path.name: _read_one(path) for path in found if (path / OBSERVE_FILE).exists()}
    return _joined(own, ranks) if ranks else own


def _read_one(folder: Path) -> Run:
    if not (folder / OBSERVE_FILE).exists():
        raise ObserveError(
            "",
            f"holds no {OBSERVE_FILE}: it is no observed run; record one with "
            f"`penstock profile -o {folder} -- python ...` or `with penstock.observe(...)`",
            where=str(folder),
        )
    observation = record_files.load(Observation, folder / OBSERVE_FILE, error=ObserveError)
    notes = list(observation.notes)
    samples = sorted(_records(folder, Sample, notes), key=lambda sample: sample.t)
    phases = sorted(_records(folder, Phase, notes), key=lambda phase: (phase.start, -phase.end))
    events = _events(folder, notes)
    if observation.ended is None:
        notes.append("it does not say how it ended: cut off, or still going on")
    filled = _with_phases(samples, phases)
    return Run(observation, tuple(filled), tuple(phases), tuple(events), tuple(notes))


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


def _joined(own: Run, ranks: dict[str, Run]) -> Run:
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
    return Run(
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
