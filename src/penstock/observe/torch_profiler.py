"""Exact steps: run torch's profiler for selected steps and read its trace.

The trace has Kineto's Chrome format: `gpu_memcpy` events with `bytes` are joined by `correlation`
to the `cuda_runtime` call that issued them, and that call lies within `cpu_op` and
`user_annotation` ranges, which name its cause.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.observe.phase_tracker import PendingPhase
from penstock.observe.recorder import Recorder
from penstock.observe.records import DRIVER, OBSERVING, Event, Phase

TRACE = ".exact.json"
"""Temporary file for the profiler's trace, in the run's directory."""

MARK = "penstock.observe"
"""Name of the ranges that relate the profiler's clock to ours."""

MARKS = 6
"""Number of such ranges. The first may take a millisecond, because torch loads the operator. Later
ones take some microseconds."""

GAP = 20e-6
"""Seconds between two kernels up to which they are one event."""

_CAUSES = ("cpu_op", "user_annotation")
_KINDS = {"HtoD": ("h2d", "host", "gpu"), "DtoH": ("d2h", "gpu", "host")}
_WITHIN_GPU = ("d2d", "gpu", "gpu")

Span = tuple[float, float]
"""Two times of the host: just before and just after something happened."""

PhaseAt = Callable[[float], str | None]
"""Returns the phase at a time of the host."""


class ExactSteps:
    """Profiles whole steps with torch's profiler.

    The thread that trains also reads the trace, since reading it elsewhere would hold up training
    anyway. The time it takes is recorded as a phase of its own that belongs to no step.
    """

    def __init__(self, steps: Collection[int], recorder: Recorder) -> None:
        self._steps, self._recorder = set(steps), recorder
        self._profiler: Any = None
        self._step = 0
        self._marks: list[Span] = []
        self._phases: list[PendingPhase] = []

    def begin(self, step: int) -> None:
        """End the previous step, and start the profiler if this step was requested."""
        began = time.perf_counter()
        if not self._end() and step not in self._steps:
            return
        if step in self._steps:
            try:
                self._start(step)
            except Exception as failed:  # for example, the program already uses the profiler
                self._profiler = None
                self._recorder.note(f"step {step} was not profiled: {failed}")
        self._record_phase(began)

    def add_phase(self, phase: PendingPhase) -> None:
        """Remember a phase of the step that is profiled."""
        if self._profiler is not None:
            self._phases.append(phase)

    def end(self) -> None:
        """Stop profiling, if a step is being profiled."""
        began = time.perf_counter()
        if self._end():
            self._record_phase(began)

    def _end(self) -> bool:
        """Stop the profiler, which waits for the GPU. Return whether it was running."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return False
        try:
            profiler.stop()
            events = self._read(profiler)
        except Exception as failed:
            self._recorder.note(f"step {self._step} was not profiled: {failed}")
            return True
        recorder = self._recorder
        recorder.put(lambda: recorder.write_events(events))
        return True

    def _record_phase(self, began: float) -> None:
        recorder, ended = self._recorder, time.perf_counter()
        phase = Phase(OBSERVING, None, began - recorder.origin, ended - recorder.origin)
        recorder.put(lambda: recorder.folder.write(phase))

    def _start(self, step: int) -> None:
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler: Any = torch.profiler.profile(activities=activities, acc_events=True)
        profiler.start()
        self._profiler, self._step, self._phases = profiler, step, []
        self._marks = []
        for _ in range(MARKS):
            before = time.perf_counter()
            with torch.profiler.record_function(MARK):
                pass
            self._marks.append((before, time.perf_counter()))

    def _read(self, profiler: Any) -> list[Event]:
        recorder, path = self._recorder, self._recorder.folder.path / TRACE
        try:
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        finally:
            path.unlink(missing_ok=True)
        origin = recorder.origin
        marks = [(before - origin, after - origin) for before, after in self._marks]
        events = events_of(trace, marks, self._step, self._phase_at(self._phases))
        if self._step != recorder.engine_step:
            return events
        # A Penstock engine reports its copies itself. The driver's view gets separate tracks and
        # no link, so that no byte is counted twice.
        return [replace(event, track=DRIVER + event.track, link=None) for event in events]

    def _phase_at(self, phases: list[PendingPhase]) -> PhaseAt:
        """Look phases up by the host's clock: a copy belongs to the phase that issued it."""
        origin = self._recorder.origin
        spans = [(p.start.host - origin, p.end.host - origin, p.name) for p in phases]

        def phase_at(at: float) -> str | None:
            return next((name for start, end, name in spans if start <= at < end), None)

        return phase_at


# Reading the trace.


@dataclass(frozen=True, slots=True)
class Launch:
    """When the host issued a copy or kernel, and which operator or range caused it."""

    at: float
    cause: str | None


