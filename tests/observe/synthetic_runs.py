"""Synthetic runs whose figures are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from penstock import records
from penstock.observe.record_lines import line_of
from penstock.observe.records import (
    Event,
    GpuInfo,
    GpuSample,
    Hardware,
    HostSample,
    NodeInfo,
    Observation,
    Phase,
    Planned,
    PlannedTier,
    RecordedRun,
    Sample,
)
from penstock.units import GiB

GB = 10**9

HARDWARE = Hardware(
    cpus=16,
    cpu_name="Example CPU",
    gpus=(GpuInfo(index=0, name="Example GPU", nbytes=24 * GiB),),
    nodes=(NodeInfo(id=0, nbytes=128 * GiB), NodeInfo(id=1, kind="cxl", nbytes=256 * GiB)),
    disks=("nvme0n1",),
)
CEILINGS = {"h2d": 25.0 * GB, "d2h": 25.0 * GB, "disk:nvme0n1:read": 6.0 * GB}


def observation(**changed: object) -> Observation:
    defaults = {
        "began": "2026-11-15T10:00:00Z", "ended": 60.0, "command": ("python", "train.py"),
        "pid": 4242, "hardware": HARDWARE, "ceilings": CEILINGS, "ended_by": "exit", "exit_code": 0,
    }  # fmt: skip
    return Observation(**{**defaults, **changed})  # type: ignore[arg-type]


def make_run(
    phases: list[Phase], events: list[Event], samples: list[Sample], **changed: object
) -> RecordedRun:
    return RecordedRun(
        observation(**changed),
        tuple(sorted(samples, key=lambda s: s.t)),
        tuple(sorted(phases, key=lambda p: (p.start, -p.end))),
        tuple(sorted(events, key=lambda e: (e.start, e.end))),
    )


def write_run(run: RecordedRun, path: Path) -> Path:
    """Write a run in the recorder's format."""
    path.mkdir(parents=True, exist_ok=True)
    records.save(run.observation, path / "observe.json")
    for name, lines in (
        ("samples", run.samples),
        ("phases", run.phases),
        ("events", run.events),
    ):
        (path / f"{name}.jsonl").write_text("".join(map(line_of, lines)))
    return path


# Offloaded training as in the study: 2 s per step, and the GPU is busy for half of it.
#
#   0.0 forward 0.4 backward 1.2 update 2.0
#   gpu     0.0-0.4, 0.5-1.1         d2h 0.9-1.2 (6 GB, pinned)
#   sweep   1.2-1.8                  h2d 1.8-2.0 (3 GB, pageable, optimizer.step)

OFFLOADED = {"forward": (0.0, 0.4), "backward": (0.4, 1.2), "update": (1.2, 2.0)}


def offloaded(steps: int = 6, **changed: object) -> RecordedRun:
    phases: list[Phase] = []
    events: list[Event] = []
    for step in range(steps):
        at = 2.0 * step
        phases += [Phase(name, step, at + a, at + b) for name, (a, b) in OFFLOADED.items()]
        events += _offloaded_events(step, at)
    samples = [_offloaded_sample(k * 0.05) for k in range(40 * steps)]
    return make_run(phases, events, samples, **{"ended": 2.0 * steps, **changed})


def _offloaded_events(step: int, at: float) -> Iterator[Event]:
    def event(track: str, kind: str, name: str, a: float, b: float, **more: object) -> Event:
        phase = next(n for n, (start, end) in OFFLOADED.items() if start <= a < end)
        return Event(track, kind, name, at + a, at + b, step, phase, **more)  # type: ignore[arg-type]

    for layer in range(4):
        yield event("gpu", "kernel", f"layers.{layer}", 0.1 * layer, 0.1 * (layer + 1))
        yield event("gpu", "kernel", f"layers.{3 - layer}", 0.5 + 0.15 * layer, 0.65 + 0.15 * layer)
    yield event(
        "d2h", "copy", "gradients", 0.9, 1.2,
        link="d2h", nbytes=6 * GB, source="gpu", target="host", pinned=True, where="backward",
    )  # fmt: skip
    yield event("cpu sweep", "sweep", "Adam", 1.2, 1.8)
    yield event(
        "h2d", "copy", "weights", 1.8, 2.0,
        link="h2d", nbytes=3 * GB, source="host", target="gpu", pinned=False,
        where="optimizer.step",
    )  # fmt: skip


