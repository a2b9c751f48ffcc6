"""What was observed, on what, and how it ended: `observe.json`. Room: show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from penstock.observe.errors import ObserveError

OBSERVE_FILE = "observe.json"

SLOWEST_FILE = "events.slowest.jsonl"
"""The events of the slowest steps: some may be in other parts as well."""

PROCESSES = ("rank-*", "process-*")
"""Directories of the processes that a command started, within its own."""

Mode = Literal["sampling", "exact"]


@dataclass(frozen=True, slots=True)
class GpuPart:
    """A GPU that was there."""

    index: int
    name: str = ""
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class NodePart:
    """A memory node that was there."""

    id: int
    kind: Literal["dram", "cxl"] = "dram"
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the program ran on."""

    cpus: int = 0
    cpu_name: str = ""
    gpus: tuple[GpuPart, ...] = ()
    nodes: tuple[NodePart, ...] = ()
    disks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """What a plan said of one tier."""

    budget: int = 0
    at_rest: int = 0
    peak: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """What a plan said before the first step: for Penstock's own runs."""

    tiers: Mapping[str, PlannedTier] = field(default_factory=dict)
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The most that each tier holds in each phase."""

    links: Mapping[str, int] = field(default_factory=dict)
    """Bytes that cross each link in one step."""

    step_seconds: float | None = None
    bound_by: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What was observed, and how it ended."""

    FORMAT: ClassVar[int] = 1

    format: Literal["penstock-observe"] = "penstock-observe"
    version: int = FORMAT
    began: str
    """The origin of all times, by the wall clock: 2026-11-15T10:00:00Z."""

    ended: float | None = None
    """When, in seconds; None while it goes on, or where it was cut off."""

    command: tuple[str, ...] = ()
    pid: int = 0
    interval: float = 0.1
    """Seconds between samples."""

    mode: Mode = "sampling"
    hardware: Hardware = Hardware()
    ceilings: Mapping[str, float] = field(default_factory=dict)
    """Bytes a second that a link can carry, where that is known."""

    planned: Planned | None = None
    overhead: float | None = None
    """The share of the program's time that recording took in its own threads, where known."""

    ended_by: str | None = None
    """`exit`, or the signal that ended it."""

    exit_code: int | None = None
    notes: tuple[str, ...] = ()
    """What the recorder had to leave out, in words."""

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise ObserveError(
                "version",
                f"must be {self.FORMAT}, got {self.version}; record the program anew with this "
                f"Penstock, or read the run with the one that wrote it",
            )
