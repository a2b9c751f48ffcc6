"""Check the findings of a study of offloaded training in recorded runs: one table row per run.

    penstock profile -o runs/zero3 --exact 4,6 -- python bench/peers/run.py --arm deepspeed-zero3
    python bench/observe_study.py runs/plain runs/zero3 runs/penstock --recorded 98a9876 --save

The study (arXiv 2406.10728) found that GPU memory swings widely within an iteration and is lowest
in the update, that PCIe is idle then, and that transfers hide little behind compute. All figures
leave out the warm-up step; bytes and overlap come from the exact steps. The result file names the
machine and the commit that recorded the runs, and the commit that read them. This script needs no
GPU: the runs behind docs/observe-study.md are in bench/results/observe.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from penstock.observe.findings import MIN_NBYTES, busy_cores, unexplained_idle
from penstock.observe.intervals import intersection, total_length
from penstock.observe.measures import Measures, measure
from penstock.observe.records import RecordedRun
from penstock.observe.run_files import read_run
from penstock.observe.series import GPU_LINKS
from penstock.observe.steps import without_warmup
from penstock.observe.usage import GPU, SWEEP, is_node, mean

PHASES = ("forward", "backward", "update")

MIN_SECONDS = 1e-3
"""Seconds per step from which unexplained idle time is listed."""

HEAD = (
    "run", "step time", "GPU memory in samples, low to high", "reserved by torch",
    "PCIe idle in forward, backward, update", "copies hidden", "to / from the GPU", "GPU busy",
)  # fmt: skip


def study(m: Measures) -> dict[str, Any]:
    """Return the figures that the study is about, for one run."""
    allocated = m.memory.get("gpu0.allocated")
    inside = [
        value
        for step in without_warmup(m.steps)
        for _, value in (allocated.between(step.start, step.end) if allocated else ())
    ]
    unexplained = {name: s for name, s in unexplained_idle(m).items() if s >= MIN_SECONDS}
    return {
        "step_seconds": m.seconds,
        "phases": {name: seconds for name, seconds in m.phases.items() if name in PHASES},
        "gpu_allocated": {"low": min(inside), "high": max(inside)} if inside else None,
        "gpu_allocated_by_phase": allocated_by_phase(m),
        "gpu_reserved_peak": peak(m, "gpu0.reserved"),
        "pcie_idle": {name: share for name in PHASES if (share := pcie_idle(m, name)) is not None},
        "pcie_nbytes": {link: m.links[link].nbytes for link in GPU_LINKS if link in m.links},
        "copies_hidden": m.hidden if m.pcie_nbytes >= MIN_NBYTES else None,
        "copies_hidden_by_phase": hidden_by_phase(m) if m.pcie_nbytes >= MIN_NBYTES else {},
        "copies_exposed_seconds": m.exposed,
        "copies_waited_for_seconds": waited(m, set(GPU_LINKS)),
        "sweep_waited_for_seconds": waited(m, {SWEEP, *GPU_LINKS}) - waited(m, set(GPU_LINKS)),
        "nothing_recorded_seconds": unexplained,
        "cores": {name: n for name in PHASES if (n := busy_cores(m, name)) is not None},
        "gpu_busy": m.busy.get(GPU),
        "gpu_busy_seconds": busy_by_phase(m, GPU),
        "sweep_busy_seconds": busy_by_phase(m, SWEEP),
        "pcie_busy_seconds": mean([total_length(usage.copying()) for usage in m.usages]),
        "node_rates": {link: usage.rate for link, usage in m.links.items() if is_node(link)},
        "host_peak": peak(m, "host.rss"),
    }


def busy_by_phase(m: Measures, resource: str) -> dict[str, float]:
    """Return the seconds per step in which a resource was busy, in each phase."""
    return {
        phase: mean([total_length(intersection(u.busy.get(resource, ()), u.step.during(phase)))
                     for u in m.usages])
        for phase in m.phases
    }  # fmt: skip


def peak(m: Measures, key: str) -> int | None:
    """Return the measured peak of a memory."""
    return next((found.measured for found in m.peaks if found.key == key), None)


def waited(m: Measures, names: set[str]) -> float:
    """Return the seconds per step in which the GPU waited for some of these and nothing else."""
    return sum(s for what, s in m.waits.items() if what and set(what) <= names)


def allocated_by_phase(m: Measures) -> dict[str, dict[str, float]]:
    """Return the lowest and highest allocated GPU memory in each phase."""
    allocated = m.memory.get("gpu0.allocated")
    stats = m.stats(allocated) if allocated else {}
    return {name: {"low": stats[name].low, "high": stats[name].high}
            for name in PHASES if name in stats}  # fmt: skip


def pcie_idle(m: Measures, phase: str) -> float | None:
    """Return the share of a phase in which nothing crossed PCIe, in steps with recorded copies."""
    parts = [usage.idle(GPU_LINKS, phase) for usage in m.usages]
    whole = sum(seconds for _, seconds in parts)
    return sum(idle for idle, _ in parts) / whole if whole else None


def hidden_by_phase(m: Measures) -> dict[str, float]:
    """Return the share of the copy time in which the GPU computed, for each phase."""
    found = {}
    for phase in PHASES:
        copies = [intersection(usage.copying(), usage.step.during(phase)) for usage in m.usages]
        whole = sum(map(total_length, copies))
        hidden = sum(total_length(intersection(part, usage.busy.get(GPU, ())))
                     for part, usage in zip(copies, m.usages, strict=True))  # fmt: skip
        if whole:
            found[phase] = hidden / whole
    return found


def hardware(run: RecordedRun) -> dict[str, object]:
    """Return the run's machine in the form that certificates use."""
    recorded = run.observation.hardware
    return {
        "cpu": recorded.cpu_name,
        "cpus": recorded.cpus,
        "memory_bytes": sum(node.nbytes or 0 for node in recorded.nodes),
        **({"gpu": recorded.gpus[0].name} if recorded.gpus else {}),
    }


def markdown(figures: dict[str, dict[str, Any]]) -> str:
    """Return the table of docs/observe-study.md."""
    rows = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for name, of in figures.items():
        swing, idle, reserved = of["gpu_allocated"], of["pcie_idle"], of["gpu_reserved_peak"]
        memory = f"{swing['low'] / 2**30:.2f} to {swing['high'] / 2**30:.2f}" if swing else "-"
        moved = " / ".join(f"{of['pcie_nbytes'].get(link, 0) / 1e9:.2f}" for link in GPU_LINKS)
        cells = (
            name, f"{of['step_seconds'] * 1e3:.0f} ms", f"{memory} GiB",
            f"{reserved / 2**30:.1f} GiB" if reserved else "-",
            ", ".join(percent(idle.get(phase)) for phase in PHASES),
            percent(of["copies_hidden"]), f"{moved} GB", percent(of["gpu_busy"]),
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}".replace("%", " %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="directories of recorded runs")
    parser.add_argument("--save", action="store_true", help="write a result file")
    parser.add_argument("--recorded", metavar="COMMIT", help="the commit that recorded the runs")
    args = parser.parse_args()
    runs = {path.name: read_run(path) for path in args.runs}
    figures = {name: study(measure(run)) for name, run in runs.items()}
    print(markdown(figures))
    if args.save:
        machine = hardware(next(iter(runs.values())))
        results = {"recorded": args.recorded, "runs": figures}
        print(certificate.save("observe_study", results, machine=machine))


if __name__ == "__main__":
    main()
