"""What a run shows, in words, each with its figures. Room: show.

A finder is a pure function of the measures. It says nothing where nothing is worth saying, and
names the step's time that is at stake where that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.observe.measures import Measures
from penstock.observe.steps import OUTSIDE, UNNAMED, settled
from penstock.observe.usage import GPU, GPU_LINKS, SWEEP, is_node
from penstock.observe.words import (
    link_title,
    list_of,
    moved_text,
    percent,
    rate_text,
    resource_name,
    seconds_text,
    tidy,
)

Level = Literal["bad", "warn", "note"]

LEVELS: tuple[Level, ...] = ("bad", "warn", "note")

LONG_PHASE = 0.1
"""Of a step. What happens in shorter phases matters little."""

IDLE = 0.5
WORTH_SAYING = 0.05
"""Of a step's time."""

CAUSES = 3
"""Of pageable copies, each of which is told; the others are told together."""

MUCH = 1e6
"""Bytes a step. Token numbers are less, and come from anywhere."""

QUIET = 0.02
"""Of its ceiling: a sampled link below this carries nothing to speak of."""

QUIET_RATE = 100e6
"""Bytes a second, where the ceiling is not known."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the run shows."""

    kind: str
    """The same word for the same thing in every run."""

    level: Level
    """`bad` broke a promise or ended the run, `warn` costs time or room, `note` is good to know."""

    text: str
    """What was found, with the figures."""

    advice: str = ""
    """What it means, or what to try."""

    seconds: float = 0.0
    """Of each step, where it is known what is at stake: no promise that all of it can be had."""


Finder = Callable[[Measures], Iterator[Finding]]


def idle_links(m: Measures) -> Iterator[Finding]:
    """PCIe carries nothing for most of a long phase. Where all is on the GPU, nothing has to."""
    if not m.run.observation.hardware.gpus or m.pcie_nbytes < MUCH:
        return
    said, whole = [], 0.0
    for phase, seconds in m.phases.items():
        if m.seconds is None or seconds < LONG_PHASE * m.seconds or phase in (UNNAMED, *OUTSIDE):
            continue
        share = _idle_share(m, phase)
        if share is not None and share >= IDLE:
            said.append(f"{percent(share)} of {tidy(phase)}")
            whole += share * seconds
    if said:
        yield Finding(
            "link-idle", "note",
            f"PCIe idle during {list_of(said)}",
            f"{seconds_text(whole)} a step in which bytes for another phase could have moved.",
        )  # fmt: skip


def _idle_share(m: Measures, phase: str) -> float | None:
    """By events where a copy was ever seen, else by samples."""
    if any(link in m.links and m.links[link].exact for link in GPU_LINKS):
        pairs = [use.idle(GPU_LINKS, phase) for use in m.uses]
        whole = sum(length for _, length in pairs)
        return sum(idle for idle, _ in pairs) / whole if whole else None
    stats = []
    for link in GPU_LINKS:
        if link not in m.traffic:
            return None
        ceiling = m.run.observation.ceilings.get(link)
        stats.append((m.traffic[link], QUIET * ceiling if ceiling else QUIET_RATE))
    moments = [
        [rate < quiet for step in settled(m.steps) for start, end in step.during(phase)
         for _, rate in series.between(start, end)]
        for series, quiet in stats
    ]  # fmt: skip
    both = list(zip(*moments, strict=False))
    return sum(all(pair) for pair in both) / len(both) if both else None


def pageable_copies(m: Measures) -> Iterator[Finding]:
    """Copies that the driver must stage: slow, and never beside compute."""
    if not m.run.observation.hardware.gpus:
        return
    numbers = {use.step.number for use in m.uses}
    sums: dict[str, tuple[int, float]] = {}
    for event in m.run.events:
        if event.pinned is False and event.link in GPU_LINKS and event.step in numbers:
            cause = event.where or event.phase or event.name
            nbytes, seconds = sums.get(cause, (0, 0.0))
            sums[cause] = (nbytes + (event.nbytes or 0), seconds + event.seconds)
    ranked = sorted(sums.items(), key=lambda item: -item[1][0])
    told = [(f"`{tidy(cause)}`", *moved) for cause, moved in ranked[:CAUSES]]
    if rest := [moved for _, moved in ranked[CAUSES:]]:
        places = f"{len(rest)} other place{'s' if len(rest) > 1 else ''}"
        told.append((places, sum(n for n, _ in rest), sum(s for _, s in rest)))
    for cause, nbytes, seconds in told:
        much = nbytes / len(numbers) >= MUCH
        yield Finding(
            "pageable", "warn" if much else "note",
            f"pageable copies: {moved_text(nbytes / len(numbers))} per step from {cause}",
            "The driver copies pageable memory twice and cannot overlap it with compute; pin it.",
            seconds / len(numbers),
        )  # fmt: skip


