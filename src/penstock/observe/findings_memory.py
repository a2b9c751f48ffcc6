"""What a run shows of memory, and of its end. Room: show."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from penstock.observe.findings import LONG_PHASE, Finder, Finding
from penstock.observe.measures import Measures
from penstock.observe.series import Series
from penstock.observe.steps import OUTSIDE, UNNAMED, settled
from penstock.observe.words import memory_title, nbytes_text, percent, seconds_text, tidy
from penstock.units import GiB, MiB

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
