"""The largest batch and context: by doubling, until memory or time runs out.

    python bench/peers/limits.py --arm deepspeed-infinity --vary context --json out.json

A peer is started once and given larger and larger steps; the file is written after each, so that a
process which the kernel kills has told what it could do. Penstock's limit is its plan's: `by_plan`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from bench.gpu_cells import MACHINE, Cell, settings_of, survey_model
from bench.measuring import HostPeak, device_peak, forget_device_peak
from bench.peers.run import ARMS, add_work, find_arm, leave, work_of
from bench.peers.work import Step, Work
from penstock.machine.presets import preset
from penstock.planner import PlanResult
from penstock.planner.planner import find_plan

VARIES = ("batch", "context")


def doublings(
    attempt: Callable[[int], dict[str, Any]], start: int, most: int, until: float
) -> list[dict[str, Any]]:
    """Attempts at start, 2 x start, ...: the last is the first that failed, if any did."""
    found: list[dict[str, Any]] = []
    value = start
    while value <= most:
        took = found[-1]["seconds"] if found else 0.0
        if time.monotonic() + 2 * took > until:
            found.append({"value": value, "ok": False, "problem": "out of time", "seconds": 0.0})
            break
        found.append({"value": value} | attempt(value))
        if not found[-1]["ok"]:
            break
        value *= 2
    return found


def largest(attempts: Sequence[dict[str, Any]]) -> int:
    return max((one["value"] for one in attempts if one["ok"]), default=0)


def attempt_step(step: Step, work: Work, host: HostPeak) -> dict[str, Any]:
    forget_device_peak()
    began = time.monotonic()
    told: dict[str, Any] = {"ok": True}
    try:
        told["loss"] = step(work.batch_of_tokens())
    except torch.OutOfMemoryError as problem:
        told = {"ok": False, "problem": str(problem)[:300]}
    return told | {
        "seconds": time.monotonic() - began,
        "host_peak_nbytes": host.nbytes,
        "device_allocated": device_peak()[0],
    }


def search_peer(chosen: argparse.Namespace, work: Work) -> list[dict[str, Any]]:
    """The context of the config is the largest that will be tried: positions cost nothing."""
    until = time.monotonic() + chosen.limit
    found: list[dict[str, Any]] = []
    widest = replace(work, context=chosen.most) if chosen.vary == "context" else work
    with HostPeak() as host, find_arm(chosen.arm)(widest) as step:

        def attempt(value: int) -> dict[str, Any]:
            changed: dict[str, Any] = {chosen.vary: value}
            told = attempt_step(step, replace(work, **changed), host)
            found.append({"value": value} | told)
            print(f"  {chosen.vary} {value}: {told}", flush=True)
            save(chosen, work, found)
            return told

        found = doublings(attempt, getattr(work, chosen.vary), chosen.most, until)
    return found


def by_plan(cell: Cell, vary: str, most: int, scratch: Path) -> list[tuple[Cell, PlanResult]]:
    """Every doubling that fits, with its plan: nothing is run."""
    from penstock.engine.prepare import workload_for
    from penstock.plan.budget import parse_budget, with_paths

    given = cell.budget(scratch)
    budget = parse_budget(
        preset(MACHINE), hbm=given["hbm"], dram=given["dram"], nvme=tuple(given["nvme"])
    )
    machine, _ = with_paths(preset(MACHINE), budget)
    found: list[tuple[Cell, PlanResult]] = []
    value = getattr(cell, vary)
    while value <= most:
        changed: dict[str, Any] = {vary: value}
        larger = replace(cell, name=f"{cell.name}-{vary}-{value}", **changed)
        inventory = survey_model(larger)
        workload = workload_for(inventory, settings_of(larger), compiled=True)
        planned = find_plan(inventory, workload, budget, machine)
        if planned is None:
            break
        found.append((larger, planned))
        value *= 2
    return found


def save(chosen: argparse.Namespace, work: Work, attempts: Sequence[dict[str, Any]]) -> None:
    if chosen.json:
        told = {"arm": chosen.arm, "vary": chosen.vary, "work": asdict(work),
                "largest": largest(attempts), "attempts": list(attempts)}  # fmt: skip
        chosen.json.write_text(json.dumps(told, indent=1) + "\n")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--vary", choices=VARIES, required=True)
    parser.add_argument("--most", type=int, default=1 << 20)
    parser.add_argument("--limit", type=float, default=500, help="seconds")
    parser.add_argument("--json", type=Path)
    add_work(parser)
    chosen = parser.parse_args(words)
    work = work_of(chosen)
    save(chosen, work, [])
    save(chosen, work, search_peer(chosen, work))
    leave(0)


if __name__ == "__main__":
    main()
