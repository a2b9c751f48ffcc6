"""Write a run as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

The trace has one row for each track of events, one for the phases and one for the steps, and
counters for each tier, link, disk and core. Times are in microseconds and sorted. Every range is
one complete event ("X"), so a recording that was cut off leaves no range open.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.durable_files import PRIVATE, replacement_of
from penstock.observe.records import Event, Phase, RecordedRun, Sample

TRACE_FILE = "trace.json"

TraceRow = dict[str, Any]

_FIRST_TRACKS = ("gpu", "h2d", "d2h", "cpu sweep", "ranks")
"""Tracks that come first, in this order."""

_FURTHER = " ("
"""Separates a track's name from the number of a further row for the same track."""

_STEPS_TID, _PHASES_TID, _FIRST_EVENT_TID = 1, 2, 10


def write_trace(run: RecordedRun, path: str | Path) -> None:
    """Write the trace atomically: readers never see half a file."""
    with replacement_of(path, mode=PRIVATE) as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, row in enumerate(trace_rows(run)):
            file.write(((",\n" if number else "") + json.dumps(row, allow_nan=False)).encode())
        file.write(b"\n]}\n")


def trace_rows(run: RecordedRun) -> list[TraceRow]:
    """Return the trace's events: names first, then everything in order of time."""
    processes = run.ranks or {"": run}
    names: list[TraceRow] = []
    timed: list[TraceRow] = []
    for pid, (name, process) in enumerate(processes.items(), start=1):
        command = " ".join(run.observation.command) or "program"
        names.append(_name("process_name", pid, 0, f"{name} {command}".strip()))
        placed = list(_place(process.events))
        tracks = _number_tracks({track for _, track in placed})
        names += [
            _name("thread_name", pid, _STEPS_TID, "steps"),
            _name("thread_name", pid, _PHASES_TID, "phases"),
        ]
        names += [_name("thread_name", pid, tid, track) for track, tid in tracks.items()]
        names += [_order(pid, tid) for tid in (_STEPS_TID, _PHASES_TID, *tracks.values())]
        timed += _steps(process.phases, pid)
        timed += (_range(p.name, "phase", p.start, p.end, pid, _PHASES_TID, {"step": p.step})
                  for p in process.phases)  # fmt: skip
        timed += (_event(event, pid, tracks[track]) for event, track in placed)
        timed += _link_counters(process.events, pid)
        timed += _counters(process.samples, pid)
    if run.ranks:
        pid = len(processes) + 1
        names.append(_name("process_name", pid, 0, "machine"))
        own = {id(sample) for process in processes.values() for sample in process.samples}
        timed += _counters([s for s in run.samples if id(s) not in own], pid)
    return names + sorted(timed, key=lambda row: (row["ts"], -row.get("dur", 0.0)))


