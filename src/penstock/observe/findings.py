"""Findings: sentences about what a run shows, with figures, and what to do about it.

Each finder is a pure function of the measures. It yields nothing if there is nothing worth
reporting, and gives the step time at stake if that is known.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.observe.intervals import clip, intersection, total_length, union
from penstock.observe.labels import (
    capitalize,
    join_words,
    link_title,
    memory_title,
    moved_text,
    nbytes_text,
    percent,
    rate_text,
    resource_name,
    seconds_text,
    shorten,
)
from penstock.observe.measures import Measures
from penstock.observe.peers import peer_waits, rank_title
from penstock.observe.records import DRIVER, STATES
from penstock.observe.series import GPU_LINKS, Series
from penstock.observe.steps import OUTSIDE, UNNAMED, UPDATE, without_warmup
from penstock.observe.usage import GPU, SWEEP, is_node, link_of, mean
from penstock.units import GiB, MiB

Severity = Literal["bad", "warn", "note"]

SEVERITIES: tuple[Severity, ...] = ("bad", "warn", "note")
"""In the order in which findings are listed."""

LONG_PHASE = 0.1
"""Share of a step from which a phase is long enough to be reported."""

SIGNIFICANT = 0.05
"""Share of the step time from which a wait is reported."""

IDLE = 0.5
"""Share of a phase, or of the copy time, from which a link is idle or copies count as hidden."""

MIN_NBYTES = 1e6
"""Bytes per step from which traffic is reported. Token ids are fewer and can come from anywhere."""

MAX_CALLERS = 3
"""Number of callers of pageable copies that are listed. The others are summed."""

QUIET_SHARE = 0.02
"""Share of its ceiling below which a sampled link counts as idle."""

QUIET_RATE = 100e6
"""Bytes per second below which a sampled link counts as idle if its ceiling is not known."""

MIN_OVERLAP = 0.8
"""Share of a sample's interval that must lie in a phase for its CPU load to count for the phase."""

MANY_CORES = 0.25
"""Share of the cores from which an update probably runs an optimizer on the CPU."""

FEW_CORES = 2.0
"""Number of busy cores below which the program's main thread probably is the cause of a wait."""

MIN_PART = 0.2
"""Share of a wait from which a phase, or something else that was running, is named."""

WAIT_ACTIONS = {
    "h2d": "start copies to the GPU earlier, from pinned memory, or keep more on the GPU",
    "d2h": "start copies from the GPU earlier, or offload less",
    "disk": "use a faster drive, or move what is on it to DRAM",
    SWEEP: "run the optimizer on the GPU, or raise the tokens per step",
}
"""What shortens the wait for a resource, in a program of the reader's own."""

PENSTOCK_WAIT_ACTIONS = {
    "h2d": "raise `--hbm`, so that more blocks stay on the GPU",
    "d2h": "raise `--hbm`, so that fewer gradients and activations leave the GPU",
    "disk": "raise `--dram`, or add a faster drive with `--nvme`",
    SWEEP: "raise `--batch`, so that more compute hides the sweep, or `--hbm`",
    "ranks": "see the waits for peers",
}
"""What shortens the wait for a resource in a run of Penstock."""

COMPUTE_BOUND = 0.9
"""Share of a step from which only less or faster compute shortens it."""

LASTING_GROWTH = 0.4
"""Share of the growth of memory that the second half of a record has, from which it is reported."""

TROUGH = 0.25
"""Share of the peak from which unused memory is reported."""

MIN_SAMPLES = 10
"""Samples in a phase below which its peak may well lie between them."""

LOW_HOST_MEMORY = 0.05
"""Share of the host's memory below which the OS may start to kill processes."""

