"""The data model of a recorded run: the content of its directory.

A run is a directory. `observe.json` holds an `Observation`; `samples.jsonl`, `phases.jsonl` and
`events.jsonl` hold one record per line. The field names of these classes are the keys in those
files. Times are seconds since the observation's origin, sizes are bytes, and a missing key means
that the value was not known. `penstock.observe.run_files.read_run` reads all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from penstock.observe.errors import ObserveError

OBSERVE_FILE = "observe.json"

TRAIN_PROFILE = "profile"
"""Directory of the recording of `penstock train --profile`, in the output directory of the run."""

SLOWEST_FILE = "events.slowest.jsonl"
"""Events of the slowest steps. Some of them may be in the other event files as well."""

PROCESS_PATTERNS = ("rank-*", "process-*")
"""Subdirectories of a run, one per recorded process, when `penstock profile` started it."""

OBSERVING = "observing"
"""The phase in which the program waits for torch's profiler, before and after an exact step."""

STATES = " states"
"""End of the name of copies of states in host memory that the GPU sweeps. A block's name comes
first."""

DRIVER = "driver "
"""Track prefix of the copies and kernels that torch's profiler saw in a step for which a Penstock
engine reported its own events: the same copies, counted by the driver."""

Mode = Literal["sampling", "exact"]


# The observation: observe.json.


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """A GPU of the machine."""

    index: int
    name: str = ""
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A memory node of the machine."""

    id: int
    kind: Literal["dram", "cxl"] = "dram"
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine that the program ran on."""

    cpus: int = 0
    cpu_name: str = ""
    gpus: tuple[GpuInfo, ...] = ()
    nodes: tuple[NodeInfo, ...] = ()
    disks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """The plan's figures for one tier, in bytes."""

    budget: int = 0
    at_rest: int = 0
    peak: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a Penstock run, as it was before the first step."""

    tiers: Mapping[str, PlannedTier] = field(default_factory=dict)
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Planned peak of each tier in each phase, in bytes."""

    links: Mapping[str, int] = field(default_factory=dict)
    """Bytes that cross each link in one step."""

    host: int | None = None
    """Host memory of the whole process: tiers in host memory, and the process itself. None in
    recordings of earlier versions; the HBM tier of their samples is what tensors occupy."""

    step_seconds: float | None = None
    bound_by: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The observed program, its hardware, and how it ended."""

    FORMAT: ClassVar[int] = 1

    format: Literal["penstock-observe"] = "penstock-observe"
    version: int = FORMAT
    began: str
    """The origin of all times as wall-clock time, such as 2026-11-15T10:00:00Z."""

    ended: float | None = None
    """When recording ended, in seconds; None while it continues, or if it was cut off."""

    command: tuple[str, ...] = ()
    pid: int = 0
    interval: float = 0.1
    """Seconds between samples."""

    mode: Mode = "sampling"
    hardware: Hardware = Hardware()
    ceilings: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second that each link can carry, where that was measured."""

    planned: Planned | None = None
    overhead: float | None = None
    """CPU time of the recorder's thread as a fraction of the run time, where known."""

    ended_by: str | None = None
    """`exit`, or the signal that ended the program."""

    exit_code: int | None = None
    notes: tuple[str, ...] = ()
    """Sentences about data that the recorder had to leave out."""

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise ObserveError(
                "version",
                f"must be {self.FORMAT}, got {self.version}; record the program again with this "
                f"version of Penstock, or read the run with the version that wrote it",
            )


# Samples, phases and events: the .jsonl files.


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one moment."""

    allocated: int | None = None
    """Bytes held by tensors, as torch counts them."""

    reserved: int | None = None
    """Bytes that torch's caching allocator holds."""

    used: int | None = None
    """Bytes in use on the device by all processes, as the driver reports them."""

    utilisation: float | None = None
    """Fraction of the driver's last sampling period in which a kernel was running."""

    h2d: float | None = None
    """PCIe traffic to the GPU, in bytes per second."""

    d2h: float | None = None
    """PCIe traffic from the GPU, in bytes per second."""

    peak: int | None = None
    """Highest value of `allocated` so far, as torch counts it. The program may reset it."""


@dataclass(frozen=True, slots=True)
class HostSample:
    """Host memory at one moment."""

    rss: int | None = None
    available: int | None = None
    pinned: int | None = None
    nodes: Mapping[str, int] = field(default_factory=dict)
    """Bytes in use on each memory node, by all processes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The machine and the program at one moment."""

    t: float
    step: int | None = None
    phase: str | None = None
    gpu: tuple[GpuSample, ...] = ()
    host: HostSample = HostSample()
    disk: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes read and written by each disk since the machine was started."""

    cpu: tuple[float, ...] = ()
    """Fraction of the time since the previous sample in which each core was busy."""

    tiers: Mapping[str, int] = field(default_factory=dict)
    """Bytes that Penstock engines hold in each tier, as `Engine.tiers` reports them in `used`."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A time span of the program: forward, backward, update, data, evaluate, save, or a name that
    the user chose."""

    name: str
    step: int | None
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Event:
    """One operation: a copy, a kernel, an optimizer sweep, a read or a write."""

    track: str
    """The row it is drawn on: gpu, h2d, d2h, node0, disk:vda, cpu sweep, ranks."""

    kind: str
    """compute, copy, sweep, read, write, kernel or peers (what ranks do together)."""

    name: str
    start: float
    end: float
    step: int | None = None
    phase: str | None = None
    link: str | None = None
    """The link it kept busy: h2d, d2h, disk:vda; None if nothing crossed a link."""

    nbytes: int | None = None
    source: str | None = None
    """gpu, host or disk."""

    target: str | None = None
    pinned: bool | None = None
    """Whether the host side of a copy is pinned memory; None if unknown."""

    where: str | None = None
    """The cause: an operator, or a part of the program."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run as read from its directory: one process, or all that `penstock profile` started."""

    observation: Observation
    samples: tuple[Sample, ...]
    """Samples in order of time. Those of the machine and of the process can be two records."""

    phases: tuple[Phase, ...]
    events: tuple[Event, ...]
    """Events in order of their start."""

    notes: tuple[str, ...] = ()
    """Sentences about missing or truncated data."""

    ranks: Mapping[str, RecordedRun] = field(default_factory=dict)
    """Each process by the name of its directory, if processes were recorded separately."""
