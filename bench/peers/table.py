"""Run arms one after the other on the same work and write one results file and one table.

    python bench/peers/table.py --shape 3b --context 4096 --batch 4 --scratch /mnt/nvme \
        --arms penstock deepspeed-zero3 fsdp2 --limit 570 --out bench/results
    python bench/peers/table.py --markdown bench/results/peers_3b-4x4096_nvidia-h200_2026-11-15.json

The yardstick (plain torch in HBM) runs first in every call. An arm that dies keeps what it measured
before, and how it died is its result. `--join FILE` adds arms to a file of an earlier call, for
work that takes more than one: each arm is compared with the yardstick of its own call. Arms whose
time limit does not fit into what is left of `--limit` are not started, and are named at the end.

Device time, H200, 3b at 4 x 4,096: plain, penstock, each DRAM arm 60 to 100 s (start-up is most of
it; DeepSpeed's kernels compile once in 60 s); deepspeed-infinity 300 s for 3 steps;
deepspeed-infinity-opt 150 s. So: two calls of under ten minutes for DRAM arms, one for the disk.
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
from bench.peers.run import ARMS, OPTIONS, add_work

YARDSTICK = "plain"
DISK_ARMS = ("deepspeed-infinity", "deepspeed-infinity-opt")
ARM_SECONDS = 150
DISK_ARM_SECONDS = 420
"""What an arm may take before it is stopped, unless --arm-seconds says otherwise."""
BUILD_SECONDS = 200
"""The same for compiling DeepSpeed's kernels."""

_SLACK = 15
"""Seconds for a stopped arm to go and for the file to be written."""


def run_arm(arm: str, words: Sequence[str], seconds: float, scratch: Path) -> dict[str, Any]:
    """In a process of its own, so that nothing of one arm is left for the next."""
    script = Path(__file__).with_name("run.py")
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        line = [sys.executable, str(script), "--arm", arm, "--json", str(record), *words]
        print(f"== {arm}", flush=True)
        began = time.monotonic()
        code = run_child(line, environment(arm, scratch), seconds)
        return conclude(arm, record, code, time.monotonic() - began)


def conclude(arm: str, record: Path, code: int | None, seconds: float) -> dict[str, Any]:
    """What it left, and how it ended."""
    found: dict[str, Any] = {"arm": arm, "state": "failed", "problem": "it left no record"}
    if record.exists():
        found = json.loads(record.read_text())
    if code is None:
        found |= {"state": "out of time", "problem": f"stopped after {seconds:.0f} s"}
    elif code < 0:
        name = signal.Signals(-code).name
        why = ": the kernel does that when memory runs out" if name == "SIGKILL" else ""
        found |= {"state": "killed", "problem": f"by {name}{why}"}
    elif code and found["state"] != "failed":
        found |= {"state": "failed", "problem": f"exit status {code}"}
    return found | {"wall_seconds": round(seconds, 1)}


def environment(arm: str, scratch: Path) -> dict[str, str]:
    """Of the child. CPU optimizers get every core; launchers often leave them one. What is compiled
    is kept beside the scratch files, without the lock that a killed compilation leaves behind."""
    told = dict(os.environ)
    if arm.endswith("-tuned"):
        told.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    told.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    if "TORCH_EXTENSIONS_DIR" not in told:
        built = scratch.resolve() / "extensions"
        told["TORCH_EXTENSIONS_DIR"] = str(built)
        for lock in built.glob("*/lock"):
            lock.unlink()
    return told


def arm_words(chosen: argparse.Namespace, arm: str) -> list[str]:
    """The command line of run.py again, with fewer steps where a step takes a minute."""
    words: list[str] = []
    slow = arm in DISK_ARMS
    told = vars(chosen) | (
        {"steps": min(chosen.steps, 3), "warm_up": min(chosen.warm_up, 1)} if slow else {}
    )
    for name in ("shape", "context", "batch", "micro_batch", "steps", "warm_up", "dtype",
                 "scratch", *OPTIONS):  # fmt: skip
        value = told[name]
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                words += [f"--{name.replace('_', '-')}", str(one)]
    return words


def run_table(chosen: argparse.Namespace) -> dict[str, Any]:
    """One call: the yardstick, then the arms that fit."""
    until = time.monotonic() + chosen.limit
    call: dict[str, Any] = {"arms": [], "not_started": []}
    arms = [YARDSTICK, *(arm for arm in chosen.arms if arm != YARDSTICK)]
    build(arms, chosen.scratch, until - time.monotonic() - _SLACK)
    for arm in arms:
        default = DISK_ARM_SECONDS if arm in DISK_ARMS else ARM_SECONDS
        seconds = float(chosen.arm_seconds or default)
        left = until - time.monotonic() - _SLACK
        if left < min(seconds, chosen.least):
            call["not_started"].append(arm)
            continue
        words = arm_words(chosen, arm)
        call["arms"].append(run_arm(arm, words, min(seconds, left), chosen.scratch))
        clear(chosen.scratch)
        render.tell(call["arms"][-1])
    render.judge(call)
    return call


def build(arms: Sequence[str], scratch: Path, seconds: float) -> None:
    """DeepSpeed's kernels, once: no arm's start-up is then charged for them."""
    neediest = max(arms, key=lambda arm: len(zero.kernels_of(arm)) * arm.startswith("deepspeed"))
    if not neediest.startswith("deepspeed"):
        return
    script = str(Path(__file__).with_name("run.py"))
    began = time.monotonic()
    run_child([sys.executable, script, "--arm", neediest, "--build"],
              environment(neediest, scratch), min(seconds, BUILD_SECONDS))  # fmt: skip
    print(f"== kernels of {neediest}: {time.monotonic() - began:.0f} s", flush=True)


def run_child(line: Sequence[str], told: dict[str, str], seconds: float) -> int | None:
    """Its exit status; None if its time was over, and all that it had started is gone."""
    child = subprocess.Popen(line, env=told, start_new_session=True)
    try:
        return child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return None


def clear(scratch: Path) -> None:
    """Swap files that an arm left would fill the disk for the next."""
    shutil.rmtree(scratch / "zero-infinity", ignore_errors=True)


def name_of(chosen: argparse.Namespace) -> str:
    kind = "" if chosen.dtype == "bf16" else f"-{chosen.dtype}"
    return f"peers_{chosen.shape}-{chosen.batch}x{chosen.context}{kind}"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--limit", type=float, default=570, help="seconds for the whole call")
    parser.add_argument("--arm-seconds", type=float, help="for each arm")
    parser.add_argument("--least", type=float, default=60, help="left, or an arm is not started")
    parser.add_argument("--out", type=Path, help="a folder; bench/results unless told")
    parser.add_argument("--join", type=Path, help="a file of an earlier call on the same work")
    parser.add_argument("--markdown", type=Path, help="render this file and do nothing else")
    add_work(parser)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    chosen = arguments(words)
    if chosen.markdown:
        print(render.markdown(json.loads(chosen.markdown.read_text())))
        return
    import torch  # noqa: F401  # so that the certificate names the GPU

    calls = json.loads(chosen.join.read_text())["results"]["calls"] if chosen.join else []
    calls.append(run_table(chosen))
    path = certificate.save(name_of(chosen), {"calls": calls}, directory=chosen.out)
    print(render.markdown(json.loads(path.read_text())))
    print(path)
    if calls[-1]["not_started"]:
        print("not started, for want of time:", ", ".join(calls[-1]["not_started"]))


if __name__ == "__main__":
    main()
