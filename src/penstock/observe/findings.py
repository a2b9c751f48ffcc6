"""What a run shows, in words, each with its figures. Room: show.

A finder is a pure function of the measures. It says nothing where nothing is worth saying, and
names the step's time that is at stake where that is known.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.observe.intervals import common, length, union, within
from penstock.observe.labels import (
    link_title,
    list_of,
    memory_title,
    moved_text,
    nbytes_text,
    percent,
    rate_text,
    resource_name,
    seconds_text,
    tidy,
)
from penstock.observe.measures import Measures
from penstock.observe.records import DRIVER
from penstock.observe.series import Series
from penstock.observe.steps import OUTSIDE, UNNAMED, UPDATE, settled
from penstock.observe.usage import GPU, GPU_LINKS, SWEEP, is_node, link_of, mean
from penstock.units import GiB, MiB

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
    # which know Finding

    finders = (*WAIT_FINDERS, *TIME_FINDERS, *MEMORY_FINDERS, *PLAN_FINDERS)
    found = [finding for finder in finders for finding in finder(m)]
    return tuple(sorted(found, key=lambda f: (LEVELS.index(f.level), -f.seconds)))


# --------
# What a run shows of memory, and of its end. Room: show.

TROUGH = 0.25
"""Of the peak. A shallower one is no room to speak of."""

FEW = 10
"""Samples in a phase. With fewer its peak may well have been between them."""

LOW_HOST = 0.05
"""Of the host's memory, below which the kernel starts to kill."""


def troughs(m: Measures) -> Iterator[Finding]:
    """GPU memory that nobody uses during a whole phase: the study's trough."""
    for index in range(len(m.run.observation.hardware.gpus) or 1):
        series = m.memory.get(f"gpu{index}.allocated") or m.memory.get(f"gpu{index}.used")
        if series is None or m.seconds is None:
            continue
        stats = m.stats(series)
        highest = max((stat.high for stat in stats.values()), default=0.0)
        long = {
            phase: stat.high
            for phase, stat in stats.items()
            if m.phases.get(phase, 0.0) >= LONG_PHASE * m.seconds
            and stat.count >= FEW
            and phase not in (UNNAMED, *OUTSIDE)
        }
        if long and highest - min(long.values()) >= TROUGH * highest:
            phase, high = min(long.items(), key=lambda item: item[1])
            which = f"GPU {index} memory" if index else "GPU memory"
            yield Finding(
                "trough", "note",
                f"{which} trough of {nbytes_text(highest - high)} during {tidy(phase)}",
                f"At most {nbytes_text(high)} of the step's {nbytes_text(highest)} are used "
                f"then: room for optimizer states, or for what the next phase fetches.",
            )  # fmt: skip


def peaks_beside_plan(m: Measures) -> Iterator[Finding]:
    for peak in m.peaks:
        if peak.planned is None or peak.measured is None:
            continue
        title = memory_title(peak.key)
        if peak.measured > peak.planned:
            yield Finding(
                "plan-peak", "bad",
                f"{title} held {nbytes_text(peak.measured)}, {peak.measured - peak.planned:,} "
                f"bytes above the plan's {nbytes_text(peak.planned)}",
                "Plans are kept to the byte: please report it.",
            )  # fmt: skip
        elif peak.planned - peak.measured > TROUGH * peak.planned:
            yield Finding(
                "plan-peak", "note",
                f"{title} held {nbytes_text(peak.measured)} at most, of "
                f"{nbytes_text(peak.planned)} planned",
                "A peak between two samples is not seen.",
            )  # fmt: skip


def growing(m: Measures) -> Iterator[Finding]:
    """Each step's peak is above the last one's: something is kept."""
    steps = settled(m.steps)
    if len(steps) < 8:
        return
    quarter = len(steps) // 4
    for key in ("gpu0.allocated", "host.rss"):
        if key not in m.memory:
            continue
        highs = [_highest(m.memory[key], step.start, step.end) for step in steps]
        known = [high for high in highs if high is not None]
        if len(known) < 8:
            continue
        first, last = statistics.median(known[:quarter]), statistics.median(known[-quarter:])
        if last - first > max(64 * MiB, 0.02 * first):
            yield Finding(
                "growth", "warn",
                f"{memory_title(key)}: each step's peak grew from {nbytes_text(first)} to "
                f"{nbytes_text(last)} over {len(steps)} steps",
                "Something is kept from step to step: losses with their graphs, or caches.",
            )  # fmt: skip


def _highest(series: Series, start: float, end: float) -> float | None:
    return max((value for _, value in series.between(start, end)), default=None)


def held_back(m: Measures) -> Iterator[Finding]:
    """The caching allocator holds what no tensor was seen to need."""
    measured = {peak.key: peak.measured for peak in m.peaks}
    reserved, tensors = measured.get("gpu0.reserved"), measured.get("gpu0.allocated")
    if reserved is None or tensors is None:
        return
    if reserved - tensors > max(GiB, 0.2 * reserved):
        known = any(gpu.peak for sample in m.run.samples for gpu in sample.gpu)
        yield Finding(
            "fragmentation", "note",
            f"torch's allocator holds {nbytes_text(reserved - tensors)} more than tensors took "
            f"{'at their peak' if known else 'in any sample'} "
            f"({percent((reserved - tensors) / reserved)})",
            f"{'Fragments' if known else 'A peak between two samples, or fragments'}: "
            "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` often gives fragments back.",
        )  # fmt: skip


def short_host(m: Measures) -> Iterator[Finding]:
    series = m.memory.get("host.available")
    whole = sum(node.nbytes or 0 for node in m.run.observation.hardware.nodes)
    if series is None or not whole:
        return
    t, least = min(series.points, key=lambda point: point[1])
    if least < LOW_HOST * whole:
        yield Finding(
            "host-memory", "warn",
            f"host memory was down to {nbytes_text(least)} of {nbytes_text(whole)} at "
            f"{seconds_text(t)}",
            "The kernel ends programs there: lower the DRAM budget, or end what else runs.",
        )  # fmt: skip


def ending(m: Measures) -> Iterator[Finding]:
    told = m.run.observation
    if told.ended_by is not None and told.ended_by.startswith("signal"):
        last = f", in step {m.steps[-1].number}" if m.steps else ""
        at = f" after {seconds_text(told.ended)}" if told.ended is not None else ""
        yield Finding(
            "killed", "bad",
            f"the program was ended by {tidy(told.ended_by)}{at}{last}",
            "What is shown reaches up to then.",
        )  # fmt: skip
    elif told.exit_code:
        text = f"the program ended with exit code {told.exit_code}"
        yield Finding("failed", "bad", text, "What is shown reaches up to then.")


MEMORY_FINDERS: tuple[Finder, ...] = (
    ending,
    peaks_beside_plan,
    troughs,
    growing,
    held_back,
    short_host,
)


# --------
# What a run of Penstock's own shows beside its plan, and beside the driver. Room: show.

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


# --------
# What the GPU waited for, and which copies it did not hide. Room: show.

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
