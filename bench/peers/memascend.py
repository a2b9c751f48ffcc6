"""MemAscend's own test: all states on disk, bf16 and fp16, ZeRO-Infinity and Penstock in one run.

    python bench/peers/memascend.py --plan-only --plans carry/plans
    python bench/peers/memascend.py --call bf16 --plans carry/plans --scratch /mnt/nvme

Calls: `bf16` and `fp16` compare host peak, bytes written and step time, with plain torch in HBM as
the yardstick; `batch` and `context` find the largest that each can do. Penstock is held to so
little HBM and DRAM that what it trains rests on disk, as ZeRO-Infinity's does. The limits are found
with budgets of the whole machine: by the plan alone, and one run at the largest that takes no
longer than --run-seconds a step.
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
"""What the machine has; MemAscend's limits are the host's."""

MOST = {"batch": 4096, "context": 1 << 22}
PEER_STARTS = {"batch": 16, "context": 32768}
"""Smaller steps take as long, by the disk, and are known to fit."""
PEER_SHARE = 0.5
"""Of a call, for the peer's search: what it does not need is left to our run."""
RUN_SECONDS = 60.0
"""Leaves room for start-up and compilation in half a call."""
PLANNED = "limit-{vary}.json"


def make_plans(chosen: argparse.Namespace) -> None:
    chosen.plans.mkdir(parents=True, exist_ok=True)
    for dtype in ("bf16", "fp16"):
        cell = replace(sized(ON_DISK, chosen), dtype=dtype)
        planned = plan_cell(cell, chosen.scratch, compiled=not chosen.tiny)
        planned.plan.save(chosen.plans / f"memascend-{dtype}.json")
        print(f"memascend-{dtype}: {planned.cost.step_seconds:.2f} s", flush=True)
    for vary in limits.VARIES:
        plan_limit(vary, chosen)


def plan_limit(vary: str, chosen: argparse.Namespace) -> None:
    """Write down every size that fits, and keep the plan of the largest worth running."""
    cell = sized(WHOLE, chosen)
    cell = replace(cell, batch=1) if vary == "context" else cell
    most = 4 * getattr(cell, vary) if chosen.tiny else MOST[vary]
    fits = limits.by_plan(cell, vary, most, chosen.scratch)
    told = [
        {"value": getattr(one, vary), "step_seconds": planned.cost.step_seconds}
        for one, planned in fits
    ]
    runs = [pair for pair in fits if pair[1].cost.step_seconds <= chosen.run_seconds]
    if runs:
        runs[-1][1].plan.save(chosen.plans / f"limit-{vary}-run.json")
    run = getattr(runs[-1][0], vary) if runs else None
    (chosen.plans / PLANNED.format(vary=vary)).write_text(
        json.dumps({"vary": vary, "fits": told, "run": run}, indent=1) + "\n"
    )
    print(f"{vary}: fits up to {told[-1] if told else None}, to be run at {run}", flush=True)


def sized(cell: Cell, chosen: argparse.Namespace) -> Cell:
    return cell.tiny() if chosen.tiny else cell


def compare(dtype: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Both on disk, with the yardstick first."""
    cell = sized(ON_DISK, chosen)
    words = ["--shape", cell.shape, "--context", str(cell.context), "--batch", str(cell.batch),
             "--steps", str(cell.steps), "--warm-up", "1", "--dtype", dtype,
             "--scratch", str(chosen.scratch), "--limit", str(chosen.limit),
             "--arms", "penstock", *([] if chosen.tiny else [PEER])]  # fmt: skip
    if chosen.tiny:
        words += ["--hbm", cell.hbm, "--dram", cell.dram, "--least", "5"]
    else:
        words += ["--plan", str(chosen.plans / f"memascend-{dtype}.json")]
    return {"calls": [table.run_table(table.arguments(words))]}


def find_limits(vary: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """The peer's by trying, ours by the plan and one run."""
    until = time.monotonic() + chosen.limit
    planned = json.loads((chosen.plans / PLANNED.format(vary=vary)).read_text())
    found: dict[str, Any] = {"planned": planned, "peer": search_peer(vary, chosen)}
    table.clear(chosen.scratch)
    if planned["run"] and not chosen.tiny:
        words = [*work_words(vary, chosen), "--steps", "1", "--warm-up", "0",
                 f"--{vary}", str(planned["run"]),
                 "--plan", str(chosen.plans / f"limit-{vary}-run.json")]  # fmt: skip
        found["ours"] = table.run_arm("penstock", words, until - time.monotonic(), chosen.scratch)
        render.tell(found["ours"])
    return found


def search_peer(vary: str, chosen: argparse.Namespace) -> dict[str, Any] | None:
    """By doubling, in one process; what it found until it was stopped counts."""
    start = PEER_STARTS[vary]
    peer, most = PEER, MOST[vary]
    if chosen.tiny:
        peer, start = "plain", getattr(WHOLE.tiny(), vary)
        most = 4 * start
    table.build([peer], chosen.scratch, 0.3 * chosen.limit)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "limits.json"
        seconds = PEER_SHARE * chosen.limit
        line = [sys.executable, limits.__file__, "--arm", peer, "--vary", vary,
                "--json", str(path), "--most", str(most), "--limit", str(0.9 * seconds),
                *work_words(vary, chosen), f"--{vary}", str(start)]  # fmt: skip
        line += [] if chosen.tiny else ["--activations", "host"]
        if table.run_child(line, table.environment(peer, chosen.scratch), seconds) is None:
            print("the peer's search was stopped: what it found until then counts", flush=True)
        return json.loads(path.read_text()) if path.exists() else None


def work_words(vary: str, chosen: argparse.Namespace) -> list[str]:
    """One sequence where it is to be long; of what is given twice, the last word counts."""
    cell = sized(WHOLE, chosen)
    batch = 1 if vary == "context" else cell.batch
    return ["--shape", cell.shape, "--context", str(cell.context), "--batch", str(batch),
            "--scratch", str(chosen.scratch)]  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--call", choices=CALLS)
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--plans", type=Path, default=Path("carry/plans"))
    parser.add_argument("--scratch", type=Path, default=Path("/var/tmp/penstock-bench"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=570)
    parser.add_argument("--run-seconds", type=float, default=RUN_SECONDS)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal, without a GPU")
    chosen = parser.parse_args(words)
    if chosen.plan_only:
        make_plans(chosen)
        return
    import torch  # noqa: F401  # so that the certificate names the GPU

    chosen.scratch.mkdir(parents=True, exist_ok=True)
    for call in [chosen.call] if chosen.call else CALLS:
        found = find_limits(call, chosen) if call in limits.VARIES else compare(call, chosen)
        path = certificate.save(f"memascend-{call}", found, directory=chosen.out)
        if call not in limits.VARIES:
            print(render.markdown(json.loads(path.read_text())))
        print(path)


if __name__ == "__main__":
    main()
