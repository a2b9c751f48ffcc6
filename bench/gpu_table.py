"""The whole table of whole steps on a GPU, in parts of under ten minutes each.

    python bench/gpu_table.py --plan-only --plans carry/plans           # without a GPU, in advance
    python bench/gpu_table.py --part fast --plans carry/plans --out results

A cell is one process (bench_engine.py) with its yardsticks; its results file has the time line of a
step and what was predicted. Cells that do not fit into what is left of `--limit` are not started;
the next call with the same `--out` begins with them. A cell that dies leaves its last words in
`<cell>.log`, and what it had measured until then.

Device seconds on an H200 machine, and how many calls of under ten minutes:

| part      | what                                                    | seconds | calls |
|-----------|---------------------------------------------------------|---------|-------|
| fast      | 3b at 4 and 16 x 4,096 in 24 GiB; same body, plain torch | 160     | 1     |
| long      | 8b at 4 x 4,096, 65,536, 131,072, 262,144               | 640     | 2     |
| disk      | 3b in 16 GiB of DRAM and a disk                         | 80      | 1     |
| curve     | 3b, DRAM 8 to 44 GiB; equal plans once                  | 260     | 1     |
| moments   | 3b with fp32, bf16, int8 moments; three loss curves     | 160     | 1     |
| 32b       | Qwen2.5-32B's sizes, int8 moments, two steps            | 110     | 1     |
| peers     | peers/table.py: DRAM arms, then disk arms               | 1,250   | 3     |
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
from bench.gpu_cells import PARTS, Cell, cells, plan_cell
from penstock.errors import PenstockError
from penstock.plan.plan import Plan
from penstock.planner.plan_view import plan_json

HERE = Path(__file__).parent
SCRATCH = Path("/var/tmp/penstock-bench")
PREDICTED = ".predicted.json"
PEERS = {
    "dram": ("penstock", "deepspeed-zero3", "deepspeed-zero3-tuned", "deepspeed-zero2"),
    "others": ("fsdp2", "roundpipe-sync", "roundpipe-async", "deepspeed-infinity-opt"),
    "disk": ("deepspeed-infinity",),
}
"""One call each."""

LEFT = 3
"""Exit status: call again, there are cells left."""

_SLACK = 15


def make_plans(chosen: argparse.Namespace) -> int:
    """One file for each cell, and one for the same with everything in HBM where that is wanted."""
    chosen.plans.mkdir(parents=True, exist_ok=True)
    failed = 0
    for cell in wanted_cells(chosen):
        for one in [cell, cell.whole()] if cell.resident else [cell]:
            path = chosen.plans / f"{one.name}.json"
            try:
                planned = plan_cell(one, chosen.scratch, compiled=not chosen.tiny)
            except PenstockError as problem:
                failed += 1
                print(f"{one.name}: {problem}", flush=True)
                continue
            planned.plan.save(path)
            told = plan_json(planned)
            path.with_suffix(PREDICTED).write_text(json.dumps(told, indent=1) + "\n")
            held = ", ".join(f"{tier} {parts['peak'] / 2**30:.1f}"
                             for tier, parts in told["tiers"].items())  # fmt: skip
            print(f"{one.name}: {told['step_seconds']:.2f} s; GiB: {held}", flush=True)
    return 1 if failed else 0


def wanted_cells(chosen: argparse.Namespace) -> list[Cell]:
    found = [cell for cell in cells() if chosen.part in (None, cell.part)]
    if chosen.only:
        found = [cell for cell in found if cell.name in chosen.only]
    return [cell.tiny() for cell in found] if chosen.tiny else found


def run_cells(chosen: argparse.Namespace) -> int:
    until = time.monotonic() + chosen.limit
    left: list[str] = []
    bad: list[str] = []
    twins = same_plans(wanted_cells(chosen), chosen.plans)
    for cell in wanted_cells(chosen):
        if (chosen.out / f"{cell.name}.done").exists():
            continue
        if cell.name in twins:
            print(f"== {cell.name}: the same plan as {twins[cell.name]}, not run again", flush=True)
            continue
        room = until - time.monotonic() - _SLACK
        if room < min(cell.seconds, chosen.limit - _SLACK - 5):
            left.append(cell.name)
            continue
        code = run_logged(cell.name, cell_line(cell, chosen), room, chosen.out)
        (bad.append(cell.name) if code else (chosen.out / f"{cell.name}.done").touch())
    if bad:
        print("failed:", ", ".join(bad), "(see their logs)")
    if left:
        print("not started, for want of time:", ", ".join(left))
    return 1 if bad else LEFT if left else 0


def same_plans(found: Sequence[Cell], plans: Path) -> dict[str, str]:
    """Cells whose larger budget changes nothing: which earlier cell has their plan."""
    twins: dict[str, str] = {}
    seen: list[tuple[str, Plan]] = []
    for cell in found:
        path = plans / f"{cell.name}.json"
        if not path.exists():
            continue
        plan = Plan.load(path)
        for name, other in seen:
            if (plan.placement, plan.workload, plan.pools) == (
                other.placement, other.workload, other.pools
            ):  # fmt: skip
                twins[cell.name] = name
                break
        else:
            seen.append((cell.name, plan))
    return twins


def cell_line(cell: Cell, chosen: argparse.Namespace) -> list[str]:
    """bench_engine.py with what the cell says. Budgets are in the plan; told again for the file."""
    plan = chosen.plans / f"{cell.name}.json"
    line = [sys.executable, str(HERE / "bench_engine.py"), "--save", "--repeat-weights",
            "--name", cell.name, "--plan", str(plan)]  # fmt: skip
    for field in ("shape", "context", "batch", "micro_batch", "hbm", "dram", "dtype", "moments",
                  "steps"):  # fmt: skip
        value = getattr(cell, field)
        if value is not None:
            line += [f"--{field.replace('_', '-')}", str(value)]
    if cell.nvme:
        line += ["--nvme", f"{chosen.scratch}:{cell.nvme}"]
    if cell.resident:
        line += ["--resident", str(chosen.plans / f"{cell.whole().name}.json")]
    return [*line, *(["--plain"] if cell.plain else [])]


def run_logged(name: str, line: Sequence[str], seconds: float, out: Path) -> int:
    """To a log, whose end is shown; killed when its time is over. The exit status."""
    told = os.environ | {"BENCH_RESULTS": str(out.resolve()), "BENCH_COMMIT": certificate.commit()}
    log = out / f"{name}.log"
    print(f"== {name}", flush=True)
    began = time.monotonic()
    with log.open("w") as stream:
        child = subprocess.Popen(
            line, stdout=stream, stderr=subprocess.STDOUT, env=told, start_new_session=True
        )
        try:
            code = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
    tail = log.read_text(errors="replace").splitlines()[-12:]
    print("\n".join(f"   {words[:240]}" for words in tail))
    print(f"   {name}: status {code} after {time.monotonic() - began:.0f} s", flush=True)
    return code


def run_scripts(chosen: argparse.Namespace) -> int:
    """The parts that are scripts of their own, with the same limit."""
    common = ["--scratch", str(chosen.scratch), "--out", str(chosen.out)]
    size = ["--shape", "tiny", "--context", "64", "--batch", "2"] if chosen.tiny else []
    limit = ["--limit", str(chosen.limit)]
    if chosen.part == "peers":
        line = [str(HERE / "peers/table.py"), *size, *limit, "--arms", *PEERS[chosen.call]]
        if not chosen.tiny:
            line += ["--plan", str(chosen.plans / "fast-4x4096.json")]
        earlier = sorted(chosen.out.glob("peers_*.json"))
        line += ["--join", str(earlier[-1])] if earlier else []
    else:
        line = [str(HERE / "peers/memascend.py"), "--plans", str(chosen.plans), *limit]
        line += ["--tiny"] if chosen.tiny else []
        line += ["--call", chosen.call] if chosen.call else []
    return subprocess.run([sys.executable, *line, *common], check=False).returncode


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--only", nargs="+", help="cells by name")
    parser.add_argument("--call", help="peers: dram, others or disk; memascend: see there")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--plans", type=Path, default=Path("carry/plans"))
    parser.add_argument("--out", type=Path, default=certificate.RESULTS)
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="a folder on the disk")
    parser.add_argument("--limit", type=float, default=570, help="seconds for this call")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal, without a GPU")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    chosen = arguments(words)
    if chosen.plan_only:
        return make_plans(chosen)
    if chosen.part is None:
        raise SystemExit("--part says which; --plan-only makes plans for all")
    chosen.out.mkdir(parents=True, exist_ok=True)
    chosen.scratch.mkdir(parents=True, exist_ok=True)
    if chosen.part in ("peers", "memascend"):
        chosen.call = chosen.call or ("dram" if chosen.part == "peers" else None)
        return run_scripts(chosen)
    code = run_cells(chosen)
    if chosen.part == "moments" and "moments-curves" in (chosen.only or ["moments-curves"]):
        line = [sys.executable, str(HERE / "bench_moments.py"), "--save"]
        line += ["--shape", "tiny", "--context", "64", "--steps", "5"] if chosen.tiny else []
        code = run_logged("moments-curves", line, chosen.limit, chosen.out) or code
    return code


if __name__ == "__main__":
    sys.exit(main())
