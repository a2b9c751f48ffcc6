"""Run arms one after the other on the same work and write one results file and one table.

    python bench/peers/table.py --shape 3b --context 4096 --batch 4 --scratch /mnt/nvme \
        --arms penstock deepspeed-zero3 fsdp2 --limit 570 --out bench/results
    python bench/peers/table.py --markdown bench/results/peers_3b-4x4096_nvidia-h200_2026-11-15.json

The baseline (plain torch in HBM, or the arm of `--baseline`) runs first in every call. An arm that
fails keeps its measurements until then, and the way it failed is its result. `--join FILE` adds
arms to the file of an earlier call, for work that takes more than one call: each arm is compared
with the baseline of its own call. Arms whose time limit does not fit into the rest of `--limit` are
not started, and are listed at the end.

Time on an H200 with 3b at 4 x 4,096: plain, penstock and each DRAM arm take 60 to 100 s (mostly
startup; DeepSpeed's kernels compile once, in 60 s), deepspeed-infinity 300 s for 3 steps, and
deepspeed-infinity-opt 150 s. This makes two calls of under ten minutes for the DRAM arms and one
for the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench import certificate
from bench.peers import render, zero
from bench.peers.run import ARMS, OPTIONS, add_work, missing_packages

BASELINE = "plain"
DISK_ARMS = ("deepspeed-infinity", "deepspeed-infinity-opt")
ARM_SECONDS = 150
DISK_ARM_SECONDS = 420
"""Seconds after which an arm is stopped, unless --arm-seconds is given."""
BUILD_SECONDS = 200
"""Seconds after which compiling DeepSpeed's kernels is stopped."""

_SLACK = 15
"""Seconds reserved for stopping an arm and writing the file."""


def run_arm(arm: str, argv: Sequence[str], seconds: float, scratch: Path) -> dict[str, Any]:
    """Run an arm in its own process, so that nothing of it remains for the next one."""
    script = Path(__file__).with_name("run.py")
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        line = [sys.executable, str(script), "--arm", arm, "--json", str(record), *argv]
        print(f"== {arm}", flush=True)
        began = time.monotonic()
        code = run_child(line, environment(arm, scratch), seconds)
        return conclude(arm, record, code, time.monotonic() - began)


def conclude(arm: str, record: Path, code: int | None, seconds: float) -> dict[str, Any]:
    """Return the record that an arm left, together with the way it ended."""
    result: dict[str, Any] = {"arm": arm, "state": "failed", "problem": "no record was written"}
    if record.exists():
        result = json.loads(record.read_text())
    if code is None:
        result |= {"state": "out of time", "problem": f"stopped after {seconds:.0f} s"}
    elif code < 0:
        name = signal.Signals(-code).name
        why = ": usually the kernel's OOM killer" if name == "SIGKILL" else ""
        result |= {"state": "killed", "problem": f"by {name}{why}"}
    elif code and result["state"] != "failed":
        result |= {"state": "failed", "problem": f"exit status {code}"}
    return result | {"wall_seconds": round(seconds, 1)}


def environment(arm: str, scratch: Path) -> dict[str, str]:
    """Return the environment of an arm's process.

    CPU optimizers get every core, where launchers often set OMP_NUM_THREADS to one. Compiled
    extensions are stored in the scratch directory; a lock that a killed compilation left is
    removed. Compiled Python files are kept, or every arm would compile them again.
    """
    variables = dict(os.environ)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    if arm.endswith("-tuned"):
        variables.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    variables.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    if "TORCH_EXTENSIONS_DIR" not in variables:
        built = scratch.resolve() / "extensions"
        variables["TORCH_EXTENSIONS_DIR"] = str(built)
        for lock in built.glob("*/lock"):
            lock.unlink()
    return variables


def arm_arguments(args: argparse.Namespace, arm: str) -> list[str]:
    """Return the arguments for run.py, with fewer steps for arms whose steps take a minute."""
    argv: list[str] = []
    slow = arm in DISK_ARMS
    settings = vars(args) | (
        {"steps": min(args.steps, 3), "warm_up": min(args.warm_up, 1)} if slow else {}
    )
    for name in ("shape", "context", "batch", "micro_batch", "steps", "warm_up", "dtype",
                 "scratch", *OPTIONS):  # fmt: skip
        value = settings[name]
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                argv += [f"--{name.replace('_', '-')}", str(item)]
    return argv