def slow_links(m: Measures) -> Iterator[Finding]:
    """Busy for long, and far below what the link can carry."""
    for link, use in m.links.items():
        if not (use.ceiling and use.busy and m.seconds):
            continue
        if use.rate < 0.6 * use.ceiling and use.busy >= LONG_PHASE * m.seconds:
            yield Finding(
                "slow-link", "warn",
                f"{link_title(link)} ran at {rate_text(use.rate)} while busy, "
                f"{percent(use.rate / use.ceiling)} of its {rate_text(use.ceiling)}",
                "Small or pageable copies, or two users of one link.",
                use.busy - use.nbytes / use.ceiling,
            )  # fmt: skip


def idle_gpu(m: Measures) -> Iterator[Finding]:
    """By samples, where no event tells who waited for whom."""
    series = m.load.get("gpu0.utilisation")
    if m.waits or series is None or m.seconds is None:
        return
    cores = m.stats(m.load["cpu"]) if "cpu" in m.load else {}
    for phase, stat in m.stats(series).items():
        seconds = m.phases.get(phase, 0.0)
        if seconds < LONG_PHASE * m.seconds or stat.mean > 0.2:
            continue
        with_cpu = f"; the CPU's cores were {percent(cores[phase].mean)} busy" * (phase in cores)
        yield Finding(
            "gpu-idle", "warn",
            f"GPU idle during {percent(1 - stat.mean)} of {tidy(phase)}, which takes "
            f"{percent(seconds / m.seconds)} of a step{with_cpu}",
            "What runs there runs on the host.",
            (1 - stat.mean) * seconds,
        )  # fmt: skip


def slow_steps(m: Measures) -> Iterator[Finding]:
    steps = settled(m.steps)
    if m.seconds is None or len(steps) < 5:
        return
    slow = [step for step in steps if step.seconds > 2 * m.seconds]
    if not slow:
        return
    worst = max(slow, key=lambda step: step.seconds)
    yield Finding(
        "slow-steps", "note",
        f"{len(slow)} of {len(steps)} steps took more than twice the median; step {worst.number} "
        f"took {seconds_text(worst.seconds)}",
        "The time line can show it where its events were kept.",
        sum(step.seconds - m.seconds for step in slow) / len(steps),
    )  # fmt: skip


def unoverlapped_work(m: Measures) -> Iterator[Finding]:
    """Everything waits for everything: what full overlap would give."""
    if m.bound.holds or m.floor is None or len(m.busy) < 2 or m.bound.resource is None:
        return
    assert m.seconds is not None
    working = [(name, share) for name, share in m.busy.items() if not is_node(name)]
    shares = ", ".join(f"{resource_name(name, m)} {percent(share)}" for name, share in working[:4])
    yield Finding(
        "serial", "note",
        f"each waits for another ({shares}): with everything overlapped a step could still not "
        f"take less than {seconds_text(m.floor)}",
        "That is the busiest one's own time, and no promise.",
        m.seconds - m.floor,
    )  # fmt: skip


def sweep_hidden(m: Measures) -> Iterator[Finding]:
    if not (m.uses and SWEEP in m.busy and GPU in m.busy):
        return
    busy = sum(use.seconds(SWEEP) for use in m.uses)
    hidden = sum(use.hidden(SWEEP) for use in m.uses) / busy
    if hidden < IDLE:  # told as waiting
        return
    yield Finding(
        "sweep", "note",
        f"{percent(hidden)} of the CPU sweep's {seconds_text(busy / len(m.uses))} a step ran "
        f"beside compute",
    )  # fmt: skip


TIME_FINDERS: tuple[Finder, ...] = (
    pageable_copies,
    slow_links,
    idle_gpu,
    idle_links,
    unoverlapped_work,
    sweep_hidden,
    slow_steps,
)


def find(m: Measures) -> tuple[Finding, ...]:
    """All findings: the worst level first and, within it, what costs most time."""
    from penstock.observe.findings_memory import MEMORY_FINDERS  # which know Finding
    from penstock.observe.findings_plan import PLAN_FINDERS
    from penstock.observe.findings_waits import WAIT_FINDERS

    finders = (*WAIT_FINDERS, *TIME_FINDERS, *MEMORY_FINDERS, *PLAN_FINDERS)
    found = [finding for finder in finders for finding in finder(m)]
    return tuple(sorted(found, key=lambda f: (LEVELS.index(f.level), -f.seconds)))