SAME_BYTES = 0.01
"""Relative difference up to which the driver's and the engine's counts agree. Batches, losses and
norms are less than this, and are not part of the schedule."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the run shows."""

    kind: str
    """Identifier that is the same for the same finding in every run."""

    level: Severity
    """`bad`: the plan was exceeded or the run failed; `warn`: costs time or memory; `note`: good to
    know."""

    text: str
    """The finding itself, with figures."""

    action: str = ""
    """What to do about it, as an imperative sentence; empty if nothing can or need be done."""

    advice: str = ""
    """Explanation of the finding."""

    seconds: float = 0.0
    """Seconds per step that are at stake, if known. Not all of them may be recoverable."""


Finder = Callable[[Measures], Iterator[Finding]]


def find(m: Measures) -> tuple[Finding, ...]:
    """Return all findings in the order in which to act on them.

    Errors come first, since they make every figure doubtful. Then come findings with something to
    do, most seconds to gain first, and then all others.
    """
    found = [finding for finder in FINDERS for finding in finder(m)]
    return tuple(sorted(found, key=_urgency))


def _urgency(finding: Finding) -> tuple[bool, bool, float, int]:
    severity = SEVERITIES.index(finding.level)
    return finding.level != "bad", not finding.action, -finding.seconds, severity


# Waits of the GPU, and copies that were not hidden.


def gpu_waits(m: Measures) -> Iterator[Finding]:
    """Report the time in which the GPU was idle, by what else was running."""
    if m.seconds is None:
        return
    gpu = "GPU" if m.run.observation.hardware.gpus else "Compute"
    for names, seconds in m.waits.items():
        if seconds < SIGNIFICANT * m.seconds:
            continue
        text = f"{gpu} idle for {seconds_text(seconds)} per step"
        if names:
            running = join_words([resource_name(name, m) for name in names])
            advice = "Nothing else was running at that time."
            if len(names) > 1:
                advice = "All of these were running at that time."
            yield Finding("waiting", "warn", f"{text} during {running}", _wait_action(m, names),
                          advice, seconds)  # fmt: skip
        else:
            yield from _unexplained_wait(m, gpu, seconds)


def _wait_action(m: Measures, names: tuple[str, ...]) -> str:
    """Return what shortens a wait for these resources, or nothing if there is no such advice."""
    actions = WAIT_ACTIONS if m.run.observation.planned is None else PENSTOCK_WAIT_ACTIONS
    kinds = {"disk" if name.startswith("disk:") else name for name in names}
    # Copies often wait for the sweep or a disk themselves, so these come first.
    found = (
        actions[kind]
        for kind in (SWEEP, "disk", "h2d", "d2h", "ranks")
        if kind in kinds & set(actions)
    )
    action = next(found, "")
    return f"{capitalize(action)}." if action else ""


def _unexplained_wait(m: Measures, gpu: str, seconds: float) -> Iterator[Finding]:
    """Name the phases, and how many CPU cores were busy, which usually reveals the cause."""
    recording = min(seconds, m.recording_seconds)
    seconds -= recording
    if m.seconds is None or seconds < SIGNIFICANT * m.seconds:
        return
    text = f"{gpu} idle for {seconds_text(seconds)} per step, cause not recorded"
    action = "Look for Python code, data loading or a synchronization in these phases."
    if m.run.observation.mode == "sampling" and m.run.observation.planned is None:
        action = "Record every operator of some steps (`--exact 3,4`), which shows the cause."
    advice = "Possible causes: Python code, data loading, or a synchronization."
    own = seconds / (seconds + recording)  # the recording slows every phase down
    phases = [(name, own * part) for name, part in unexplained_idle(m).items()
              if own * part >= MIN_PART * seconds]  # fmt: skip
    if phases:
        parts = [f"{seconds_text(part)} in {shorten(name, 40)}" for name, part in phases]
        text += f": {join_words(parts)}"
        main_phase = phases[0][0]
        cores, all_cores = busy_cores(m, main_phase), m.run.observation.hardware.cpus
        if cores is not None:
            where = f" in {shorten(main_phase, 40)}" * (len(phases) > 1)
            text += f", with {cores:.0f} of {all_cores} CPU cores busy{where}"
            if main_phase == UPDATE and cores >= MANY_CORES * all_cores:
                action = "Run the optimizer on the GPU, or during the next forward."
                advice = "Probably an optimizer on the CPU, which leaves no GPU events."
            elif cores < FEW_CORES:
                advice = (
                    "Possible causes: the program's main thread, data loading, or a "
                    "synchronization."
                )
    if recording:
        advice += (
            f" Another {seconds_text(recording)} per step is the recording itself: steps whose "
            f"operators are recorded take that much longer."
        )
    yield Finding("waiting", "warn", text, action, advice, seconds)


