"""How full each memory was at most, beside what was planned. Room: show."""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.observe.records import RecordedRun
from penstock.observe.series import Series
from penstock.observe.steps import Step


@dataclass(frozen=True, slots=True)
class Peak:
    """One memory at its fullest."""

    key: str
    """Of the series: gpu0.allocated, host.rss, node0, tier.hbm."""

    measured: int | None
    """None where it was planned and nobody sampled it."""

    planned: int | None = None
    budget: int | None = None
    capacity: int | None = None
    step: int | None = None
    phase: str | None = None
    """In which it was first so full or, without a step, when that was."""


def peaks_of(
    run: RecordedRun, memory: Mapping[str, Series], steps: Sequence[Step]
) -> tuple[Peak, ...]:
    """Tiers first, then what holds them. The host's available memory is no peak."""
    planned = run.observation.planned
    tiers = planned.tiers if planned is not None else {}
    sources = {"tier.hbm": "gpu0.allocated"} if holds_hbm(run, memory) else {}
    found = []
    for key in _tier_keys(memory, tiers):
        tier = key.removeprefix("tier.")
        said = tiers.get(tier)
        if said is not None and not said.peak and not said.budget and key not in memory:
            continue
        most = _peak(
            sources.get(key, key), memory, steps,
            planned=said.peak if said else None,
            budget=said.budget if said else None,
        )  # fmt: skip
        found.append(replace(most, key=key))
    others = [key for key in memory if not key.startswith("tier.") and key != "host.available"]
    seen = (_peak(key, memory, steps, capacity=_capacity(run, key)) for key in others)
    found += [_between_samples(run, peak, steps) for peak in seen]
    return tuple(found)


def _between_samples(run: RecordedRun, peak: Peak, steps: Sequence[Step]) -> Peak:
    """Torch knows how much tensors held at most, samples only what they held now and then."""
    match = re.fullmatch(r"gpu(\d+)\.allocated", peak.key)
    if match is None:
        return peak
    index = int(match[1])
    known = [(s.gpu[index].peak or 0, -s.t) for s in run.samples if index < len(s.gpu)]
    most, before = max(known, default=(0, 0.0))
    if most <= (peak.measured or 0):
        return peak
    step, phase = _moment(-before, steps)
    when = phase if step is None else f"step {step}, between samples"
    return replace(peak, measured=most, step=None, phase=when)


def holds_hbm(run: RecordedRun, memory: Mapping[str, Series]) -> bool:
    """Whether tensors on the GPU are what the tier HBM holds. Runs of earlier versions say of it
    what was set aside, which is only filled when a step comes to it."""
    planned, gpus = run.observation.planned, run.observation.hardware.gpus
    return planned is not None and len(gpus) == 1 and "gpu0.allocated" in memory


def _tier_keys(memory: Mapping[str, Series], tiers: Mapping[str, object]) -> list[str]:
    order = ("hbm", "dram", "cxl", "nvme")
    names = {key.removeprefix("tier.") for key in memory if key.startswith("tier.")} | set(tiers)
    rank = {name: at for at, name in enumerate(order)}
    return [f"tier.{n}" for n in sorted(names, key=lambda n: (rank.get(n, len(order)), n))]


def _peak(
    key: str,
    memory: Mapping[str, Series],
    steps: Sequence[Step],
    *,
    planned: int | None = None,
    budget: int | None = None,
    capacity: int | None = None,
) -> Peak:
    if key not in memory:
        return Peak(key, None, planned, budget, capacity)
    at = memory[key].highest
    t, value = memory[key].points[at]
    step, phase = _moment(t, steps)
    if step is not None and memory[key].told:
        phase = memory[key].told[at] or phase
    return Peak(key, int(value), planned, budget, capacity, step, phase)


def _moment(t: float, steps: Sequence[Step]) -> tuple[int | None, str | None]:
    at = bisect.bisect_right([step.start for step in steps], t) - 1
    if at < 0:
        return None, "before the first phase" if steps else None
    if t > steps[at].end:
        return None, "outside steps"
    inside = (s.name for s in steps[at].segments if s.start <= t < s.end)
    return steps[at].number, next(inside, None)


def _capacity(run: RecordedRun, key: str) -> int | None:
    """What there is of it, where the hardware says."""
    hardware = run.observation.hardware
    if key.startswith("gpu"):
        index = int(key.removeprefix("gpu").split(".")[0])
        return next((gpu.nbytes for gpu in hardware.gpus if gpu.index == index), None)
    if key.startswith("node"):
        node = key.removeprefix("node")
        return next((part.nbytes for part in hardware.nodes if str(part.id) == node), None)
    known = [part.nbytes for part in hardware.nodes]
    whole = [nbytes for nbytes in known if nbytes is not None]
    return sum(whole) if whole and len(whole) == len(known) else None
