"""Reads torch's profiler trace: copies with their bytes and causes, kernels summed. Room: show.

The form is Kineto's Chrome trace: `gpu_memcpy` events with `bytes`, joined by `correlation` to the
`cuda_runtime` call that issued them, which lies within ranges of `cpu_op` and `user_annotation`.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.observe.phase_tracker import Stretch
from penstock.observe.recorder import Recorder
from penstock.observe.records import DRIVER, OBSERVING, Event, Phase

MARK = "penstock.observe"
"""The range by which the profiler's clock is set against ours."""

GAP = 20e-6
"""Seconds between two kernels that still count as one stretch of work."""

_CAUSES = ("cpu_op", "user_annotation")
_KINDS = {"HtoD": ("h2d", "host", "gpu"), "DtoH": ("d2h", "gpu", "host")}
_WITHIN = ("d2d", "gpu", "gpu")

PhaseAt = Callable[[float], str | None]


@dataclass(frozen=True, slots=True)
class Launch:
    """When and by what something on the GPU was asked for."""

    at: float
    cause: str | None


def events_of(trace: Mapping[str, Any], marked: float, step: int, phase_at: PhaseAt) -> list[Event]:
    """Copies one by one and stretches of kernels; times by the clock that `marked` was read from.

    Raises ValueError where the trace has no mark of ours.
    """
    listed = [e for e in trace.get("traceEvents", ()) if e.get("ph") == "X"]
    mark = next((e for e in listed if e.get("name") == MARK), None)
    if mark is None:
        raise ValueError("the profiler's trace lacks the range that sets its clock")
    shift = marked - mark["ts"] / 1e6
    launches = _launches(listed, shift)
    copies = [_copy(e, shift, step, launches, phase_at) for e in _of(listed, "gpu_memcpy")]
    return sorted(copies + _kernels(listed, shift, step, launches, phase_at), key=_by_start)


def _by_start(event: Event) -> tuple[float, float]:
    return event.start, event.end


def _of(listed: Iterable[Mapping[str, Any]], *kinds: str) -> list[Mapping[str, Any]]:
    return [event for event in listed if event.get("cat") in kinds]


def _copy(
    event: Mapping[str, Any], shift: float, step: int, launches: Mapping[int, Launch],
    phase_at: PhaseAt,
) -> Event:  # fmt: skip
    name, args = str(event["name"]), event.get("args", {})
    found = re.search(r"Memcpy (\w+)", name)
    link, source, target = _KINDS.get(found[1] if found else "", _WITHIN)
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


def _span(event: Mapping[str, Any], shift: float) -> tuple[float, float]:
    start = event["ts"] / 1e6 + shift
    return start, start + event.get("dur", 0) / 1e6


# Kernels.


def _kernels(
    listed: Sequence[Mapping[str, Any]], shift: float, step: int, launches: Mapping[int, Launch],
    phase_at: PhaseAt,
) -> list[Event]:  # fmt: skip
    """Each stretch without a gap is one event, named after the kernel that took most of it."""
    found: list[Event] = []
    spent: dict[str, float] = defaultdict(float)
    start = end = 0.0
    phase: str | None = None

    def close() -> None:
        if spent:
            longest = max(spent, key=lambda name: spent[name])
            found.append(Event("gpu", "kernel", longest, start, end, step, phase))
            spent.clear()

    for kernel in sorted(_of(listed, "kernel", "gpu_memset"), key=lambda e: float(e["ts"])):
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


# Causes.


def _launches(listed: Sequence[Mapping[str, Any]], shift: float) -> dict[int, Launch]:
    """By correlation: when the host asked for it, and the outermost range it did so in."""
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
                if ts >= until and not _is_frame(str(event["name"])):
                    cause, until = str(event["name"]), ts + float(event.get("dur", 0))
            elif "correlation" in event.get("args", {}):
                within = cause if ts < until else None
                found[int(event["args"]["correlation"])] = Launch(ts / 1e6 + shift, within)
    return found


def _is_frame(name: str) -> bool:
    """Ranges that hold a whole step and cause nothing."""
    return name == MARK or name.startswith("ProfilerStep")


# --------
# Exact steps: torch's profiler for the steps that were asked for. Room: show.

TRACE = ".exact.json"


class ExactSteps:
    """Profiles whole steps, in the thread that trains. That thread also reads what was found, since
    reading would stop it anyway; the time it takes is told as a phase and is no step's."""

    def __init__(self, steps: Collection[int], recorder: Recorder) -> None:
        self._steps, self._recorder = set(steps), recorder
        self._profiler: Any = None
        self._step = 0
        self._marked = 0.0
        self._stretches: list[Stretch] = []

    def begin(self, step: int) -> None:
        """A step begins: the one before has ended."""
        began = time.perf_counter()
        if not self._end() and step not in self._steps:
            return
        if step in self._steps:
            try:
                self._start(step)
            except Exception as failed:  # somebody else profiles
                self._profiler = None
                self._recorder.note(f"step {step} was not profiled: {failed}")
        self._tell_phase(began)

    def heard(self, stretch: Stretch) -> None:
        if self._profiler is not None:
            self._stretches.append(stretch)

    def end(self) -> None:
        """Stop, where a step is being profiled."""
        began = time.perf_counter()
        if self._end():
            self._tell_phase(began)

    def _end(self) -> bool:
        """Whether a step was being profiled. The GPU finishes what it has."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return False
        try:
            profiler.stop()
            found = self._read(profiler)
        except Exception as failed:
            self._recorder.note(f"step {self._step} was not profiled: {failed}")
            return True
        recorder = self._recorder
        recorder.put(lambda: recorder.write_events(found))
        return True

    def _tell_phase(self, began: float) -> None:
        recorder, ended = self._recorder, time.perf_counter()
        told = Phase(OBSERVING, None, began - recorder.origin, ended - recorder.origin)
        recorder.put(lambda: recorder.folder.write(told))

    def _start(self, step: int) -> None:
        import torch

        wanted = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            wanted.append(torch.profiler.ProfilerActivity.CUDA)
        profiler: Any = torch.profiler.profile(activities=wanted, acc_events=True)
        profiler.start()
        self._profiler, self._step, self._stretches = profiler, step, []
        self._marked = time.perf_counter()
        with torch.profiler.record_function(MARK):
            pass

    def _read(self, profiler: Any) -> list[Event]:
        """An engine that tells its own copies has them told once: the driver's are beside them."""
        recorder, path = self._recorder, self._recorder.folder.path / TRACE
        try:
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        finally:
            path.unlink(missing_ok=True)
        marked = self._marked - recorder.origin
        found = events_of(trace, marked, self._step, self._phase_at(self._stretches))
        if self._step != recorder.engine_step:
            return found
        return [replace(event, track=DRIVER + event.track, link=None) for event in found]

    def _phase_at(self, stretches: list[Stretch]) -> Callable[[float], str | None]:
        """By the host's clock: a copy belongs to the phase that asked for it."""
        origin = self._recorder.origin
        spans = [(s.start.host - origin, s.end.host - origin, s.name) for s in stretches]

        def phase_at(at: float) -> str | None:
            return next((name for start, end, name in spans if start <= at < end), None)

        return phase_at
