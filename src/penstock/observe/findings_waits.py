"""What the GPU waited for, and which copies it did not hide. Room: show."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from penstock.observe.findings import IDLE, WORTH_SAYING, Finder, Finding
from penstock.observe.intervals import common, length, union, within
from penstock.observe.measures import Measures
from penstock.observe.steps import UPDATE, settled
from penstock.observe.usage import GPU_LINKS, mean
from penstock.observe.words import list_of, percent, resource_name, seconds_text, tidy

INSIDE = 0.8
"""Of the stretch that a figure of the cores is of, which may be longer than a phase."""

MANY_CORES = 0.25
FEW_CORES = 2.0
PART = 0.2
"""Of a wait: a phase with less of it is not named."""


def waiting(m: Measures) -> Iterator[Finding]:
    """The GPU does nothing while something else is under way."""
    if m.seconds is None:
        return
    gpu = "GPU" if m.run.observation.hardware.gpus else "Compute"
    for names, seconds in m.waits.items():
        if seconds < WORTH_SAYING * m.seconds:
            continue
        said = f"{gpu} waited {seconds_text(seconds)} a step for "
        if names:
            what = list_of([resource_name(name, m) for name in names])
            advice = "Only that was under way then." if len(names) == 1 else "All were under way."
            yield Finding("waiting", "warn", said + what, advice, seconds)
        else:
            yield _not_recorded(m, said, seconds)


def _not_recorded(m: Measures, said: str, seconds: float) -> Finding:
    """In which phase, and what the cores did: most often that tells what it was."""
    said += "something that was not recorded"
    advice = "The program itself, loading of data, or a synchronisation."
    named = [(name, part) for name, part in unseen(m).items() if part >= PART * seconds]
    if named:
        parts = [f"{seconds_text(part)} in {tidy(name, 40)}" for name, part in named]
        said += f", {list_of(parts)}"
        where = named[0][0]
        cores, all_ = cores_at_work(m, where), m.run.observation.hardware.cpus
        if cores is not None:
            then = f"in {tidy(where, 40)} " * (len(named) > 1)
            said += f", while {then}{cores:.0f} of {all_} cores worked"
            if where == UPDATE and cores >= MANY_CORES * all_:
                advice = "An optimizer on the CPU: what it does is none of the GPU's events."
            elif cores < FEW_CORES:
                advice = "The program's own thread, loading of data, or a synchronisation."
    return Finding("waiting", "warn", said, advice, seconds)


def unseen(m: Measures) -> dict[str, float]:
    """Seconds a step in which nothing at all was seen to be under way, by phase, longest first."""
    found: dict[str, float] = {}
    for use in m.uses:
        idle = use.waits().get((), [])
        for name in {segment.name for segment in use.step.segments}:
            seconds = length(common(idle, use.step.during(name)))
            found[name] = found.get(name, 0.0) + seconds / len(m.uses)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def cores_at_work(m: Measures, phase: str) -> float | None:
    """How many cores were busy in a phase, on average over the samples that are of it alone: each
    says what the cores did since the one before."""
    series, cores = m.load.get("cpu"), m.run.observation.hardware.cpus
    if series is None or not cores:
        return None
    spans = union(span for step in settled(m.steps) for span in step.during(phase))
    shares = [
        share
        for (before, _), (t, share) in itertools.pairwise(series.points)
        if t > before and length(within(spans, before, t)) >= INSIDE * (t - before)
    ]
    return cores * mean(shares) if shares else None


def little_overlap(m: Measures) -> Iterator[Finding]:
    """Copies that ran while the GPU did nothing: because of them, or beside something else that it
    had to wait for."""
    if m.hidden is None or m.exposed is None or m.seconds is None:
        return
    if m.exposed < WORTH_SAYING * m.seconds:
        return
    alone = sum(s for names, s in m.waits.items() if names and set(names) <= set(GPU_LINKS))
    others = {
        name: None
        for names, seconds in m.waits.items()
        if set(names) & set(GPU_LINKS) and seconds >= PART * m.exposed
        for name in names
        if name not in GPU_LINKS
    }
    said = (
        f"{percent(m.hidden)} of copy time hidden behind compute: {seconds_text(m.exposed)} a step "
        f"is not"
    )
    advice = "Copies that start earlier, on streams of their own and from pinned memory, hide."
    if others:
        beside = list_of([resource_name(name, m) for name in others])
        said += f", of which {seconds_text(m.exposed - alone)} ran beside {beside}"
        advice = "What runs beside that costs no time of its own: the GPU had to wait anyway."
    costs = m.hidden < IDLE and alone >= WORTH_SAYING * m.seconds
    yield Finding("overlap", "warn" if costs else "note", said, advice, alone)


WAIT_FINDERS: tuple[Finder, ...] = (waiting, little_overlap)
