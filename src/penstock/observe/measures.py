"""Compute the figures of a run that its report, its findings and a comparison are based on.

Figures "per step" are means over all steps without the warm-up step and without steps that torch's
profiler made slower; figures from events are means over those steps whose events were kept. Exact
figures come from events. If there are no events, samples are used instead.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.observe.intervals import difference, total_length
from penstock.observe.records import RecordedRun
from penstock.observe.series import (
    GPU_LINKS,
    Peak,
    Series,
    Stat,
    find_peaks,
    load_series,
    memory_series,
    stats_by_phase,
    traffic_series,
)
from penstock.observe.steps import (
    Step,
    find_steps,
    phase_seconds,
    profiled_steps,
    steps_with_events,
    typical_step,
    without_warmup,
)
from penstock.observe.usage import GPU, StepUsage, is_node, mean, step_usages

MIN_BOTTLENECK_SHARE = 0.6
"""A resource that is busy for a smaller share of the step does not limit it; waiting does."""

MIN_DISK_RATE = 1e6
"""Bytes per second. Sampled disk traffic below this is the system's own logging."""


@dataclass(frozen=True, slots=True)
class LinkUsage:
    """Usage of one link, per step."""

    nbytes: float
    """Bytes per step."""

    busy: float | None
    """Seconds per step with a copy running; None if only samples are known."""

    hidden: float | None
    """Seconds of `busy` in which the GPU computed."""

    ceiling: float | None
    """Bytes per second that the link can carry."""

    rate: float
    """Bytes per second while busy, or over the whole step if only samples are known."""

    @property
    def exact(self) -> bool:
        """Whether the figures come from events."""
        return self.busy is not None


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The busiest resource of a step, and the second busiest."""

    resource: str | None
    """The busiest resource; None if nothing is known."""

    share: float
    """Share of the step in which it was busy."""

    runner_up: str | None = None
    second: float = 0.0
    """Share of the step in which the runner-up was busy."""

    exact: bool = True
    """Whether this comes from events, or from samples."""

    @property
    def limits_step(self) -> bool:
        """Whether it limits the step, or is only the busiest of many that wait for each other."""
        return self.resource is not None and self.share >= MIN_BOTTLENECK_SHARE


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """All figures of a run."""

    run: RecordedRun
    steps: tuple[Step, ...]
    shown: Step | None
    """The step that plots show: a typical one, with events if possible."""

    profiled_steps: frozenset[int]
    """Numbers of the steps that torch's profiler made slower. They count only for what nothing
    else shows: figures from events."""

    recording_seconds: float
    """Seconds per step that the recording adds to the steps in `usages`."""

    seconds: float | None
    """Median step time."""

    phases: Mapping[str, float]
    """Seconds per step of each phase."""

    usages: tuple[StepUsage, ...]
    """Steps whose events were kept, without the warm-up step."""

    busy: Mapping[str, float]
    """Share of a step in which each resource was busy, from events."""

    waits: Mapping[tuple[str, ...], float]
    """Seconds per step in which the GPU was idle, by what else was busy at that time."""

    links: Mapping[str, LinkUsage]
    hidden: float | None
    """Share of the copy time to and from the GPU that was hidden behind compute."""

    exposed: float | None
    """Seconds per step of copies to and from the GPU that were not hidden."""

    peaks: tuple[Peak, ...]
    memory: Mapping[str, Series]
    traffic: Mapping[str, Series]
    load: Mapping[str, Series]
    bottleneck: Bottleneck

    @property
    def own_steps(self) -> tuple[Step, ...]:
        """Steps that nothing but the program itself made long: no warm-up, no profiler."""
        return _without_profiled(self.steps, self.profiled_steps)

    @property
    def floor(self) -> float | None:
        """Busy seconds of the busiest resource in the median step: a lower bound of the step time
        for any order of the same work."""
        if self.seconds is None or not self.usages or not self.bottleneck.exact:
            return None
        return self.bottleneck.share * self.seconds

    @property
    def pcie_nbytes(self) -> float:
        """Bytes per step to and from the GPU."""
        return sum(self.links[link].nbytes for link in GPU_LINKS if link in self.links)

    def carried(self, link: str) -> float | None:
        """Return the bytes per step over a link as plans name it, or None without events.

        A plan counts both directions of a disk as one link.
        """
        parts = [f"{link}:read", f"{link}:write"] if link.startswith("disk:") else [link]
        usages = [self.links[part] for part in parts if part in self.links]
        exact = [usage.nbytes for usage in usages if usage.exact]
        return sum(exact) if exact else None

    def stats(self, series: Series) -> dict[str, Stat]:
        """Return the statistics of a series in each phase, without the warm-up step."""
        segments = [s for step in without_warmup(self.steps) for s in step.segments]
        return stats_by_phase(series.points, segments, series.host_phases)


def measure(run: RecordedRun) -> Measures:
    """Compute all figures of a run."""
    run = _without_invalid_times(run)
    steps = find_steps(run)
    profiled = profiled_steps(run)
    own = _without_profiled(steps, profiled)
    seconds = statistics.median(step.seconds for step in own) if own else None
    kept = steps_with_events(steps, run.events)
    usages = step_usages(without_warmup(kept), run.events)
    memory, load, traffic = memory_series(run), load_series(run), traffic_series(run)
    busy = _busy_shares(usages)
    links = _link_usages(run, usages, own, traffic)
    copying = sum(total_length(usage.copying()) for usage in usages)
    exposed = sum(_exposed(usage) for usage in usages)
    has_compute = GPU in busy
    return Measures(
        run=run,
        steps=steps,
        shown=typical_step(kept) or typical_step(steps),
        profiled_steps=profiled,
        recording_seconds=_recording_seconds(usages, own),
        seconds=seconds,
        phases=phase_seconds(own),
        usages=usages,
        busy=busy,
        waits=_mean_waits(usages) if has_compute else {},
        links=links,
        hidden=1 - exposed / copying if copying and has_compute else None,
        exposed=exposed / len(usages) if copying and has_compute else None,
        peaks=find_peaks(run, memory, steps),
        memory=memory,
        traffic=traffic,
        load=load,
        bottleneck=_find_bottleneck(busy, load, links, own),
    )


def _without_profiled(steps: tuple[Step, ...], profiled: frozenset[int]) -> tuple[Step, ...]:
    """Leave out the warm-up step and, unless all are, the steps that torch's profiler recorded."""
    steady = without_warmup(steps)
    return tuple(step for step in steady if step.number not in profiled) or steady


