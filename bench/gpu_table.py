"""Measure the table of training steps on a GPU, in parts of under ten minutes each.

    python bench/gpu_table.py --plan-only --plans carry/plans           # without a GPU, in advance
    python bench/gpu_table.py --part fast --plans carry/plans --out results

A cell is one process (bench_engine.py) with its baselines. Its results file contains the timeline
of a step and the prediction. Cells that do not fit into the rest of `--limit` are not started; the
next call with the same `--out` starts with them. A cell that fails leaves its output in
`<cell>.log`, and the results it had until then.

Seconds on an H200 machine, and the number of calls of under ten minutes:

| part      | what                                                    | seconds | calls |
|-----------|---------------------------------------------------------|---------|-------|
| fast      | 3b at 4 and 16 x 4,096 in 24 GiB; same layers, plain torch | 160     | 1     |
| keep      | 3b at 4 and 16 x 4,096 in 24 and 80 GiB: kept layers     | 280     | 1     |
| large     | 8b at 64 x 4,096 in 130 and in 24 GiB                   | 290     | 1     |
| long      | 8b at 4 x 4,096, 65,536, 131,072, 262,144               | 640     | 2     |
| longest   | 8b at 524,288: two steps of 8 layers, one of 32         | 1,350   | 2     |
| disk      | 3b in 16 GiB of DRAM and a disk                         | 80      | 1     |
| curve     | 3b, DRAM 8 to 44 GiB; equal plans once                  | 260     | 1     |
| moments   | 3b with fp32, bf16, int8 moments; three loss curves     | 160     | 1     |
| 32b       | Qwen2.5-32B's sizes, int8 moments, two steps            | 110     | 1     |
| moe       | OLMoE-1B-7B, 12 layers of Qwen3-30B-A3B, gpt-oss-20b     | 930     | 2     |
| peers     | peers/table.py: torch's own arms, DRAM arms, disk arms   | 1,400   | 4     |
| memascend | peers/memascend.py: all on disk, bf16 and fp16, limits  | 860     | 4     |
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from bench.gpu_cells import PARTS, PREDICTED, Cell, cells, plan_cell
from penstock.errors import PenstockError
from penstock.plan.plan import Plan
from penstock.planner.plan_view import plan_json

HERE = Path(__file__).parent
SCRATCH = Path("/var/tmp/penstock-bench")
PEERS = {
    "torch": ("penstock", "plain-liger", "plain-liger-stored"),
    "dram": ("penstock", "deepspeed-zero3", "deepspeed-zero3-tuned", "deepspeed-zero2"),
    "others": ("fsdp2", "roundpipe-sync", "roundpipe-async", "deepspeed-infinity-opt"),
    "disk": ("deepspeed-infinity",),
}
"""Arms of the comparison by call."""

LEFT = 3
"""Exit code: some cells are left, call again."""

_SLACK = 15


def make_plans(args: argparse.Namespace) -> int:
    """Write a plan for each cell, and one with everything in HBM where the cell asks for it."""
    args.plans.mkdir(parents=True, exist_ok=True)
    failed = 0
    for cell in select_cells(args):
        for variant in [cell, cell.whole()] if cell.resident else [cell]:
            path = args.plans / f"{variant.name}.json"
            try:
                planned = plan_cell(variant, args.scratch, compiled=not args.tiny, traced=True)
            except PenstockError as problem:
                failed += 1
                print(f"{variant.name}: {problem}", flush=True)
                continue
            planned.plan.save(path)
            prediction = plan_json(planned)
            path.with_suffix(PREDICTED).write_text(json.dumps(prediction, indent=1) + "\n")
            peaks = ", ".join(f"{tier} {parts['peak'] / 2**30:.1f}"
                             for tier, parts in prediction["tiers"].items())  # fmt: skip
            print(f"{variant.name}: {prediction['step_seconds']:.2f} s; GiB: {peaks}", flush=True)
    return 1 if failed else 0


def select_cells(args: argparse.Namespace) -> list[Cell]:
    """Return the cells that the arguments select."""
    selected = [cell for cell in cells() if args.part in (None, cell.part)]
    if args.only:
        selected = [cell for cell in selected if cell.name in args.only]
    return [cell.tiny() for cell in selected] if args.tiny else selected


def run_cells(args: argparse.Namespace) -> int:
    """Run the selected cells that fit into the time; return the exit code."""
    deadline = time.monotonic() + args.limit
    left: list[str] = []
    bad: list[str] = []
    equal_plans = find_equal_plans(select_cells(args), args.plans)
    for cell in select_cells(args):
        if (args.out / f"{cell.name}.done").exists():
            continue
        if cell.name in equal_plans:
            print(
                f"== {cell.name}: has the plan of {equal_plans[cell.name]} and is not run again",
                flush=True,
            )
            continue
        remaining = deadline - time.monotonic() - _SLACK
        if remaining < min(cell.seconds, args.limit - _SLACK - 5):
            left.append(cell.name)
            continue
        code = run_logged(cell.name, cell_command(cell, args), remaining, args.out)
        (bad.append(cell.name) if code else (args.out / f"{cell.name}.done").touch())
    if bad:
        print("failed:", ", ".join(bad), "(see the logs)")
    if left:
        print("not started because time ran out:", ", ".join(left))
    return 1 if bad else LEFT if left else 0


def find_equal_plans(selected: Sequence[Cell], plans: Path) -> dict[str, str]:
    """Return, for each cell whose plan equals that of an earlier cell, the earlier cell."""
    equal_plans: dict[str, str] = {}
    seen: list[tuple[str, Plan]] = []
    for cell in selected:
        path = plans / f"{cell.name}.json"
        if not path.exists():
            continue
        plan = Plan.load(path)
        for name, other in seen:
            if (plan.placement, plan.workload, plan.pools) == (
                other.placement, other.workload, other.pools
            ):  # fmt: skip
                equal_plans[cell.name] = name
                break
        else:
            seen.append((cell.name, plan))
    return equal_plans


def cell_command(cell: Cell, args: argparse.Namespace) -> list[str]:
    """Return the command line of bench_engine.py for a cell.

    The budgets are in the plan already; they are passed so that the results file contains them.
    """
    plan = args.plans / f"{cell.name}.json"
    line = [sys.executable, str(HERE / "bench_engine.py"), "--save", "--repeat-weights",
            "--name", cell.name, "--plan", str(plan)]  # fmt: skip
    for field in ("shape", "context", "batch", "micro_batch", "hbm", "dram", "dtype", "moments",
                  "steps"):  # fmt: skip
        value = getattr(cell, field)
        if value is not None:
            line += [f"--{field.replace('_', '-')}", str(value)]
    if cell.nvme:
        line += ["--nvme", f"{args.scratch}:{cell.nvme}"]
    if cell.resident:
        line += ["--resident", str(args.plans / f"{cell.whole().name}.json")]
    line += ["--compile"] if cell.compile else []
    return [*line, *(["--plain"] if cell.plain else [])]


def run_logged(name: str, line: Sequence[str], seconds: float, out: Path) -> int:
    """Run a command with its output in a log, print the end of the log, and return the exit code.

    The command and its children are killed after `seconds`.
    """
    environment = os.environ | {
        "BENCH_RESULTS": str(out.resolve()),
        "BENCH_COMMIT": certificate.commit(),
    }
    # Otherwise every run would compile all Python files again, and its start-up would show it.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    log = out / f"{name}.log"
    print(f"== {name}", flush=True)
    began = time.monotonic()
    with log.open("w") as stream:
        child = subprocess.Popen(
            line, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
    tail = log.read_text(errors="replace").splitlines()[-12:]
    print("\n".join(f"   {words[:240]}" for words in tail))
    print(f"   {name}: exit code {code} after {time.monotonic() - began:.0f} s", flush=True)
    return code


def run_scripts(args: argparse.Namespace) -> int:
    """Run the parts that are separate scripts, with the same limit."""
    common = ["--scratch", str(args.scratch), "--out", str(args.out)]
    size = ["--shape", "tiny", "--context", "64", "--batch", "2"] if args.tiny else []
    limit = ["--limit", str(args.limit)]
    if args.part == "peers":
        line = [str(HERE / "peers/table.py"), *size, *limit, "--arms", *PEERS[args.call]]
        if not args.tiny:
            line += ["--plan", str(args.plans / "fast-4x4096.json")]
        earlier = sorted(args.out.glob("peers_*.json"))
        line += ["--join", str(earlier[-1])] if earlier else []
    else:
        line = [str(HERE / "peers/memascend.py"), "--plans", str(args.plans), *limit]
        line += ["--tiny"] if args.tiny else []
        line += ["--call", args.call] if args.call else []
    return subprocess.run([sys.executable, *line, *common], check=False).returncode


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--only", nargs="+", help="names of cells")
    parser.add_argument(
        "--call", help="peers: torch, dram, others or disk; memascend: bf16, fp16, batch or context"
    )
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--plans", type=Path, default=Path("carry/plans"))
    parser.add_argument("--out", type=Path, default=certificate.RESULTS)
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="a directory on the disk")
    parser.add_argument("--limit", type=float, default=570, help="seconds for this call")
    parser.add_argument(
        "--tiny", action="store_true", help="rehearse with a tiny model, without a GPU"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    if args.plan_only:
        return make_plans(args)
    if args.part is None:
        raise SystemExit("pass --part to select what to measure, or --plan-only to make all plans")
    args.out.mkdir(parents=True, exist_ok=True)
    args.scratch.mkdir(parents=True, exist_ok=True)
    if args.part in ("peers", "memascend"):
        args.call = args.call or ("dram" if args.part == "peers" else None)
        return run_scripts(args)
    code = run_cells(args)
    if args.part == "moments" and "moments-curves" in (args.only or ["moments-curves"]):
        line = [sys.executable, str(HERE / "bench_moments.py"), "--save"]
        line += ["--shape", "tiny", "--context", "64", "--steps", "5"] if args.tiny else []
        code = run_logged("moments-curves", line, args.limit, args.out) or code
    return code


if __name__ == "__main__":
    sys.exit(main())