def unexplained_idle(m: Measures) -> dict[str, float]:
    """Return the seconds per step in which nothing was busy, by phase, longest first."""
    found: dict[str, float] = {}
    for usage in m.usages:
        idle = usage.waits().get((), [])
        for name in {segment.name for segment in usage.step.segments}:
            seconds = total_length(intersection(idle, usage.step.during(name)))
            found[name] = found.get(name, 0.0) + seconds / len(m.usages)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def busy_cores(m: Measures, phase: str) -> float | None:
    """Return the mean number of cores that the program keeps busy in a phase, if it is known.

    A sample's CPU load covers the time since the previous sample, so only samples whose interval
    lies (almost) entirely in the phase count. The thread that samples is left out.
    """
    series, cores = m.load.get("cpu"), m.run.observation.hardware.cpus
    if series is None or not cores:
        return None
    spans = union(span for step in without_warmup(m.steps) for span in step.during(phase))
    shares = [
        share
        for (before, _), (t, share) in itertools.pairwise(series.points)
        if t > before and total_length(clip(spans, before, t)) >= MIN_OVERLAP * (t - before)
    ]
    sampling = m.run.observation.overhead or 0.0
    return max(0.0, cores * mean(shares) - sampling) if shares else None


def exposed_copies(m: Measures) -> Iterator[Finding]:
    """Report copies that ran while the GPU was idle: because of them, or because of something else
    that ran at the same time."""
    if m.hidden is None or m.exposed is None or m.seconds is None:
        return
    if m.exposed < SIGNIFICANT * m.seconds:
        return
    alone = sum(s for names, s in m.waits.items() if names and set(names) <= set(GPU_LINKS))
    others = {
        name: None
        for names, seconds in m.waits.items()
        if set(names) & set(GPU_LINKS) and seconds >= MIN_PART * m.exposed
        for name in names
        if name not in GPU_LINKS
    }
    text = (
        f"{percent(m.hidden)} of copy time hidden behind compute; {seconds_text(m.exposed)} per "
        f"step not hidden"
    )
    advice = ""
    if others:
        running = join_words([resource_name(name, m) for name in others])
        text += f" ({seconds_text(m.exposed - alone)} of it during {running})"
        advice = "Copies that run during another wait cost no extra time."
    costs = m.hidden < IDLE and alone >= SIGNIFICANT * m.seconds
    # No action: `gpu_waits` has one for each wait that this sum is made of.
    yield Finding("overlap", "warn" if costs else "note", text, "", advice, alone)


def waits_for_peers(m: Measures) -> Iterator[Finding]:
    """Report how long ranks waited for each other, and which of them came last."""
    found = peer_waits(m.run)
    if found is None or m.seconds is None:
        return
    waiting, seconds = max(found.waited.items(), key=lambda item: item[1])
    if seconds < SIGNIFICANT * m.seconds:
        return
    last, lost = max(found.late.items(), key=lambda item: item[1])
    others = [f"{rank_title(name)} {seconds_text(s)}" for name, s in found.waited.items()
              if name != waiting]  # fmt: skip
    yield Finding(
        "peers", "warn",
        f"waits for peers: {rank_title(waiting)} waited {seconds_text(seconds)} per step for other "
        f"ranks ({join_words(others)}). {rank_title(last).capitalize()} was late: others waited "
        f"{seconds_text(lost)} per step for it",
        f"Compare {rank_title(last)} with the others in the table of processes, and give it equal "
        f"micro-batches, GPU, link and memory.",
        "A rank is late if it has more micro-batches than others, or a slower GPU, link or memory. "
        "Waits that run concurrently with compute cost no time.",
        seconds,
    )  # fmt: skip


