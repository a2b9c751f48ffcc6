"""Find the largest batch or context by doubling, until memory or time runs out.

    python bench/peers/limits.py --arm deepspeed-infinity --vary context --json out.json

A system is started once and runs larger and larger steps. The file is written after each, so that
the results survive if the kernel kills the process. Penstock's limit follows from its plan: see
`by_plan`.
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
    attempt: Callable[[int], dict[str, Any]], start: int, most: int, deadline: float
) -> list[dict[str, Any]]:
    """Attempt start, 2 x start and so on, until one fails; return all attempts."""
    attempts_made: list[dict[str, Any]] = []
    value = start
    while value <= most:
        took = attempts_made[-1]["seconds"] if attempts_made else 0.0
        if time.monotonic() + 2 * took > deadline:
            attempts_made.append(
                {"value": value, "ok": False, "problem": "out of time", "seconds": 0.0}
            )
            break
        attempts_made.append({"value": value} | attempt(value))
        if not attempts_made[-1]["ok"]:
            break
        value *= 2
    return attempts_made


def largest(attempts: Sequence[dict[str, Any]]) -> int:
    return max((attempt["value"] for attempt in attempts if attempt["ok"]), default=0)


def attempt_step(step: Step, work: Work, host: HostPeak) -> dict[str, Any]:
    forget_device_peak()
    began = time.monotonic()
    outcome: dict[str, Any] = {"ok": True}
    try:
        outcome["loss"] = step(work.batch_of_tokens())
    except torch.OutOfMemoryError as problem:
        outcome = {"ok": False, "problem": str(problem)[:300]}
    return outcome | {
        "seconds": time.monotonic() - began,
        "host_peak_nbytes": host.nbytes,
        "device_allocated": device_peak()[0],
    }


def search_peer(args: argparse.Namespace, work: Work) -> list[dict[str, Any]]:
    """Search the limit of another system by running it.

    The model is built for the largest context that may be tried, because positions need no memory.
    """
    deadline = time.monotonic() + args.limit
    attempts_made: list[dict[str, Any]] = []
    widest = replace(work, context=args.most) if args.vary == "context" else work
    with HostPeak() as host, find_arm(args.arm)(widest) as step:

        def attempt(value: int) -> dict[str, Any]:
            changed: dict[str, Any] = {args.vary: value}
            outcome = attempt_step(step, replace(work, **changed), host)
            attempts_made.append({"value": value} | outcome)
            print(f"  {args.vary} {value}: {outcome}", flush=True)
            save(args, work, attempts_made)
            return outcome

        attempts_made = doublings(attempt, getattr(work, args.vary), args.most, deadline)
    return attempts_made


def by_plan(cell: Cell, vary: str, most: int, scratch: Path) -> list[tuple[Cell, PlanResult]]:
    """Return every doubling for which there is a plan. Nothing is run."""
    from penstock.engine.plan_choice import workload_for
    from penstock.plan.budget import parse_budget, with_paths

    given = cell.budget(scratch)
    budget = parse_budget(
        preset(MACHINE), hbm=given["hbm"], dram=given["dram"], nvme=tuple(given["nvme"])
    )
    machine, _ = with_paths(preset(MACHINE), budget)
    plans: list[tuple[Cell, PlanResult]] = []
    value = getattr(cell, vary)
    while value <= most:
        changed: dict[str, Any] = {vary: value}
        larger = replace(cell, name=f"{cell.name}-{vary}-{value}", **changed)
        inventory = survey_model(larger)
        workload = workload_for(inventory, settings_of(larger), compiled=True)
        planned = find_plan(inventory, workload, budget, machine)
        if planned is None:
            break
        plans.append((larger, planned))
        value *= 2
    return plans


def save(args: argparse.Namespace, work: Work, attempts: Sequence[dict[str, Any]]) -> None:
    if args.json:
        results = {"arm": args.arm, "vary": args.vary, "work": asdict(work),
                "largest": largest(attempts), "attempts": list(attempts)}  # fmt: skip
        args.json.write_text(json.dumps(results, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--vary", choices=VARIES, required=True)
    parser.add_argument("--most", type=int, default=1 << 20)
    parser.add_argument("--limit", type=float, default=500, help="seconds")
    parser.add_argument("--json", type=Path)
    add_work(parser)
    args = parser.parse_args(argv)
    work = work_of(args)
    save(args, work, [])
    save(args, work, search_peer(args, work))
    leave(0)


if __name__ == "__main__":
    main()
