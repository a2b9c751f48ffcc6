"""Derive the usage of resources from events: busy times, overlap, and waits of the GPU."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.observe.intervals import Interval, clip, difference, intersection, total_length, union
from penstock.observe.records import DRIVER, Event
from penstock.observe.series import GPU_LINKS
from penstock.observe.steps import Step

GPU = "gpu"
SWEEP = "cpu sweep"


def resource_of(event: Event) -> str:
    """Return what an event keeps busy: the GPU, a link, the CPU sweep, or its own track."""
    if event.link:
        return link_of(event)
    # A copy within the GPU, and an optimizer sweep on it, are the GPU's own work.
    within_gpu = event.source == event.target == GPU
    if event.kind in ("compute", "kernel") or event.track.startswith(GPU) or within_gpu:
        return GPU
    return SWEEP if event.kind == "sweep" else event.track


def is_node(resource: str) -> bool:
    """Whether a resource is a memory node. Copies and sweeps keep it busy, so it is never what the
    GPU waits for."""
    return resource.startswith("node")


def link_of(event: Event) -> str:
    """Return an event's link. The two directions of a disk are two links with separate rates."""
    link = event.link or ""
    if link.startswith("disk:") and event.kind in ("read", "write"):
        return link if link.endswith(f":{event.kind}") else f"{link}:{event.kind}"
    return link


@dataclass(frozen=True, slots=True)
class StepUsage:
    """Resource usage in one step."""

    step: Step
    busy: Mapping[str, Sequence[Interval]]
    """When each resource was busy between the step's start and end."""

    nbytes: Mapping[str, int]
    """Bytes that crossed each link for this step."""

    def seconds(self, resource: str) -> float:
        """Return how long a resource was busy."""
        return total_length(self.busy.get(resource, ()))

    def hidden(self, resource: str) -> float:
        """Return how long a resource and the GPU were both busy."""
        return total_length(intersection(self.busy.get(resource, ()), self.busy.get(GPU, ())))

    def copying(self) -> list[Interval]:
        """Return when copies to or from the GPU were running."""
        return union(span for link in GPU_LINKS for span in self.busy.get(link, ()))

    def idle(self, links: Sequence[str], phase: str) -> tuple[float, float]:
        """Return the seconds of a phase in which no link was busy, and the phase's seconds."""
        whole = self.step.during(phase)
        used = union(span for link in links for span in self.busy.get(link, ()))
        return total_length(difference(whole, used)), total_length(whole)

    def waits(self) -> dict[tuple[str, ...], list[Interval]]:
        """Return when the GPU was idle, by what else was busy at that time: () for nothing."""
        whole: list[Interval] = [(self.step.start, self.step.end)]
        parts: dict[tuple[str, ...], list[Interval]] = {}
        parts[()] = difference(whole, self.busy.get(GPU, ()))
        for resource, spans in self.busy.items():
            if resource != GPU and not is_node(resource):
                parts = _split(parts, resource, spans)
        return parts


def _split(
    parts: dict[tuple[str, ...], list[Interval]], resource: str, spans: Sequence[Interval]
) -> dict[tuple[str, ...], list[Interval]]:
    """Split each part into the time in which a resource was busy and the time in which it was
    not."""
    found = {}
    for names, part in parts.items():
        for key, intervals in (
            ((*names, resource), intersection(part, spans)),
            (names, difference(part, spans)),
        ):
            if intervals:
                found[key] = intervals
    return found


def step_usages(steps: Sequence[Step], events: Sequence[Event]) -> tuple[StepUsage, ...]:
    """Assign events to steps.

    An event that reaches into the next step keeps its resource busy in both. Its bytes count for
    the step it names or, if it names none, for the step in which it begins.
    """
    starts = [step.start for step in steps]
    index_of = {step.number: at for at, step in enumerate(steps)}
    spans: list[dict[str, list[Interval]]] = [defaultdict(list) for _ in steps]
    nbytes: list[dict[str, int]] = [defaultdict(int) for _ in steps]
    for event in events:
        if event.track.startswith(DRIVER) or not math.isfinite(event.start + event.end):
            continue
        resource = resource_of(event)
        first = bisect.bisect_right(starts, event.start) - 1
        for at in range(max(first, 0), len(steps)):
            if steps[at].start >= event.end:
                break
            spans[at][resource].append((event.start, event.end))
        begins_in = first if first >= 0 and event.start < steps[first].end else -1
        owner = index_of.get(event.step, -1) if event.step is not None else begins_in
        if event.link and event.nbytes and owner >= 0:
            nbytes[owner][resource] += event.nbytes
    return tuple(
        StepUsage(step, _clip_to_step(busy, step), dict(moved))
        for step, busy, moved in zip(steps, spans, nbytes, strict=True)
    )


def _clip_to_step(busy: Mapping[str, list[Interval]], step: Step) -> dict[str, list[Interval]]:
    clipped = {name: clip(spans, step.start, step.end) for name, spans in sorted(busy.items())}
    return {name: spans for name, spans in clipped.items() if spans}


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return math.fsum(values) / len(values)