def _without_invalid_times(run: RecordedRun) -> RecordedRun:
    """Leave out records with impossible times: a file can contain NaN, or an end before a start."""
    samples = tuple(s for s in run.samples if math.isfinite(s.t))
    phases = tuple(p for p in run.phases if math.isfinite(p.seconds) and p.end >= p.start)
    events = tuple(e for e in run.events if math.isfinite(e.seconds) and e.end >= e.start)
    kept = len(samples) + len(phases) + len(events)
    dropped = len(run.samples) + len(run.phases) + len(run.events) - kept
    if not dropped:
        return run
    notes = (*run.notes, f"{dropped} records have invalid times and were left out")
    return replace(run, samples=samples, phases=phases, events=events, notes=notes)


def _recording_seconds(usages: tuple[StepUsage, ...], own: tuple[Step, ...]) -> float:
    """Return how much longer the steps with events are than steps without a profiler."""
    numbers = {step.number for step in own}
    if not usages or any(usage.step.number in numbers for usage in usages):
        return 0.0
    typical = statistics.median(step.seconds for step in own)
    return max(0.0, mean([usage.step.seconds for usage in usages]) - typical)


def _exposed(usage: StepUsage) -> float:
    return total_length(difference(usage.copying(), usage.busy.get(GPU, ())))


def _busy_shares(usages: tuple[StepUsage, ...]) -> dict[str, float]:
    """Return the share of step time in which each resource was busy, largest first."""
    names = sorted({name for usage in usages for name in usage.busy})
    whole = sum(usage.step.seconds for usage in usages)
    shares = {name: sum(usage.seconds(name) for usage in usages) / whole for name in names}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _mean_waits(usages: tuple[StepUsage, ...]) -> dict[tuple[str, ...], float]:
    """Return the mean waits per step, longest first."""
    total: dict[tuple[str, ...], float] = {}
    for usage in usages:
        for names, spans in usage.waits().items():
            total[names] = total.get(names, 0.0) + total_length(spans) / len(usages)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _link_usages(
    run: RecordedRun,
    usages: tuple[StepUsage, ...],
    steps: tuple[Step, ...],
    traffic: Mapping[str, Series],
) -> dict[str, LinkUsage]:
    """Return the usage of each link: from events, or from samples if there are none for it."""
    ceilings = run.observation.ceilings
    exact = sorted({link for usage in usages for link in usage.nbytes}, key=_link_order)
    found = {}
    for link in exact:
        nbytes = mean([usage.nbytes.get(link, 0) for usage in usages])
        busy = mean([usage.seconds(link) for usage in usages])
        hidden = mean([usage.hidden(link) for usage in usages])
        rate = nbytes / busy if busy else 0.0
        found[link] = LinkUsage(nbytes, busy, hidden, ceilings.get(link), rate)
    for link in sorted(traffic, key=_link_order):
        inside = [
            value for step in steps for _, value in traffic[link].between(step.start, step.end)
        ]
        rate = mean(inside) if inside else 0.0
        if link not in found and rate > (MIN_DISK_RATE if link.startswith("disk:") else 0.0):
            seconds = mean([step.seconds for step in steps])
            found[link] = LinkUsage(rate * seconds, None, None, ceilings.get(link), rate)
    return found


def _link_order(link: str) -> tuple[int, str]:
    return (GPU_LINKS.index(link) if link in GPU_LINKS else len(GPU_LINKS), link)


def _find_bottleneck(
    busy: Mapping[str, float],
    load: Mapping[str, Series],
    links: Mapping[str, LinkUsage],
    steps: tuple[Step, ...],
) -> Bottleneck:
    if busy:
        resources = {name: share for name, share in busy.items() if not is_node(name)}
        return _busiest(resources, exact=True)
    shares = {}
    for key, series in load.items():
        inside = [v for step in steps for _, v in series.between(step.start, step.end)]
        if inside:
            shares[GPU if key == "gpu0.utilisation" else key.split(".")[0]] = mean(inside)
    for link, usage in links.items():
        if usage.ceiling:
            shares[link] = min(1.0, usage.rate / usage.ceiling)
    return _busiest(shares, exact=False)


def _busiest(shares: Mapping[str, float], *, exact: bool) -> Bottleneck:
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    if not ranked:
        return Bottleneck(None, 0.0, exact=exact)
    second: tuple[str | None, float] = ranked[1] if len(ranked) > 1 else (None, 0.0)
    return Bottleneck(ranked[0][0], ranked[0][1], second[0], second[1], exact)