def chosen_arms(args: argparse.Namespace) -> list[str]:
    """Return the arms of a call in the order in which they run."""
    return [args.baseline, *(arm for arm in args.arms if arm != args.baseline)]


def check(args: argparse.Namespace) -> None:
    """Exit if an arm would fail after its start, which takes a minute of a GPU."""
    missing = missing_packages(chosen_arms(args))
    if missing:
        arms = ", ".join(f"{arm} needs {package}" for arm, package in missing.items())
        sys.exit(
            f"packages are missing: {arms}. bench/peers/fetch.py downloads them into a directory "
            f"for PYTHONPATH"
        )
    if args.plan and not Path(args.plan).is_file():
        sys.exit(f"--plan: there is no file {args.plan}; bench/gpu_table.py --plan-only makes it")
    args.scratch.mkdir(parents=True, exist_ok=True)


def run_table(args: argparse.Namespace) -> dict[str, Any]:
    """Run one call: the baseline, then the arms that fit into the time."""
    deadline = time.monotonic() + args.limit
    call: dict[str, Any] = {"arms": [], "not_started": []}
    arms = chosen_arms(args)
    build(arms, args.scratch, deadline - time.monotonic() - _SLACK)
    for arm in arms:
        default = DISK_ARM_SECONDS if arm in DISK_ARMS else ARM_SECONDS
        seconds = float(args.arm_seconds or default)
        left = deadline - time.monotonic() - _SLACK
        if left < min(seconds, args.least):
            call["not_started"].append(arm)
            continue
        argv = arm_arguments(args, arm)
        call["arms"].append(run_arm(arm, argv, min(seconds, left), args.scratch))
        clear(args.scratch)
        render.print_arm(call["arms"][-1])
    render.check_losses(call)
    return call


def build(arms: Sequence[str], scratch: Path, seconds: float) -> None:
    """Compile DeepSpeed's kernels in advance, so that they do not count as startup of an arm."""
    neediest = max(arms, key=lambda arm: len(zero.kernels_of(arm)) * arm.startswith("deepspeed"))
    if not neediest.startswith("deepspeed"):
        return
    script = str(Path(__file__).with_name("run.py"))
    began = time.monotonic()
    run_child([sys.executable, script, "--arm", neediest, "--build"],
              environment(neediest, scratch), min(seconds, BUILD_SECONDS))  # fmt: skip
    print(f"== kernels of {neediest}: {time.monotonic() - began:.0f} s", flush=True)


def run_child(line: Sequence[str], env: dict[str, str], seconds: float) -> int | None:
    """Run a command and return its exit code.

    If it takes longer than `seconds`, kill it with all its children and return None.
    """
    child = subprocess.Popen(line, env=env, start_new_session=True)
    try:
        return child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return None


def clear(scratch: Path) -> None:
    """Remove the swap files of an arm, which would fill the disk for the next one."""
    shutil.rmtree(scratch / "zero-infinity", ignore_errors=True)


def name_of(args: argparse.Namespace) -> str:
    kind = "" if args.dtype == "bf16" else f"-{args.dtype}"
    return f"peers_{args.shape}-{args.batch}x{args.context}{kind}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--baseline", choices=ARMS, default=BASELINE, help="runs first")
    parser.add_argument("--limit", type=float, default=570, help="seconds for the whole call")
    parser.add_argument("--arm-seconds", type=float, help="time limit of each arm")
    parser.add_argument(
        "--least", type=float, default=60, help="do not start an arm with fewer seconds left"
    )
    parser.add_argument("--out", type=Path, help="output directory (default: bench/results)")
    parser.add_argument("--join", type=Path, help="results file of an earlier call to add to")
    parser.add_argument("--markdown", type=Path, help="render this file and do nothing else")
    add_work(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if args.markdown:
        print(render.markdown(json.loads(args.markdown.read_text())))
        return
    check(args)
    import torch  # noqa: F401  # so that the results file names the GPU

    calls = json.loads(args.join.read_text())["results"]["calls"] if args.join else []
    calls.append(run_table(args))
    path = certificate.save(name_of(args), {"calls": calls}, directory=args.out)
    print(render.markdown(json.loads(path.read_text())))
    print(path)
    if calls[-1]["not_started"]:
        print("not started because time ran out:", ", ".join(calls[-1]["not_started"]))


if __name__ == "__main__":
    main()