# Time: links, copies, idle GPUs and slow steps.


def pageable_copies(m: Measures) -> Iterator[Finding]:
    """Report copies from or to pageable memory, by their caller."""
    if not m.run.observation.hardware.gpus:
        return
    numbers = {usage.step.number for usage in m.usages}
    sums: dict[str, tuple[int, float]] = {}
    for event in m.run.events:
        if event.pinned is False and event.link in GPU_LINKS and event.step in numbers:
            caller = event.where or event.phase or event.name
            nbytes, seconds = sums.get(caller, (0, 0.0))
            sums[caller] = (nbytes + (event.nbytes or 0), seconds + event.seconds)
    ranked = sorted(sums.items(), key=lambda item: -item[1][0])
    callers = [(f"`{shorten(caller)}`", *moved) for caller, moved in ranked[:MAX_CALLERS]]
    if rest := [moved for _, moved in ranked[MAX_CALLERS:]]:
        others = f"{len(rest)} other caller{'s' if len(rest) > 1 else ''}"
        callers.append((others, sum(n for n, _ in rest), sum(s for _, s in rest)))
    for caller, nbytes, seconds in callers:
        significant = nbytes / len(numbers) >= MIN_NBYTES
        yield Finding(
            "pageable", "warn" if significant else "note",
            f"pageable memory: {moved_text(nbytes / len(numbers))} per step copied by {caller}",
            "Use pinned memory: `pin_memory=True` of the DataLoader, or `tensor.pin_memory()`."
            if significant
            else "",
            "The driver copies pageable memory twice and cannot overlap it with compute.",
            seconds / len(numbers),
        )  # fmt: skip


def slow_links(m: Measures) -> Iterator[Finding]:
    """Report links that are busy for long, and far below the rate they can carry."""
    for link, usage in m.links.items():
        if not (usage.ceiling and usage.busy and m.seconds):
            continue
        if usage.rate < 0.6 * usage.ceiling and usage.busy >= LONG_PHASE * m.seconds:
            yield Finding(
                "slow-link", "warn",
                f"{link_title(link)} ran at {rate_text(usage.rate)} while busy, "
                f"{percent(usage.rate / usage.ceiling)} of the {rate_text(usage.ceiling)} that it "
                f"can carry",
                "Join small copies, use pinned memory, and look for another user of the link.",
                "These are the usual causes of slow copies.",
                usage.busy - usage.nbytes / usage.ceiling,
            )  # fmt: skip


def idle_gpu(m: Measures) -> Iterator[Finding]:
    """Report phases in which samples show an idle GPU, if no event shows why."""
    series = m.load.get("gpu0.utilisation")
    if m.waits or series is None or m.seconds is None:
        return
    cores = m.stats(m.load["cpu"]) if "cpu" in m.load else {}
    for phase, stat in m.stats(series).items():
        seconds = m.phases.get(phase, 0.0)
        if seconds < LONG_PHASE * m.seconds or stat.mean > 0.2:
            continue
        with_cpu = f"; CPU cores {percent(cores[phase].mean)} busy" if phase in cores else ""
        yield Finding(
            "gpu-idle", "warn",
            f"GPU idle for {percent(1 - stat.mean)} of {shorten(phase)}, which takes "
            f"{percent(seconds / m.seconds)} of a step{with_cpu}",
            f"Move the work of {shorten(phase)} to the GPU, or run it while the GPU computes.",
            "The work of this phase runs on the host.",
            (1 - stat.mean) * seconds,
        )  # fmt: skip


