"""What the study of offloaded training found, looked for in recorded runs: one row a run.

    penstock profile -o runs/zero3 --exact 4,6 -- python bench/peers/run.py --arm deepspeed-zero3
    python bench/observe_study.py runs/plain runs/zero3 runs/penstock --recorded 98a9876 --save

The study (arXiv 2406.10728): memory of the GPU swings widely within an iteration and is lowest in
the update; PCIe is idle then; transfers hide little behind compute. Figures are of settled steps,
bytes and overlap of the exact ones. The file names the machine that the runs were recorded on, and
the commit that recorded them beside the one that read them. It needs no GPU: the runs that
docs/observe-study.md speaks of are kept in bench/results/observe.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from penstock.observe.findings import MUCH, cores_at_work, unseen
from penstock.observe.intervals import common, length
from penstock.observe.measures import Measures, measure
from penstock.observe.records import RecordedRun
from penstock.observe.run_files import read_run
from penstock.observe.steps import settled
from penstock.observe.usage import GPU, GPU_LINKS, SWEEP, is_node, mean

PHASES = ("forward", "backward", "update")

LEAST = 1e-3
"""Seconds a step that are worth a line."""


def study(m: Measures) -> dict[str, Any]:
    """The study's points, of one run."""
    held = m.memory.get("gpu0.allocated")
    inside = [
        value
        for step in settled(m.steps)
        for _, value in (held.between(step.start, step.end) if held else ())
    ]
    return {
        "step_seconds": m.seconds,
        "phases": {name: seconds for name, seconds in m.phases.items() if name in PHASES},
        "gpu_allocated": {"low": min(inside), "high": max(inside)} if inside else None,
        "gpu_allocated_by_phase": by_phase(m),
        "gpu_reserved_peak": peak(m, "gpu0.reserved"),
        "pcie_idle": {name: share for name in PHASES if (share := idle(m, name)) is not None},
        "pcie_nbytes": {link: m.links[link].nbytes for link in GPU_LINKS if link in m.links},
        "copies_hidden": m.hidden if m.pcie_nbytes >= MUCH else None,
        "copies_hidden_by_phase": hidden(m) if m.pcie_nbytes >= MUCH else {},
        "copies_exposed_seconds": m.exposed,
        "copies_waited_for_seconds": waited(m, set(GPU_LINKS)),
        "sweep_waited_for_seconds": waited(m, {SWEEP, *GPU_LINKS}) - waited(m, set(GPU_LINKS)),
        "nothing_recorded_seconds": {name: s for name, s in unseen(m).items() if s >= LEAST},
        "cores": {name: n for name in PHASES if (n := cores_at_work(m, name)) is not None},
        "gpu_busy": m.busy.get(GPU),
        "gpu_busy_seconds": busy(m, GPU),
        "sweep_busy_seconds": busy(m, SWEEP),
        "pcie_busy_seconds": mean([length(use.copying()) for use in m.uses]),
        "node_rates": {link: use.rate for link, use in m.links.items() if is_node(link)},
        "host_peak": peak(m, "host.rss"),
    }


def busy(m: Measures, resource: str) -> dict[str, float]:
    """Seconds of each phase, of a step, in which the resource had something under way."""
    return {
        phase: mean([length(common(use.busy.get(resource, ()), use.step.during(phase)))
                     for use in m.uses])
        for phase in m.phases
    }  # fmt: skip


def peak(m: Measures, key: str) -> int | None:
    return next((found.measured for found in m.peaks if found.key == key), None)


def waited(m: Measures, names: set[str]) -> float:
    """Seconds a step in which the GPU waited for some of these and for nothing else."""
    return sum(s for what, s in m.waits.items() if what and set(what) <= names)


def by_phase(m: Measures) -> dict[str, dict[str, float]]:
    held = m.memory.get("gpu0.allocated")
    found = m.stats(held) if held else {}
    return {name: {"low": found[name].low, "high": found[name].high}
            for name in PHASES if name in found}  # fmt: skip


def idle(m: Measures, phase: str) -> float | None:
    """The share of a phase in which nothing crossed PCIe, in steps whose copies were recorded."""
    parts = [use.idle(GPU_LINKS, phase) for use in m.uses]
    whole = sum(seconds for _, seconds in parts)
    return sum(quiet for quiet, _ in parts) / whole if whole else None


def hidden(m: Measures) -> dict[str, float]:
    """By phase, the share of the time of copies in which the GPU computed."""
    found = {}
    for phase in PHASES:
        parts = [common(use.copying(), use.step.during(phase)) for use in m.uses]
        whole = sum(map(length, parts))
        beside = sum(length(common(part, use.busy.get(GPU, ())))
                     for part, use in zip(parts, m.uses, strict=True))  # fmt: skip
        if whole:
            found[phase] = beside / whole
    return found


def hardware(run: RecordedRun) -> dict[str, object]:
    """As certificates name it, from what the run says of its machine."""
    told = run.observation.hardware
    return {
        "cpu": told.cpu_name,
        "cpus": told.cpus,
        "memory_bytes": sum(node.nbytes or 0 for node in told.nodes),
        **({"gpu": told.gpus[0].name} if told.gpus else {}),
    }


HEAD = (
    "run", "a step", "GPU memory in samples, low to high", "torch's allocator",
    "PCIe idle in forward, backward, update", "copies hidden", "to / from the GPU", "GPU computes",
)  # fmt: skip


def markdown(found: dict[str, dict[str, Any]]) -> str:
    rows = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for name, of in found.items():
        swing, quiet, reserved = of["gpu_allocated"], of["pcie_idle"], of["gpu_reserved_peak"]
        memory = f"{swing['low'] / 2**30:.2f} to {swing['high'] / 2**30:.2f}" if swing else "-"
        moved = " / ".join(f"{of['pcie_nbytes'].get(link, 0) / 1e9:.2f}" for link in GPU_LINKS)
        cells = (
            name, f"{of['step_seconds'] * 1e3:.0f} ms", f"{memory} GiB",
            f"{reserved / 2**30:.1f} GiB" if reserved else "-",
            ", ".join(percent(quiet.get(phase)) for phase in PHASES),
            percent(of["copies_hidden"]), f"{moved} GB", percent(of["gpu_busy"]),
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}".replace("%", " %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--recorded", metavar="COMMIT", help="the commit that recorded the runs")
    chosen = parser.parse_args()
    runs = {path.name: read_run(path) for path in chosen.runs}
    found = {name: study(measure(run)) for name, run in runs.items()}
    print(markdown(found))
    if chosen.save:
        machine = hardware(next(iter(runs.values())))
        told = {"recorded": chosen.recorded, "runs": found}
        print(certificate.save("observe_study", told, machine=machine))


if __name__ == "__main__":
    main()
