"""Compute the figures of a study of offloaded training from recorded runs, one row per run.

    penstock profile -o runs/zero3 --exact 4,6 -- python bench/peers/run.py --arm deepspeed-zero3
    python bench/observe_study.py runs/plain runs/zero3 runs/penstock --recorded 98a9876 --save

The study (arXiv 2406.10728) found that GPU memory varies widely within an iteration and is lowest
in the update, that PCIe is idle during the update, and that little of the copies is hidden behind
compute. Times are those of settled steps; bytes and overlap those of the steps recorded exactly.
The results file names the machine on which the runs were recorded, the commit that recorded them
and the commit that read them. No GPU is needed: bench/results/observe contains the runs that
docs/observe-study.md describes.
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
"""Seconds per step below which a wait is not reported."""


def study(m: Measures) -> dict[str, Any]:
    """Return the figures of the study for one run."""
    allocated = m.memory.get("gpu0.allocated")
    inside = [
        value
        for step in settled(m.steps)
        for _, value in (allocated.between(step.start, step.end) if allocated else ())
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
    """Return the seconds per step and phase in which the resource was busy."""
    return {
        phase: mean([length(common(use.busy.get(resource, ()), use.step.during(phase)))
                     for use in m.uses])
        for phase in m.phases
    }  # fmt: skip


def peak(m: Measures, key: str) -> int | None:
    return next((found.measured for found in m.peaks if found.key == key), None)


def waited(m: Measures, names: set[str]) -> float:
    """Return the seconds per step in which the GPU waited only for resources in `names`."""
    return sum(s for what, s in m.waits.items() if what and set(what) <= names)


def by_phase(m: Measures) -> dict[str, dict[str, float]]:
    allocated = m.memory.get("gpu0.allocated")
    found = m.stats(allocated) if allocated else {}
    return {name: {"low": found[name].low, "high": found[name].high}
            for name in PHASES if name in found}  # fmt: skip


def idle(m: Measures, phase: str) -> float | None:
    """Return the fraction of a phase without PCIe traffic, in steps whose copies were recorded."""
    parts = [use.idle(GPU_LINKS, phase) for use in m.uses]
    whole = sum(seconds for _, seconds in parts)
    return sum(quiet for quiet, _ in parts) / whole if whole else None


def hidden(m: Measures) -> dict[str, float]:
    """Return, for each phase, the fraction of the copy time in which the GPU computed."""
    found = {}
    for phase in PHASES:
        parts = [common(use.copying(), use.step.during(phase)) for use in m.uses]
        whole = sum(map(length, parts))
        overlap = sum(length(common(part, use.busy.get(GPU, ())))
                     for part, use in zip(parts, m.uses, strict=True))  # fmt: skip
        if whole:
            found[phase] = overlap / whole
    return found


def hardware(run: RecordedRun) -> dict[str, object]:
    """Describe the machine of a recorded run as `certificate.hardware` does."""
    description = run.observation.hardware
    return {
        "cpu": description.cpu_name,
        "cpus": description.cpus,
        "memory_bytes": sum(node.nbytes or 0 for node in description.nodes),
        **({"gpu": description.gpus[0].name} if description.gpus else {}),
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
    parser.add_argument("--recorded", metavar="COMMIT", help="commit that recorded the runs")
    args = parser.parse_args()
    runs = {path.name: read_run(path) for path in args.runs}
    found = {name: study(measure(run)) for name, run in runs.items()}
    print(markdown(found))
    if args.save:
        machine = hardware(next(iter(runs.values())))
        results = {"recorded": args.recorded, "runs": found}
        print(certificate.save("observe_study", results, machine=machine))


if __name__ == "__main__":
    main()