def idle_links(m: Measures) -> Iterator[Finding]:
    """Report long phases in which PCIe is mostly idle, if the program uses PCIe at all."""
    if not m.run.observation.hardware.gpus or m.pcie_nbytes < MIN_NBYTES:
        return
    parts, idle_seconds = [], 0.0
    for phase, seconds in m.phases.items():
        if m.seconds is None or seconds < LONG_PHASE * m.seconds or phase in (UNNAMED, *OUTSIDE):
            continue
        share = _pcie_idle_share(m, phase)
        if share is not None and share >= IDLE:
            parts.append(f"{percent(share)} of {shorten(phase)}")
            idle_seconds += share * seconds
    if parts:
        yield Finding(
            "link-idle", "note",
            f"PCIe idle for {join_words(parts)}", "",
            f"Transfers for other phases could use these {seconds_text(idle_seconds)} per step.",
        )  # fmt: skip


def _pcie_idle_share(m: Measures, phase: str) -> float | None:
    """Return the share of a phase in which PCIe is idle: from events if there are any."""
    if any(link in m.links and m.links[link].exact for link in GPU_LINKS):
        pairs = [usage.idle(GPU_LINKS, phase) for usage in m.usages]
        whole = sum(length for _, length in pairs)
        return sum(idle for idle, _ in pairs) / whole if whole else None
    limits = []
    for link in GPU_LINKS:
        if link not in m.traffic:
            return None
        ceiling = m.run.observation.ceilings.get(link)
        limits.append((m.traffic[link], QUIET_SHARE * ceiling if ceiling else QUIET_RATE))
    quiet_samples = [
        [rate < limit for step in without_warmup(m.steps) for start, end in step.during(phase)
         for _, rate in series.between(start, end)]
        for series, limit in limits
    ]  # fmt: skip
    both = list(zip(*quiet_samples, strict=False))
    return sum(all(pair) for pair in both) / len(both) if both else None


def missing_overlap(m: Measures) -> Iterator[Finding]:
    """Report what full overlap would give, if every resource waits for others."""
    if m.bottleneck.limits_step or m.floor is None or len(m.busy) < 2:
        return
    if m.bottleneck.resource is None:
        return
    assert m.seconds is not None
    resources = [(name, share) for name, share in m.busy.items() if not is_node(name)]
    shares = ", ".join(
        f"{resource_name(name, m)} {percent(share)}" for name, share in resources[:4]
    )
    yield Finding(
        "serial", "note",
        f"no resource is busy throughout the step ({shares}); with full overlap a step would "
        f"take at least {seconds_text(m.floor)}", "",
        "This is the busy time of the busiest resource. It may not be reachable.",
        m.seconds - m.floor,
    )  # fmt: skip


def busy_compute(m: Measures) -> Iterator[Finding]:
    """Report that compute fills the step, so that memory and drives have nothing to give."""
    share = m.busy.get(GPU, 0.0)
    if share < COMPUTE_BOUND:
        return
    faster = "GPU" if m.run.observation.hardware.gpus else "processor"
    yield Finding(
        "compute", "note",
        f"compute is busy for {percent(share)} of the step: more memory or faster drives will not "
        f"help",
        f"Train on fewer tokens, train a LoRA adapter, or use a faster {faster}.",
        "What is left of the step is all that better overlap could save.",
    )  # fmt: skip


def hidden_sweep(m: Measures) -> Iterator[Finding]:
    """Report how much of the CPU optimizer sweep is hidden, if that is most of it."""
    if not (m.usages and SWEEP in m.busy and GPU in m.busy):
        return
    busy = sum(usage.seconds(SWEEP) for usage in m.usages)
    hidden = sum(usage.hidden(SWEEP) for usage in m.usages) / busy
    if hidden < IDLE:  # `gpu_waits` reports it
        return
    yield Finding(
        "sweep", "note",
        f"{percent(hidden)} of the CPU optimizer sweep ({seconds_text(busy / len(m.usages))} per "
        f"step) hidden behind compute",
    )  # fmt: skip


