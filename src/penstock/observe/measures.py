"""The figures of a run that its page, its findings and a comparison are made from. Room: show.

Figures "a step" are means over the steps that have settled: for what comes from events, over those
whose events were kept. Exact figures come from events; where there are none, samples stand in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.observe.intervals import length, without
from penstock.observe.peaks import Peak, peaks_of
from penstock.observe.records import RecordedRun
from penstock.observe.series import Series, Stat, by_phase, load_series, memory_series
from penstock.observe.series import traffic_series as sampled_traffic
from penstock.observe.steps import Step, phase_seconds, recorded, settled, steps_of, typical
from penstock.observe.usage import GPU, GPU_LINKS, StepUse, is_node, mean, step_uses

BUSY = 0.6
"""A resource that works for less of a step than this does not bound it: waiting does."""


FAINT = 1e6
"""Bytes a second. What samples see of a disk below that is the system's own logging."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """One link, per step."""

    nbytes: float
    """Bytes a step."""

    busy: float | None
    """Seconds a step with a copy under way; None where only samples tell."""

    hidden: float | None
    """Of them, seconds in which the GPU computed."""

    ceiling: float | None
    """Bytes a second that the link can carry."""

    rate: float
    """Bytes a second: while busy, or over the step where only samples tell."""

    @property
    def exact(self) -> bool:
        return self.busy is not None


@dataclass(frozen=True, slots=True)
class Bound:
    """What a step's time is made of, most of all."""

    resource: str | None
    """The one that was busiest; None where nothing tells."""

    share: float
    """The part of the step in which it worked."""

    runner_up: str | None = None
    second: float = 0.0
    exact: bool = True
    """Whether events tell, or samples."""

    @property
    def holds(self) -> bool:
        """Whether it binds the step, or is only the busiest of many that wait for each other."""
        return self.resource is not None and self.share >= BUSY


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """All figures of a run."""

    run: RecordedRun
    steps: tuple[Step, ...]
    shown: Step | None
    """The step that plots show: one whose time is typical, with events where there are any."""

    seconds: float | None
    """A step's time: the median."""

    phases: Mapping[str, float]
    """Seconds a step."""

    uses: tuple[StepUse, ...]
    """The settled steps whose events were kept."""

    busy: Mapping[str, float]
    """Per resource, the share of a step in which it worked, by events."""

    waits: Mapping[tuple[str, ...], float]
    """Seconds a step in which the GPU did nothing, by what else was under way."""

    links: Mapping[str, LinkUse]
    hidden: float | None
    """The share of the time of copies to and from the GPU that hid behind compute."""

    exposed: float | None
    """Seconds a step of such copies that did not."""

    peaks: tuple[Peak, ...]
    memory: Mapping[str, Series]
    traffic: Mapping[str, Series]
    load: Mapping[str, Series]
    bound: Bound

    @property
    def floor(self) -> float | None:
        """Seconds of the busiest resource in the median step: no order of the same work makes one
        shorter."""
        if self.seconds is None or not self.uses or not self.bound.exact:
            return None
        return self.bound.share * self.seconds

    @property
    def pcie_nbytes(self) -> float:
        """Bytes a step to and from the GPU."""
        return sum(self.links[link].nbytes for link in GPU_LINKS if link in self.links)

    def carried(self, link: str) -> float | None:
        """Bytes a step over a link as plans name it: a disk's two directions together. None where
        events do not tell."""
        parts = [f"{link}:read", f"{link}:write"] if link.startswith("disk:") else [link]
        told = [self.links[part].nbytes for part in parts if part in self.links
                and self.links[part].exact]  # fmt: skip
        return sum(told) if told else None

    def stats(self, series: Series) -> dict[str, Stat]:
        """A quantity in each phase of the settled steps."""
        segments = [s for step in settled(self.steps) for s in step.segments]
        return by_phase(series.points, segments, series.told)