def events_of(
    trace: Mapping[str, Any], marks: Sequence[Span], step: int, phase_at: PhaseAt
) -> list[Event]:
    """Convert a trace: each copy is an event, and kernels without a gap are one event.

    `marks` are the times around each MARK range; the events' times are by the same clock. Raises
    ValueError if the trace lacks such a range.
    """
    listed = [e for e in trace.get("traceEvents", ()) if e.get("ph") == "X"]
    shift = _clock_shift(listed, marks)
    launches = _launches(listed, shift)
    copies = [_copy(e, shift, step, launches, phase_at) for e in _of_kind(listed, "gpu_memcpy")]
    return sorted(copies + _kernels(listed, shift, step, launches, phase_at), key=_by_start)


def _clock_shift(listed: Iterable[Mapping[str, Any]], marks: Sequence[Span]) -> float:
    """Return what to add to the profiler's seconds to get ours.

    A copy belongs to the phase in which it was issued, often some ten microseconds after the phase
    began, so a shift that is wrong by more than that loses the copy. Each mark lies within its two
    times, which bounds the shift from both sides. The middle of the tightest bounds is within a few
    microseconds.
    """
    found = [e for e in _of_kind(listed, "user_annotation") if e.get("name") == MARK]
    if not marks or len(found) != len(marks):
        raise ValueError(
            f"the profiler's trace has {len(found)} of the {len(marks)} ranges {MARK!r} that "
            f"relate its clock to the host's"
        )
    found.sort(key=lambda e: float(e["ts"]))
    spans = [_span(mark, 0.0) for mark in found]
    least = max(before - start for (before, _), (start, _) in zip(marks, spans, strict=True))
    most = min(after - end for (_, after), (_, end) in zip(marks, spans, strict=True))
    return (least + most) / 2


def _by_start(event: Event) -> tuple[float, float]:
    return event.start, event.end


def _of_kind(listed: Iterable[Mapping[str, Any]], *kinds: str) -> list[Mapping[str, Any]]:
    return [event for event in listed if event.get("cat") in kinds]


def _copy(
    event: Mapping[str, Any], shift: float, step: int, launches: Mapping[int, Launch],
    phase_at: PhaseAt,
) -> Event:  # fmt: skip
    name, args = str(event["name"]), event.get("args", {})
    direction = re.search(r"Memcpy (\w+)", name)
    link, source, target = _KINDS.get(direction[1] if direction else "", _WITHIN_GPU)
    pinned = None if link == "d2d" else "Pinned" in name
    start, end = _span(event, shift)
    launch = launches.get(args.get("correlation", -1), Launch(start, None))
    return Event(
        track=link,
        kind="copy",
        name=name,
        start=start,
        end=end,
        step=step,
        phase=phase_at(launch.at),
        link=None if link == "d2d" else link,
        nbytes=int(args["bytes"]) if "bytes" in args else None,
        source=source,
        target=target,
        pinned=pinned,
        where=launch.cause,
    )


def _span(event: Mapping[str, Any], shift: float) -> Span:
    """Return an event's start and end in seconds by our clock."""
    start = event["ts"] / 1e6 + shift
    return start, start + event.get("dur", 0) / 1e6


def _kernels(
    listed: Sequence[Mapping[str, Any]], shift: float, step: int, launches: Mapping[int, Launch],
    phase_at: PhaseAt,
) -> list[Event]:  # fmt: skip
    """Join kernels that follow without a gap, named after the kernel that took the most time."""
    found: list[Event] = []
    spent: dict[str, float] = defaultdict(float)
    start = end = 0.0
    phase: str | None = None

    def close() -> None:
        if spent:
            longest = max(spent, key=lambda name: spent[name])
            found.append(Event("gpu", "kernel", longest, start, end, step, phase))
            spent.clear()

    for kernel in sorted(_of_kind(listed, "kernel", "gpu_memset"), key=lambda e: float(e["ts"])):
        begins, ends = _span(kernel, shift)
        launch = launches.get(kernel.get("args", {}).get("correlation", -1), Launch(begins, None))
        now = phase_at(launch.at)
        if spent and (begins - end > GAP or now != phase):
            close()
        if not spent:
            start, end, phase = begins, ends, now
        spent[str(kernel["name"])] += ends - begins
        end = max(end, ends)
    close()
    return found


def _launches(listed: Sequence[Mapping[str, Any]], shift: float) -> dict[int, Launch]:
    """Find, by correlation, when the host issued work and the outermost range it did so in."""
    by_thread: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for event in listed:
        if event.get("cat") in (*_CAUSES, "cuda_runtime", "cuda_driver"):
            by_thread[event.get("tid")].append(event)
    found: dict[int, Launch] = {}
    for events in by_thread.values():
        cause, until = None, float("-inf")
        for event in sorted(events, key=lambda e: (float(e["ts"]), -float(e.get("dur", 0)))):
            ts = float(event["ts"])
            if event["cat"] in _CAUSES:
                if ts >= until and not _spans_step(str(event["name"])):
                    cause, until = str(event["name"]), ts + float(event.get("dur", 0))
            elif "correlation" in event.get("args", {}):
                within = cause if ts < until else None
                found[int(event["args"]["correlation"])] = Launch(ts / 1e6 + shift, within)
    return found


def _spans_step(name: str) -> bool:
    """Whether a range contains a whole step, and so is not the cause of anything in it."""
    return name == MARK or name.startswith("ProfilerStep")