def shared_sweep(m: Measures) -> Iterator[Finding]:
    """Report how optimizer sweeps of blocks in host memory are divided between CPU and GPU."""
    steps = {usage.step.number for usage in m.usages}
    moved = [e for e in m.run.events if e.step in steps and e.name.endswith(STATES)]
    copies = [e for e in moved if e.track in GPU_LINKS]
    if not copies:
        return
    blocks, count = {event.name for event in copies}, len(m.usages)
    seconds = total_length(union([(event.start, event.end) for event in copies])) / count
    swept = sum(usage.seconds(SWEEP) for usage in m.usages) / count
    nbytes = sum(event.nbytes or 0 for event in copies) / count
    yield Finding(
        "sweep-sides", "note",
        f"optimizer sweep: {len(blocks)} blocks in host memory pass through the GPU "
        f"({seconds_text(seconds)} and {moved_text(nbytes)} per step), the CPU sweeps others for "
        f"{seconds_text(swept)}",
    )  # fmt: skip


def slow_steps(m: Measures) -> Iterator[Finding]:
    """Report steps that took more than twice the median."""
    steps = m.own_steps
    if m.seconds is None or len(steps) < 5:
        return
    slow = [step for step in steps if step.seconds > 2 * m.seconds]
    if not slow:
        return
    slowest = max(slow, key=lambda step: step.seconds)
    yield Finding(
        "slow-steps", "note",
        f"{len(slow)} of {len(steps)} steps took more than twice the median; step "
        f"{slowest.number} took {seconds_text(slowest.seconds)}",
        f"Select step {slowest.number} in the timeline, to see what it waited for."
        if slowest.number in {usage.step.number for usage in m.usages}
        else "",
        "",
        sum(step.seconds - m.seconds for step in slow) / len(steps),
    )  # fmt: skip


# Memory, and how the run ended.


def ending(m: Measures) -> Iterator[Finding]:
    """Report a program that was killed or failed."""
    observation = m.run.observation
    action = "Read the program's own messages for the reason."
    advice = "The report covers the run up to that point."
    if observation.ended_by is not None and observation.ended_by.startswith("signal"):
        after = "" if observation.ended is None else f" after {seconds_text(observation.ended)}"
        step = f", in step {m.steps[-1].number}" if m.steps else ""
        text = f"the program was ended by {shorten(observation.ended_by)}{after}{step}"
        yield Finding("killed", "bad", text, action, advice)
    elif observation.exit_code:
        text = f"the program ended with exit code {observation.exit_code}"
        yield Finding("failed", "bad", text, action, advice)


def peaks_against_plan(m: Measures) -> Iterator[Finding]:
    """Report tiers that exceed their planned peak, or stay far below it."""
    for peak in m.peaks:
        if peak.planned is None or peak.measured is None:
            continue
        title = memory_title(peak.key)
        if peak.key == "host.rss":
            yield from _host_against_plan(peak.measured, peak.planned)
        elif peak.measured > peak.planned:
            yield Finding(
                "plan-peak", "bad",
                f"{title} used {nbytes_text(peak.measured)}, {peak.measured - peak.planned:,} "
                f"bytes above the planned {nbytes_text(peak.planned)}",
                "Please report this as a bug.",
                "Plans are exact to the byte.",
            )  # fmt: skip
        elif peak.planned - peak.measured > TROUGH * peak.planned:
            yield Finding(
                "plan-peak", "note",
                f"{title} used at most {nbytes_text(peak.measured)} of the planned "
                f"{nbytes_text(peak.planned)}", "",
                "Samples can miss a peak between them.",
            )  # fmt: skip


def _host_against_plan(measured: int, planned: int) -> Iterator[Finding]:
    """Report a process that needs more host memory than the plan's tiers and its own estimate."""
    if measured > planned:
        yield Finding(
            "plan-peak", "warn",
            f"the process used {nbytes_text(measured)} of host memory, "
            f"{nbytes_text(measured - planned)} above the planned {nbytes_text(planned)}",
            "Run `penstock probe`, which measures what the process itself needs, for later plans.",
            "The tiers are allocated as planned, so the process itself needs more than the plan "
            "assumes: Python, PyTorch, CUDA, the compiler, and files that are mapped.",
        )  # fmt: skip