def measure(run: RecordedRun) -> Measures:
    """All figures. Pure: the same run gives the same ones."""
    run = _timed(run)
    steps = steps_of(run)
    steady = settled(steps)
    kept = recorded(steps, run.events)
    uses = step_uses(settled(kept), run.events)
    memory, load, traffic = memory_series(run), load_series(run), sampled_traffic(run)
    busy = _busy(uses)
    links = _links(run, uses, steady, traffic)
    copying = sum(length(use.copying()) for use in uses)
    exposed = sum(_exposed(use) for use in uses)
    has_compute = GPU in busy
    return Measures(
        run=run,
        steps=steps,
        shown=typical(kept) or typical(steps),
        seconds=statistics.median(step.seconds for step in steady) if steady else None,
        phases=phase_seconds(steady),
        uses=uses,
        busy=busy,
        waits=_waits(uses) if has_compute else {},
        links=links,
        hidden=1 - exposed / copying if copying and has_compute else None,
        exposed=exposed / len(uses) if copying and has_compute else None,
        peaks=peaks_of(run, memory, steps),
        memory=memory,
        traffic=traffic,
        load=load,
        bound=_bound(busy, load, links, steady),
    )


def _timed(run: RecordedRun) -> RecordedRun:
    """Without records whose times are none: a file may say NaN, or an end before its start."""
    samples = tuple(s for s in run.samples if math.isfinite(s.t))
    phases = tuple(p for p in run.phases if math.isfinite(p.seconds) and p.end >= p.start)
    events = tuple(e for e in run.events if math.isfinite(e.seconds) and e.end >= e.start)
    kept = len(samples) + len(phases) + len(events)
    lost = len(run.samples) + len(run.phases) + len(run.events) - kept
    if not lost:
        return run
    notes = (*run.notes, f"{lost} records have no time that can be, and were left out")
    return replace(run, samples=samples, phases=phases, events=events, notes=notes)


def _exposed(use: StepUse) -> float:
    return length(without(use.copying(), use.busy.get(GPU, ())))


def _busy(uses: tuple[StepUse, ...]) -> dict[str, float]:
    """Largest first."""
    names = sorted({name for use in uses for name in use.busy})
    whole = sum(use.step.seconds for use in uses)
    shares = {name: sum(use.seconds(name) for use in uses) / whole for name in names}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _waits(uses: tuple[StepUse, ...]) -> dict[tuple[str, ...], float]:
    """Longest first."""
    total: dict[tuple[str, ...], float] = {}
    for use in uses:
        for names, spans in use.waits().items():
            total[names] = total.get(names, 0.0) + length(spans) / len(uses)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _links(
    run: RecordedRun,
    uses: tuple[StepUse, ...],
    steps: tuple[Step, ...],
    traffic: Mapping[str, Series],
) -> dict[str, LinkUse]:
    ceilings = run.observation.ceilings
    exact = sorted({link for use in uses for link in use.nbytes}, key=_order)
    found = {}
    for link in exact:
        nbytes = mean([use.nbytes.get(link, 0) for use in uses])
        busy = mean([use.seconds(link) for use in uses])
        hidden = mean([use.hidden(link) for use in uses])
        rate = nbytes / busy if busy else 0.0
        found[link] = LinkUse(nbytes, busy, hidden, ceilings.get(link), rate)
    for link in sorted(traffic, key=_order):
        inside = [
            value for step in steps for _, value in traffic[link].between(step.start, step.end)
        ]
        rate = mean(inside) if inside else 0.0
        if link not in found and rate > (FAINT if link.startswith("disk:") else 0.0):
            seconds = mean([step.seconds for step in steps])
            found[link] = LinkUse(rate * seconds, None, None, ceilings.get(link), rate)
    return found


def _order(link: str) -> tuple[int, str]:
    return (GPU_LINKS.index(link) if link in GPU_LINKS else len(GPU_LINKS), link)


def _bound(
    busy: Mapping[str, float],
    load: Mapping[str, Series],
    links: Mapping[str, LinkUse],
    steps: tuple[Step, ...],
) -> Bound:
    if busy:
        workers = {name: share for name, share in busy.items() if not is_node(name)}
        return _first_two(workers, exact=True)
    shares = {}
    for key, series in load.items():
        inside = [v for step in steps for _, v in series.between(step.start, step.end)]
        if inside:
            shares[GPU if key == "gpu0.utilisation" else key.split(".")[0]] = mean(inside)
    for link, use in links.items():
        if use.ceiling:
            shares[link] = min(1.0, use.rate / use.ceiling)
    return _first_two(shares, exact=False)


def _first_two(shares: Mapping[str, float], *, exact: bool) -> Bound:
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    if not ranked:
        return Bound(None, 0.0, exact=exact)
    second: tuple[str | None, float] = ranked[1] if len(ranked) > 1 else (None, 0.0)
    return Bound(ranked[0][0], ranked[0][1], second[0], second[1], exact)
