"""What a run of Penstock's own shows beside its plan, and beside the driver. Room: show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.observe.findings import Finder, Finding
from penstock.observe.measures import Measures
from penstock.observe.records import DRIVER
from penstock.observe.steps import UPDATE
from penstock.observe.usage import GPU_LINKS, is_node, link_of
from penstock.observe.words import (
    link_title,
    list_of,
    moved_text,
    percent,
    resource_name,
    seconds_text,
)

SAME = 0.01
"""Of a link's bytes: batches, losses and norms are less, and are in no schedule."""


def missed_plan(m: Measures) -> Iterator[Finding]:
    """Time and bytes beside the plan's."""
    planned = m.run.observation.planned
    if planned is None:
        return
    if planned.step_seconds and m.seconds:
        ratio = m.seconds / planned.step_seconds
        if not 0.85 <= ratio <= 1.15:
            off = f"{percent(abs(ratio - 1))} {'more' if ratio > 1 else 'less'}"
            yield Finding(
                "plan-time", "warn" if ratio > 1 else "note",
                f"a step took {seconds_text(m.seconds)}; the plan said "
                f"{seconds_text(planned.step_seconds)} "
                f"({off if ratio < 2 else f'{ratio:.1f} times as long'})",
                "The machine file may be of another machine, or of one with other work to do.",
                max(0.0, m.seconds - planned.step_seconds),
            )  # fmt: skip
    for link, nbytes in planned.links.items():
        moved = m.carried(link)
        if moved is not None and round(moved) != nbytes:
            yield Finding(
                "plan-bytes", "warn",
                f"{link_title(link)} carried {moved_text(moved)} a step; the schedule says "
                f"{moved_text(nbytes)} ({moved - nbytes:+,.0f} bytes)",
                "A sweep apart, before the next forward wants it, has weights on disk read twice."
                if UPDATE in m.phases
                else "Something else used the link, or events were lost.",
            )  # fmt: skip


def driver_count(m: Measures) -> Iterator[Finding]:
    """In exact steps of an engine: its own count of bytes beside the driver's."""
    driver = [event for event in m.run.events if event.track.startswith(DRIVER)]
    exact = {event.step for event in driver} & {use.step.number for use in m.uses}
    for link in GPU_LINKS:
        told = sum(use.nbytes.get(link, 0) for use in m.uses if use.step.number in exact)
        own = (event for event in driver if event.track == DRIVER + link and event.step in exact)
        counted = sum(event.nbytes or 0 for event in own)
        if not told or not counted:
            continue
        off = (counted - told) / told
        near = abs(off) <= SAME
        yield Finding(
            "driver-bytes", "note" if near else "warn",
            f"{link_title(link)}: the driver counted {counted - told:+,} bytes beside the "
            f"engine's {told:,} in exact steps ({off:+.3%})",
            "Batches, losses and norms are in no schedule." if near else "Events were lost.",
        )  # fmt: skip


def swept_apart(m: Measures) -> Iterator[Finding]:
    """Before a save and after the last step: in no step's figures, so it is told here."""
    if m.run.observation.planned is None or UPDATE in m.phases:
        return
    events = [e for e in m.run.events if e.step is None and e.phase == UPDATE]
    sweeps = [
        phase
        for phase in m.run.phases
        if phase.name == UPDATE and any(phase.start <= e.start <= phase.end for e in events)
    ]
    if not sweeps:
        return
    carried: Counter[str] = Counter()
    for event in events:
        if event.link and not is_node(event.link):
            carried[link_of(event)] += event.nbytes or 0
    each = {link: moved_text(n / len(sweeps)) for link, n in sorted(carried.items())}
    told = list_of([f"{much} of {resource_name(link, m)}" for link, much in each.items()] or [""])
    many = f"{len(sweeps)} sweeps apart from steps were recorded, each of"
    one = "what was swept apart from steps took"
    seconds = sum(sweep.seconds for sweep in sweeps) / len(sweeps)
    yield Finding(
        "swept-apart", "note",
        f"{one if len(sweeps) == 1 else many} {seconds_text(seconds)}{told and ', with '}{told}",
        "A save, and the end of a run, wait for what the last step left to sweep.",
    )  # fmt: skip


PLAN_FINDERS: tuple[Finder, ...] = (missed_plan, driver_count, swept_apart)