def unused_gpu_memory(m: Measures) -> Iterator[Finding]:
    """Report GPU memory that is unused throughout a long phase."""
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
            and stat.count >= MIN_SAMPLES
            and phase not in (UNNAMED, *OUTSIDE)
        }
        if long and highest - min(long.values()) >= TROUGH * highest:
            phase, high = min(long.items(), key=lambda item: item[1])
            which = f"GPU {index} memory" if index else "GPU memory"
            yield Finding(
                "trough", "note",
                f"{which}: {nbytes_text(highest - high)} unused during {shorten(phase)}", "",
                f"At most {nbytes_text(high)} of the step's peak of {nbytes_text(highest)} is in "
                f"use then, which leaves room for optimizer states or for prefetching the next "
                f"phase.",
            )  # fmt: skip


def growing_memory(m: Measures) -> Iterator[Finding]:
    """Report memory whose peak grows from step to step."""
    steps = without_warmup(m.steps)
    if len(steps) < 8:
        return
    quarter = len(steps) // 4
    for key in ("gpu0.allocated", "host.rss"):
        if key not in m.memory:
            continue
        peaks = [_highest(m.memory[key], step.start, step.end) for step in steps]
        known = [peak for peak in peaks if peak is not None]
        if len(known) < 8:
            continue
        first, last = statistics.median(known[:quarter]), statistics.median(known[-quarter:])
        middle = len(known) // 2 - quarter // 2
        halfway = statistics.median(known[middle : middle + quarter])
        # Caches and allocators fill up during the first hundred steps, ever more slowly. What a
        # program keeps from every step grows as much in the second half as in the first.
        lasting = last - halfway >= LASTING_GROWTH * (last - first)
        if last - first > max(64 * MiB, 0.02 * first) and lasting:
            yield Finding(
                "growth", "warn",
                f"{memory_title(key)}: the peak of a step grew from {nbytes_text(first)} to "
                f"{nbytes_text(last)} over {len(steps)} steps",
                "Look for what the program keeps from step to step: losses with their graphs (use "
                "`loss.item()`), or a cache without a limit.",
            )  # fmt: skip


def _highest(series: Series, start: float, end: float) -> float | None:
    return max((value for _, value in series.between(start, end)), default=None)


def fragmented_memory(m: Measures) -> Iterator[Finding]:
    """Report memory that torch's caching allocator holds although no tensor used it."""
    measured = {peak.key: peak.measured for peak in m.peaks}
    reserved, tensors = measured.get("gpu0.reserved"), measured.get("gpu0.allocated")
    if reserved is None or tensors is None:
        return
    if reserved - tensors > max(GiB, 0.2 * reserved):
        peak_known = any(gpu.peak for sample in m.run.samples for gpu in sample.gpu)
        yield Finding(
            "fragmentation", "note",
            f"torch's caching allocator holds {nbytes_text(reserved - tensors)} more than tensors "
            f"used {'at their peak' if peak_known else 'in any sample'} "
            f"({percent((reserved - tensors) / reserved)})",
            "Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, which often helps.",
            f"{'Fragmentation' if peak_known else 'Fragmentation, or a peak between two samples'}.",
        )  # fmt: skip


def low_host_memory(m: Measures) -> Iterator[Finding]:
    """Report that the host almost ran out of memory."""
    series = m.memory.get("host.available")
    whole = sum(node.nbytes or 0 for node in m.run.observation.hardware.nodes)
    if series is None or not whole:
        return
    t, least = min(series.points, key=lambda point: point[1])
    if least < LOW_HOST_MEMORY * whole:
        yield Finding(
            "host-memory", "warn",
            f"available host memory was down to {nbytes_text(least)} of {nbytes_text(whole)} at "
            f"{seconds_text(t)}",
            "Lower the DRAM budget, or stop other programs.",
            "The kernel may kill the program.",
        )  # fmt: skip


# Penstock runs: the plan, and the driver's count.


