"""Repeat MemAscend's test with ZeRO-Infinity and Penstock: all states on disk, bf16 and fp16.

    python bench/peers/memascend.py --plan-only --plans carry/plans
    python bench/peers/memascend.py --call bf16 --plans carry/plans --scratch /mnt/nvme

The calls `bf16` and `fp16` compare peak host memory, bytes written and step time, with plain torch
in HBM as the baseline; `batch` and `context` find the largest size that each system can run.
Penstock gets so little HBM and DRAM that its states are on disk, like ZeRO-Infinity's. Its limits
are found by planning for the whole machine, and confirmed by one run at the largest size that takes
no longer than --run-seconds per step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench import certificate
from bench.gpu_cells import Cell, plan_cell
from bench.peers import limits, render, table

CALLS = ("bf16", "fp16", "batch", "context")
PEER = "deepspeed-infinity"

ON_DISK = Cell(
    name="memascend", part="memascend", shape="1b", context=4096, batch=4, hbm="7GiB",
    dram="1GiB", nvme="30GiB", steps=4,
)  # fmt: skip
WHOLE = replace(ON_DISK, name="limit", hbm="130GiB", dram="105GiB")
"""The budgets of the whole machine."""

MOST = {"batch": 4096, "context": 1 << 22}
PEER_STARTS = {"batch": 16, "context": 32768}
"""Sizes at which the search starts. Smaller ones are known to fit and, limited by the disk, take as
long."""
PEER_SHARE = 0.5
"""Fraction of a call for the search of ZeRO-Infinity's limit. Penstock's run gets the rest."""
RUN_SECONDS = 60.0
"""Maximum seconds per step of Penstock's run, so that startup and compilation fit into half a
call."""
PLANNED = "limit-{vary}.json"


def make_plans(args: argparse.Namespace) -> None:
    args.plans.mkdir(parents=True, exist_ok=True)
    for dtype in ("bf16", "fp16"):
        cell = replace(sized(ON_DISK, args), dtype=dtype)
        planned = plan_cell(cell, args.scratch, compiled=not args.tiny)
        planned.plan.save(args.plans / f"memascend-{dtype}.json")
        print(f"memascend-{dtype}: {planned.cost.step_seconds:.2f} s", flush=True)
    for vary in limits.VARIES:
        plan_limit(vary, args)


def plan_limit(vary: str, args: argparse.Namespace) -> None:
    """Write every size that fits, and save the plan of the largest that is fast enough to run."""
    cell = sized(WHOLE, args)
    cell = replace(cell, batch=1) if vary == "context" else cell
    most = 4 * getattr(cell, vary) if args.tiny else MOST[vary]
    fits = limits.by_plan(cell, vary, most, args.scratch)
    sizes = [
        {"value": getattr(larger, vary), "step_seconds": planned.cost.step_seconds}
        for larger, planned in fits
    ]
    runs = [pair for pair in fits if pair[1].cost.step_seconds <= args.run_seconds]
    if runs:
        runs[-1][1].plan.save(args.plans / f"limit-{vary}-run.json")
    run = getattr(runs[-1][0], vary) if runs else None
    (args.plans / PLANNED.format(vary=vary)).write_text(
        json.dumps({"vary": vary, "fits": sizes, "run": run}, indent=1) + "\n"
    )
    print(f"{vary}: fits up to {sizes[-1] if sizes else None}, runs at {run}", flush=True)


def sized(cell: Cell, args: argparse.Namespace) -> Cell:
    return cell.tiny() if args.tiny else cell


def compare(dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run the baseline, then both systems with their states on disk."""
    cell = sized(ON_DISK, args)
    argv = ["--shape", cell.shape, "--context", str(cell.context), "--batch", str(cell.batch),
             "--steps", str(cell.steps), "--warm-up", "1", "--dtype", dtype,
             "--scratch", str(args.scratch), "--limit", str(args.limit),
             "--arms", "penstock", *([] if args.tiny else [PEER])]  # fmt: skip
    if args.tiny:
        argv += ["--hbm", cell.hbm, "--dram", cell.dram, "--least", "5"]
    else:
        argv += ["--plan", str(args.plans / f"memascend-{dtype}.json")]
    return {"calls": [table.run_table(table.arguments(argv))]}


def find_limits(vary: str, args: argparse.Namespace) -> dict[str, Any]:
    """Find ZeRO-Infinity's limit by running it, and Penstock's by its plan and one run."""
    deadline = time.monotonic() + args.limit
    planned = json.loads((args.plans / PLANNED.format(vary=vary)).read_text())
    results: dict[str, Any] = {"planned": planned, "peer": search_peer(vary, args)}
    table.clear(args.scratch)
    if planned["run"] and not args.tiny:
        argv = [*work_arguments(vary, args), "--steps", "1", "--warm-up", "0",
                 f"--{vary}", str(planned["run"]),
                 "--plan", str(args.plans / f"limit-{vary}-run.json")]  # fmt: skip
        results["ours"] = table.run_arm("penstock", argv, deadline - time.monotonic(), args.scratch)
        render.print_arm(results["ours"])
    return results


def search_peer(vary: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Search by doubling in one process, and return the attempts, even if it was stopped."""
    start = PEER_STARTS[vary]
    peer, most = PEER, MOST[vary]
    if args.tiny:
        peer, start = "plain", getattr(WHOLE.tiny(), vary)
        most = 4 * start
    table.build([peer], args.scratch, 0.3 * args.limit)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "limits.json"
        seconds = PEER_SHARE * args.limit
        line = [sys.executable, limits.__file__, "--arm", peer, "--vary", vary,
                "--json", str(path), "--most", str(most), "--limit", str(0.9 * seconds),
                *work_arguments(vary, args), f"--{vary}", str(start)]  # fmt: skip
        line += [] if args.tiny else ["--activations", "host"]
        if table.run_child(line, table.environment(peer, args.scratch), seconds) is None:
            print("the search was stopped; its attempts so far count", flush=True)
        return json.loads(path.read_text()) if path.exists() else None


def work_arguments(vary: str, args: argparse.Namespace) -> list[str]:
    """Return the arguments of the work. A search for the context uses a single sequence.

    If an argument is passed twice, the last one counts.
    """
    cell = sized(WHOLE, args)
    batch = 1 if vary == "context" else cell.batch
    return ["--shape", cell.shape, "--context", str(cell.context), "--batch", str(batch),
            "--scratch", str(args.scratch)]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--call", choices=CALLS)
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--plans", type=Path, default=Path("carry/plans"))
    parser.add_argument("--scratch", type=Path, default=Path("/var/tmp/penstock-bench"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=570)
    parser.add_argument("--run-seconds", type=float, default=RUN_SECONDS)
    parser.add_argument(
        "--tiny", action="store_true", help="rehearse with a tiny model, without a GPU"
    )
    args = parser.parse_args(argv)
    if args.plan_only:
        make_plans(args)
        return
    import torch  # noqa: F401  # so that the results file names the GPU

    args.scratch.mkdir(parents=True, exist_ok=True)
    for call in [args.call] if args.call else CALLS:
        results = find_limits(call, args) if call in limits.VARIES else compare(call, args)
        path = certificate.save(f"memascend-{call}", results, directory=args.out)
        if call not in limits.VARIES:
            print(render.markdown(json.loads(path.read_text())))
        print(path)


if __name__ == "__main__":
    main()