def _place(events: Iterable[Event]) -> Iterator[tuple[Event, str]]:
    """Yield each event with the name of its row.

    An event that begins within another one and ends after it goes to a further row for the same
    track: viewers drop ranges that overlap without nesting.
    """
    open_ends: dict[str, list[float]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        for number in itertools.count(1):
            track = event.track if number == 1 else f"{event.track}{_FURTHER}{number})"
            ends = open_ends[track]
            while ends and ends[-1] <= event.start:
                ends.pop()
            if not ends or event.end <= ends[-1]:
                ends.append(event.end)
                yield event, track
                break


def _number_tracks(names: Iterable[str]) -> dict[str, int]:
    """Assign a thread id to each track, which also is its position."""

    def rank(track: str) -> tuple[int, str]:
        own = track.partition(_FURTHER)[0]
        first = own in _FIRST_TRACKS
        return _FIRST_TRACKS.index(own) if first else len(_FIRST_TRACKS), track

    return {track: tid for tid, track in enumerate(sorted(names, key=rank), start=_FIRST_EVENT_TID)}


def _event(event: Event, pid: int, tid: int) -> TraceRow:
    args: dict[str, Any] = {
        "step": event.step,
        "phase": event.phase,
        "bytes": event.nbytes,
        "from": event.source,
        "to": event.target,
        "pinned": event.pinned,
        "where": event.where,
    }
    if event.nbytes and event.seconds > 0:
        args["GB/s"] = round(event.nbytes / event.seconds / 1e9, 3)
    return _range(event.name, event.kind, event.start, event.end, pid, tid, args)


def _steps(phases: Iterable[Phase], pid: int) -> Iterator[TraceRow]:
    spans: dict[int, tuple[float, float]] = {}
    for phase in phases:
        if phase.step is not None:
            start, end = spans.get(phase.step, (phase.start, phase.end))
            spans[phase.step] = (min(start, phase.start), max(end, phase.end))
    for step, (start, end) in sorted(spans.items()):
        yield _range(f"step {step}", "step", start, end, pid, _STEPS_TID, {})


# Counters.


def _counters(samples: Iterable[Sample], pid: int) -> Iterator[TraceRow]:
    before: dict[str, tuple[float, int, int]] = {}
    for sample in samples:
        for index, gpu in enumerate(sample.gpu):
            memory = {"allocated": gpu.allocated, "reserved": gpu.reserved, "used": gpu.used}
            yield from _counter(f"gpu {index} memory", sample.t, pid, memory)
            yield from _counter(f"gpu {index} PCIe B/s", sample.t, pid,
                                {"h2d": gpu.h2d, "d2h": gpu.d2h})  # fmt: skip
            yield from _counter(f"gpu {index} busy", sample.t, pid, {"share": gpu.utilisation})
        host = sample.host
        yield from _counter("host memory", sample.t, pid, {"rss": host.rss, "pinned": host.pinned})
        yield from _counter("host available", sample.t, pid, {"bytes": host.available})
        nodes = {f"node{node}": used for node, used in host.nodes.items()}
        yield from _counter("node memory", sample.t, pid, nodes)
        yield from _counter("tiers", sample.t, pid, dict(sample.tiers))
        if sample.cpu:
            busy = round(sum(sample.cpu), 3)
            yield from _counter("cores busy", sample.t, pid, {"cores": busy})
        yield from _disk_rates(sample, pid, before)


def _disk_rates(
    sample: Sample, pid: int, before: dict[str, tuple[float, int, int]]
) -> Iterator[TraceRow]:
    """Yield each disk's rates since its previous totals, which `before` keeps."""
    for disk, (read, written) in sample.disk.items():
        if disk in before and sample.t > before[disk][0]:
            then, read_then, written_then = before[disk]
            elapsed = sample.t - then
            rates = {
                "read": max(0.0, (read - read_then) / elapsed),
                "write": max(0.0, (written - written_then) / elapsed),
            }
            yield from _counter(f"disk {disk} B/s", sample.t, pid, rates)
        before[disk] = (sample.t, read, written)


def _link_counters(events: Iterable[Event], pid: int) -> Iterator[TraceRow]:
    """Yield the rate of each link, from its events: it changes where one starts or ends."""
    changes: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event.link is not None and event.nbytes and event.seconds > 0:
            rate = event.nbytes / event.seconds
            changes[event.link][event.start] += rate
            changes[event.link][event.end] -= rate
    for link, change_at in changes.items():
        rate = 0.0
        for t in sorted(change_at):
            rate += change_at[t]
            yield from _counter(f"{link} B/s", t, pid, {"rate": max(0.0, round(rate))})


# Rows of the trace format.


def _counter(name: str, t: float, pid: int, values: dict[str, Any]) -> Iterator[TraceRow]:
    known = {key: value for key, value in values.items() if value is not None}
    if known:
        yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(t), "args": known}


def _range(
    name: str, kind: str, start: float, end: float, pid: int, tid: int, args: dict[str, Any]
) -> TraceRow:
    known = {key: value for key, value in args.items() if value is not None}
    return {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "ts": _us(start),
            "dur": round(_us(end) - _us(start), 3), "args": known}  # fmt: skip


def _name(kind: str, pid: int, tid: int, name: str) -> TraceRow:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _order(pid: int, tid: int) -> TraceRow:
    return {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "ts": 0,
            "args": {"sort_index": tid}}  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