def missed_plan(m: Measures) -> Iterator[Finding]:
    """Report a step time or traffic that differs from the plan."""
    planned = m.run.observation.planned
    if planned is None:
        return
    if planned.step_seconds and m.seconds:
        ratio = m.seconds / planned.step_seconds
        if not 0.85 <= ratio <= 1.15:
            difference = f"{percent(abs(ratio - 1))} {'more' if ratio > 1 else 'less'}"
            yield Finding(
                "plan-time", "warn" if ratio > 1 else "note",
                f"step time {seconds_text(m.seconds)}, planned "
                f"{seconds_text(planned.step_seconds)} "
                f"({difference if ratio < 2 else f'{ratio:.1f} times as long'})",
                "Measure this machine with `penstock probe`, and stop other programs on it."
                if ratio > 1
                else "",
                "The machine file may describe another machine, or other programs were running.",
                max(0.0, m.seconds - planned.step_seconds),
            )  # fmt: skip
    for link, nbytes in planned.links.items():
        moved = m.carried(link)
        if moved is not None and round(moved) != nbytes:
            yield Finding(
                "plan-bytes", "warn",
                f"{link_title(link)} carried {moved_text(moved)} per step, planned "
                f"{moved_text(nbytes)} ({moved - nbytes:+,.0f} bytes)", "",
                "An optimizer sweep before the next forward reads weights on disk twice."
                if UPDATE in m.phases
                else "Something else used the link, or events were lost.",
            )  # fmt: skip


def driver_count(m: Measures) -> Iterator[Finding]:
    """Compare the engine's count of bytes with the driver's, in exact steps."""
    driver = [event for event in m.run.events if event.track.startswith(DRIVER)]
    exact = {event.step for event in driver} & {usage.step.number for usage in m.usages}
    for link in GPU_LINKS:
        by_engine = sum(
            usage.nbytes.get(link, 0) for usage in m.usages if usage.step.number in exact
        )
        on_link = (e for e in driver if e.track == DRIVER + link and e.step in exact)
        by_driver = sum(event.nbytes or 0 for event in on_link)
        if not by_engine or not by_driver:
            continue
        relative = (by_driver - by_engine) / by_engine
        agree = abs(relative) <= SAME_BYTES
        yield Finding(
            "driver-bytes", "note" if agree else "warn",
            f"{link_title(link)}: the driver counted {by_driver - by_engine:+,} bytes compared "
            f"with the engine's {by_engine:,} in exact steps ({relative:+.3%})", "",
            "Batches, losses and norms are not part of the schedule."
            if agree
            else "Events were lost.",
        )  # fmt: skip


def separate_sweeps(m: Measures) -> Iterator[Finding]:
    """Report optimizer sweeps before a save and after the last step, which no step includes."""
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
    moved = [
        f"{moved_text(nbytes / len(sweeps))} of {resource_name(link, m)}"
        for link, nbytes in sorted(carried.items())
    ]
    with_moved = f", with {join_words(moved)}" if moved else ""
    seconds = seconds_text(sum(sweep.seconds for sweep in sweeps) / len(sweeps))
    text = (
        f"1 optimizer sweep ran outside steps and took {seconds}"
        if len(sweeps) == 1
        else f"{len(sweeps)} optimizer sweeps ran outside steps and took {seconds} each"
    )
    yield Finding(
        "swept-apart", "note", text + with_moved, "",
        "Before a save, and at the end of a run, the sweep of the last step must finish.",
    )  # fmt: skip


FINDERS: tuple[Finder, ...] = (
    gpu_waits,
    waits_for_peers,
    exposed_copies,
    pageable_copies,
    slow_links,
    idle_gpu,
    idle_links,
    missing_overlap,
    busy_compute,
    hidden_sweep,
    shared_sweep,
    slow_steps,
    ending,
    peaks_against_plan,
    unused_gpu_memory,
    growing_memory,
    fragmented_memory,
    low_host_memory,
    missed_plan,
    driver_count,
    separate_sweeps,
)
"""In the order of their findings where severity and cost are equal."""