def _offloaded_sample(t: float) -> Sample:
    """Use 20 GiB at the peak of backward, and 2 GiB throughout update."""
    inside = round(t % 2.0, 6)
    phase = next(n for n, (start, end) in OFFLOADED.items() if start <= inside < end)
    ramps = {
        "forward": 4 + 20 * inside,
        "backward": 12 + 10 * (inside - 0.4) if inside < 1.15 else 20,
        "update": 2,
    }
    allocated = int(ramps[phase] * GiB)
    busy = 1.0 if inside < 0.4 or 0.5 <= inside < 1.1 else 0.0
    return Sample(
        t=t, step=int(t // 2.0), phase=phase,
        gpu=(
            GpuSample(
                allocated, 21 * GiB, 22 * GiB, busy,
                15.0 * GB if inside >= 1.8 else 0.0, 20.0 * GB if 0.9 <= inside < 1.2 else 0.0,
            ),
        ),
        host=HostSample(40 * GiB, 80 * GiB, 12 * GiB, {"0": 50 * GiB, "1": 3 * GiB}),
        disk={"nvme0n1": (int(t * 1e6), 0)},
        cpu=(1.0 if phase == "update" else 0.1,) * 16,
    )  # fmt: skip


def sampled(steps: int = 6) -> RecordedRun:
    """Return the same run with samples only."""
    run = offloaded(steps)
    return make_run(list(run.phases), [], list(run.samples), ended=2.0 * steps)


# Streamed training with Penstock: 1.5 s per step, nearly everything is hidden behind compute.

LAYERS = 12

PLANNED = Planned(
    tiers={
        "hbm": PlannedTier(budget=8 * GiB, at_rest=2 * GiB, peak=7 * GiB),
        "dram": PlannedTier(budget=40 * GiB, at_rest=36 * GiB, peak=38 * GiB),
        "cxl": PlannedTier(budget=0, at_rest=0, peak=0),
        "nvme": PlannedTier(budget=100 * GiB, at_rest=30 * GiB, peak=30 * GiB),
    },
    phases={
        "forward": {"hbm": 5 * GiB, "dram": 37 * GiB, "nvme": 30 * GiB},
        "backward": {"hbm": 7 * GiB, "dram": 38 * GiB, "nvme": 30 * GiB},
    },
    links={"h2d": 2 * LAYERS * GB, "d2h": LAYERS * GB},
    step_seconds=1.45,
    bound_by="compute",
)


def streamed(steps: int = 8, **changed: object) -> RecordedRun:
    phases: list[Phase] = []
    events: list[Event] = []
    for step in range(steps):
        at = 1.5 * step
        phases += [
            Phase("forward", step, at, at + 0.5),
            Phase("backward", step, at + 0.5, at + 1.5),
        ]
        events += _streamed_events(step, at)
    samples = [_streamed_sample(k * 0.05) for k in range(30 * steps)]
    defaults = {"planned": PLANNED, "ended": 1.5 * steps, "command": ("penstock", "train", "model")}
    return make_run(phases, events, samples, **{**defaults, **changed})


def _streamed_events(step: int, at: float) -> Iterator[Event]:
    wide, tall = 0.5 / LAYERS, 1.0 / LAYERS
    for layer in range(LAYERS):
        name, up, down = f"layers.{layer}", at + layer * wide, at + 0.5 + layer * tall
        back = f"layers.{LAYERS - 1 - layer}"
        fore, aft = (step, "forward"), (step, "backward")
        yield Event("gpu", "compute", name, up + 0.002, up + wide, *fore)
        yield Event("gpu", "compute", back, down, down + tall, *aft)
        yield Event("h2d", "copy", name, up, up + 0.038, *fore, "h2d", GB, "host", "gpu", True)
        yield Event("h2d", "copy", back, down, down + 0.04, *aft, "h2d", GB, "host", "gpu", True)
        yield Event("d2h", "copy", back, down + 0.04, down + 0.08, *aft, "d2h", GB, "gpu", "host",
                    True)  # fmt: skip
        yield Event("cpu sweep", "sweep", name, up, up + 0.9 * wide, *fore)
        yield Event("disk:nvme0n1", "read", name, up, up + 0.5 * wide, *fore, "disk:nvme0n1",
                    GB // 20, "disk", "host")  # fmt: skip
        yield Event("disk:nvme0n1", "write", name, up + 0.5 * wide, up + wide, *fore,
                    "disk:nvme0n1", GB // 40, "host", "disk")  # fmt: skip


def _streamed_sample(t: float) -> Sample:
    inside = t % 1.5
    forward = inside < 0.5
    wave = 0.4 * abs((inside * 24) % 2 - 1)
    hbm = (4.0 + wave if forward else 6.4 + wave) * GiB
    return Sample(
        t=t, step=int(t // 1.5), phase="forward" if forward else "backward",
        gpu=(GpuSample(int(hbm), int(7.5 * GiB), int(8.2 * GiB), 0.97, 11.0 * GB, 5.0 * GB),),
        host=HostSample(42 * GiB, 70 * GiB, 37 * GiB, {"0": 60 * GiB, "1": 3 * GiB}),
        disk={"nvme0n1": (int(t * 4e8), int(t * 2e8))},
        cpu=(0.8 if forward else 0.2,) * 16,
        tiers={"hbm": int(hbm), "dram": int((37 if forward else 38) * GiB), "nvme": 30 * GiB},
    )  # fmt: skip


def with_separate_sweeps(run: RecordedRun, *steps: int) -> RecordedRun:
    """Return the run with a separate sweep of 0.3 s at the end of these steps."""
    late = [Phase("update", n, 1.5 * n + 1.5 - 0.3, 1.5 * n + 1.5) for n in steps]
    cut = [
        replace(p, end=p.end - 0.3) if p.name == "backward" and p.step in steps else p
        for p in run.phases
    ]
    return replace(run, phases=tuple(sorted([*cut, *late], key=lambda p: p.start)))


def on_cpu(steps: int = 4) -> RecordedRun:
    """Return a run without GPU and events on a small machine."""
    phases, samples = [], []
    for step in range(steps):
        at = 0.2 * step
        phases += [
            Phase("forward", step, at, at + 0.1),
            Phase("backward", step, at + 0.1, at + 0.2),
        ]
        samples += [
            Sample(t=at + 0.05 * k, host=HostSample(rss=GiB + k, available=3 * GiB), cpu=(0.9, 0.5))
            for k in range(4)
        ]
    hardware = Hardware(cpus=2, cpu_name="Small", nodes=(NodeInfo(id=0, nbytes=4 * GiB),))
    return make_run(phases, [], samples, hardware=hardware, ceilings={}, ended=0.2 * steps)


HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"alert(1)\">&'\u2028"


def hostile() -> RecordedRun:
    """Return a run in which every text that a program can choose attacks the page."""
    phases = [Phase(HOSTILE, 0, 0.0, 1.0), Phase("forward", 1, 1.0, 2.0)]
    phases.append(Phase("a" * 5000, 2, 2.0, 3.0))
    events = [
        Event(HOSTILE, HOSTILE, HOSTILE, 0.1, 0.5, 0, HOSTILE, HOSTILE, 100, "host", "gpu", False,
              HOSTILE),
        Event("h2d", "copy", HOSTILE, 1.1, 1.5, 1, HOSTILE, "h2d", 100, "host", "gpu", False,
              HOSTILE),
        Event("gpu", "kernel", "\ud800 lone \u202e turned \x00", 1.1, 1.5, 1, "forward"),
    ]  # fmt: skip
    samples = [
        Sample(t=0.1 * k, host=HostSample(rss=k, nodes={HOSTILE: k}), tiers={HOSTILE: k},
               disk={HOSTILE: (k, k)})
        for k in range(30)
    ]  # fmt: skip
    hardware = Hardware(
        cpus=1, cpu_name=HOSTILE, gpus=(GpuInfo(index=0, name=HOSTILE),), disks=(HOSTILE,)
    )
    return make_run(
        phases, events, samples,
        hardware=hardware, command=("python", HOSTILE), ended_by=HOSTILE,
        ceilings={HOSTILE: 1.0}, notes=(HOSTILE,),
        planned=Planned(tiers={HOSTILE: PlannedTier(1, 1, 1)}, bound_by=HOSTILE),
    )  # fmt: skip
