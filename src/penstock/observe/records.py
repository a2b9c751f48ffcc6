"""What an observation holds: samples, phases and events. Room: show.

A run is a directory. `observe.json` is an Observation; `samples.jsonl`, `phases.jsonl` and
`events.jsonl` have one record a line. Times are seconds since the observation's origin, sizes are
bytes, and a key that is missing was not known there. `read_run` reads it all back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.observe.observation import Observation

__all__ = [
    "DRIVER", "OBSERVING",
    "Event", "GpuSample", "HostSample", "Observation", "Phase", "RecordedRun", "Sample",
]  # fmt: skip


OBSERVING = "observing"
"""The phase in which a program waits for torch's profiler, before and after an exact step."""

DRIVER = "driver "
"""Before the track of what the driver saw in an exact step of an engine that tells its own copies:
the same copies again, seen from the other side."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one moment."""

    allocated: int | None = None
    """What tensors hold, as torch counts it."""

    reserved: int | None = None
    """What torch has taken from the driver."""

    used: int | None = None
    """What the card says is in use, by anybody."""

    utilisation: float | None = None
    """The share of the last moment in which the card had a kernel running."""

    h2d: float | None = None
    """Bytes a second over PCIe to the card."""

    d2h: float | None = None
    """Bytes a second over PCIe from the card."""

    peak: int | None = None
    """The most that tensors have held, as torch counts it: it forgets where a program asks so."""


@dataclass(frozen=True, slots=True)
class HostSample:
    """Host memory at one moment."""

    rss: int | None = None
    available: int | None = None
    pinned: int | None = None
    nodes: Mapping[str, int] = field(default_factory=dict)
    """Bytes in use on each memory node, by anybody."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The machine and the program at one moment."""

    t: float
    step: int | None = None
    phase: str | None = None
    gpu: tuple[GpuSample, ...] = ()
    host: HostSample = HostSample()
    disk: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes read and written since the machine started, per disk."""

    cpu: tuple[float, ...] = ()
    """The share of the time since the sample before in which each core worked."""

    tiers: Mapping[str, int] = field(default_factory=dict)
    """What Penstock really holds in each tier, in its own runs; of HBM, what all tensors do."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the program: forward, backward, update, data, evaluate, save, or a name of the
    user's own."""

    name: str
    step: int | None
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that ran: a copy, a kernel, a sweep, a read or a write."""

    track: str
    """Where it is drawn: gpu, h2d, d2h, node0, disk:vda, cpu sweep."""

    kind: str
    """compute, copy, sweep, read, write or kernel."""

    name: str
    start: float
    end: float
    step: int | None = None
    phase: str | None = None
    link: str | None = None
    """What it kept busy: h2d, d2h, disk:vda; None where it moved nothing over a link."""

    nbytes: int | None = None
    source: str | None = None
    """gpu, host or disk."""

    target: str | None = None
    pinned: bool | None = None
    """Whether the host's side of a copy was pinned memory; None where that is not known."""

    where: str | None = None
    """What caused it: an operator, or a part of the program."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run as it was read: of one process, or of all that `penstock profile` started."""

    observation: Observation
    samples: tuple[Sample, ...]
    """By time. Samples of the machine and of the process may come as two records."""

    phases: tuple[Phase, ...]
    events: tuple[Event, ...]
    """By start."""

    notes: tuple[str, ...] = ()
    """What was missing or cut off, in words."""

    ranks: Mapping[str, RecordedRun] = field(default_factory=dict)
    """Every process by the name of its directory, where there were several."""
