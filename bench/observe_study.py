"""What the study of offloaded training found, looked for in recorded runs: one row a run.

    penstock profile -o runs/zero3 --exact 4,6 -- python bench/peers/run.py --arm deepspeed-zero3
    python bench/observe_study.py runs/plain runs/zero3 runs/penstock --save

The study (arXiv 2406.10728): memory of the GPU swings widely within an iteration and is lowest in
the update; PCIe is idle then; transfers hide little behind compute. Figures are of settled steps,
bytes and overlap of the exact ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from penstock.observe.measures import Measures, measure
from penstock.observe.records import read_run
from penstock.observe.steps import settled
from penstock.observe.usage import GPU, GPU_LINKS

PHASES = ("forward", "backward", "update")


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
        "pcie_idle": {name: share for name in PHASES if (share := idle(m, name)) is not None},
        "pcie_nbytes": {link: m.links[link].nbytes for link in GPU_LINKS if link in m.links},
        "copies_hidden": m.hidden,
        "gpu_busy": m.busy.get(GPU),
        "host_peak": next((p.measured for p in m.peaks if p.key == "host.rss"), None),
    }


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


def markdown(found: dict[str, dict[str, Any]]) -> str:
    rows = ["| run | step | GPU memory, low to high | PCIe idle in forward, backward, update | "
            "copies hidden behind compute | to / from the GPU a step | GPU computes |",
            "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, of in found.items():
        swing, quiet = of["gpu_allocated"], of["pcie_idle"]
        memory = f"{swing['low'] / 2**30:.1f} to {swing['high'] / 2**30:.1f} GiB" if swing else "-"
        shares = ", ".join(percent(quiet.get(phase)) for phase in PHASES)
        moved = " / ".join(f"{of['pcie_nbytes'].get(link, 0) / 1e9:.2f}" for link in GPU_LINKS)
        rows.append(
            f"| {name} | {of['step_seconds']:.2f} s | {memory} | {shares} | "
            f"{percent(of['copies_hidden'])} | {moved} GB | {percent(of['gpu_busy'])} |"
        )
    return "\n".join(rows)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    found = {path.name: study(measure(read_run(path))) for path in chosen.runs}
    print(markdown(found))
    if chosen.save:
        import torch  # noqa: F401  # so that the certificate names the GPU

        print(certificate.save("observe_study", found))


if __name__ == "__main__":
    main()
