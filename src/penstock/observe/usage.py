"""What the events say: who was busy when, what hid behind what, what was waited for. Room: show."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.observe.intervals import Interval, common, length, union, within, without
from penstock.observe.records import DRIVER, Event
from penstock.observe.steps import Step

GPU = "gpu"
SWEEP = "cpu sweep"

GPU_LINKS = ("h2d", "d2h")


def resource_of(event: Event) -> str:
    """What an event keeps busy: the GPU, a link, the CPU's sweep, or its own track."""
    if event.link:
        return link_of(event)
    # A copy within the GPU, and a sweep of what rests there, are the GPU's own work.
    within = event.source == event.target == GPU
    if event.kind in ("compute", "kernel") or event.track.startswith(GPU) or within:
        return GPU
    return SWEEP if event.kind == "sweep" else event.track


def is_node(resource: str) -> bool:
    """A memory node carries what copies and sweeps move: it is busy because they are."""
    return resource.startswith("node")


def link_of(event: Event) -> str:
    """A disk's two directions are two links: they have rates of their own."""
    link = event.link or ""
    if link.startswith("disk:") and event.kind in ("read", "write"):
        return link if link.endswith(f":{event.kind}") else f"{link}:{event.kind}"
    return link


@dataclass(frozen=True, slots=True)
class StepUse:
    """What went on in one step."""

    step: Step
    busy: Mapping[str, Sequence[Interval]]
    """When each resource had something under way, between the step's start and its end."""

    nbytes: Mapping[str, int]
    """What crossed each link for this step."""

    def seconds(self, resource: str) -> float:
        return length(self.busy.get(resource, ()))

    def hidden(self, resource: str) -> float:
        """Seconds in which the resource and the GPU both worked."""
        return length(common(self.busy.get(resource, ()), self.busy.get(GPU, ())))

    def copying(self) -> list[Interval]:
        """When bytes went to or from the GPU."""
        return union(span for link in GPU_LINKS for span in self.busy.get(link, ()))

    def idle(self, links: Sequence[str], phase: str) -> tuple[float, float]:
        """Seconds of a phase in which none of the links had a copy, and those of the phase."""
        whole = self.step.during(phase)
        used = union(span for link in links for span in self.busy.get(link, ()))
        return length(without(whole, used)), length(whole)

    def waits(self) -> dict[tuple[str, ...], list[Interval]]:
        """When the GPU did nothing, by what else was under way: () for nothing."""
        whole: list[Interval] = [(self.step.start, self.step.end)]
        parts: dict[tuple[str, ...], list[Interval]] = {}
        parts[()] = without(whole, self.busy.get(GPU, ()))
        for resource, spans in self.busy.items():
            if resource != GPU and not is_node(resource):
                parts = _split(parts, resource, spans)
        return parts


def _split(
    parts: dict[tuple[str, ...], list[Interval]], resource: str, spans: Sequence[Interval]
) -> dict[tuple[str, ...], list[Interval]]:
    found = {}
    for names, part in parts.items():
        for key, piece in (
            ((*names, resource), common(part, spans)),
            (names, without(part, spans)),
        ):
            if piece:
                found[key] = piece
    return found


def step_uses(steps: Sequence[Step], events: Sequence[Event]) -> tuple[StepUse, ...]:
    """Each step's share of the events. One that reaches into the next step is busy in both; its
    bytes are of the step it belongs to or, where it names none, of the one it begins in."""
    starts = [step.start for step in steps]
    place = {step.number: at for at, step in enumerate(steps)}
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
        owner = place.get(event.step, -1) if event.step is not None else begins_in
        if event.link and event.nbytes and owner >= 0:
            nbytes[owner][resource] += event.nbytes
    return tuple(
        StepUse(step, _clipped(held, step), dict(moved))
        for step, held, moved in zip(steps, spans, nbytes, strict=True)
    )


def _clipped(held: Mapping[str, list[Interval]], step: Step) -> dict[str, list[Interval]]:
    cut = {name: within(spans, step.start, step.end) for name, spans in sorted(held.items())}
    return {name: spans for name, spans in cut.items() if spans}


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
