"""Run one arm of the comparison and measure seconds, memory, disk traffic and losses.

    python bench/peers/run.py --arm deepspeed-zero3 --shape 3b --batch 4 --json out.json

An arm is one system with its settings. The file is written after startup and after each step, so
that the results survive if the kernel kills the process. The other systems come from `fetch.py`, or
from the environment if they are installed there.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.certificate import percentiles
from bench.measuring import HostPeak, device_peak, disk_bytes, forget_device_peak
from bench.peers.work import Arm, Work
from bench.shapes import ALL_SHAPES

_FUNCTIONS = {
    "plain": "torch_arms.plain",
    "plain-liger": "torch_arms.plain_liger",
    "plain-liger-stored": "torch_arms.plain_liger_stored",
    "penstock": "penstock_arm.penstock",
    "deepspeed-zero3": "zero.zero3",
    "deepspeed-zero3-tuned": "zero.zero3_tuned",
    "deepspeed-zero2": "zero.zero2",
    "deepspeed-infinity": "zero.infinity",
    "deepspeed-infinity-opt": "zero.infinity_optimizer",
    "fsdp2": "torch_arms.fsdp2",
    "roundpipe-sync": "roundpipe_arm.roundpipe_sync",
    "roundpipe-async": "roundpipe_arm.roundpipe_async",
}
ARMS = tuple(_FUNCTIONS)

_PACKAGES = {"plain-liger": "liger_kernel", "deepspeed": "deepspeed", "roundpipe": "roundpipe"}
"""Packages that arms need, besides torch and transformers, by the beginning of the arm's name."""

_FAILED = 1


def find_arm(name: str) -> Arm:
    """Import and return an arm. The packages of the other arms are not imported."""
    module, _, function = _FUNCTIONS[name].partition(".")
    arm: Arm = getattr(importlib.import_module(f"bench.peers.{module}"), function)
    return arm


def missing_packages(arms: Sequence[str]) -> dict[str, str]:
    """Return the packages that are not installed, by arm."""
    return {
        arm: package
        for arm in arms
        for begin, package in _PACKAGES.items()
        if arm.startswith(begin) and importlib.util.find_spec(package) is None
    }


@dataclass(slots=True)
class Record:
    """The results of one arm so far."""

    arm: str
    work: dict[str, Any]
    state: str = "starting"
    """starting, stepping, done or failed. table.py adds killed and out of time."""
    problem: str = ""
    start_up_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steady: dict[str, float] = field(default_factory=dict)
    """Percentiles of the step seconds after warm-up."""
    host_peak_nbytes: int = 0
    device_allocated: int = 0
    device_reserved: int = 0
    disk_written: list[int] = field(default_factory=list)
    """Bytes that each step wrote to the device of the scratch directory."""
    disk_read: list[int] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path | None) -> None:
        if path is not None:
            draft = path.with_suffix(".draft")
            draft.write_text(json.dumps(asdict(self), indent=1) + "\n")
            draft.replace(path)


def measure(arm: Arm, work: Work, record: Record, path: Path | None) -> None:
    scratch = Path(work.scratch)
    began = time.perf_counter()
    with HostPeak() as host:
        with arm(work) as step:
            record.start_up_seconds = time.perf_counter() - began
            record.state = "stepping"
            forget_device_peak()
            batch = work.batch_of_tokens()
            for _ in range(work.steps):
                before, start = disk_bytes(scratch), time.perf_counter()
                record.losses.append(step(batch))
                record.step_seconds.append(time.perf_counter() - start)
                after = disk_bytes(scratch)
                if before and after:
                    record.disk_read.append(after[0] - before[0])
                    record.disk_written.append(after[1] - before[1])
                update(record, work, host)
                print(f"  {record.step_seconds[-1]:.3f} s  loss {record.losses[-1]:.4f}  "
                      f"host {host.nbytes / 2**30:.2f} GiB", flush=True)  # fmt: skip
                record.save(path)
        update(record, work, host)
    record.state = "done"
    record.save(path)


def update(record: Record, work: Work, host: HostPeak) -> None:
    """Update the peaks and percentiles of a record."""
    record.host_peak_nbytes = host.nbytes
    record.device_allocated, record.device_reserved = device_peak()
    counted = record.step_seconds[work.warm_up :]
    if counted:
        record.steady = percentiles(counted)


def versions() -> dict[str, str]:
    from importlib import metadata

    installed = {}
    for name in ("torch", "transformers", "deepspeed", "roundpipe", "penstock"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            module = sys.modules.get(name)
            if module is not None:
                installed[name] = str(getattr(module, "__version__", "source"))
    return installed


def work_of(args: argparse.Namespace) -> Work:
    named = {name: getattr(args, name) for name in OPTIONS}
    return Work(
        shape=args.shape, context=args.context, batch=args.batch,
        micro_batch=args.micro_batch, steps=args.steps, warm_up=args.warm_up,
        dtype=args.dtype, scratch=str(args.scratch),
        options={name: value for name, value in named.items() if value},
    )  # fmt: skip


OPTIONS = ("hbm", "dram", "nvme", "moments", "plan", "machine", "activations", "slots")


def add_work(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the work."""
    parser.add_argument("--shape", choices=ALL_SHAPES, default="3b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument(
        "--scratch", type=Path, default=Path(), help="a directory for arms that use a disk"
    )
    parser.add_argument("--hbm", help="penstock: HBM budget")
    parser.add_argument("--dram", help="penstock: DRAM budget")
    parser.add_argument("--nvme", action="append", help="penstock: NVMe budget, as PATH:SIZE")
    parser.add_argument("--moments", help="penstock: fp32, bf16 or int8 moments")
    parser.add_argument("--plan", help="penstock: a plan file instead of budgets")
    parser.add_argument("--machine", help="penstock: a machine preset to plan for")
    parser.add_argument("--activations", choices=("host",), help="deepspeed: offload activations")
    parser.add_argument("--slots", type=int, help="deepspeed-infinity: number of weight slots")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--build", action="store_true", help="only compile the kernels of the arm")
    add_work(parser)
    args = parser.parse_args(argv)
    work = work_of(args)
    if args.build:
        build(args.arm, work)
        leave(0)
    record = Record(args.arm, asdict(work))
    record.save(args.json)
    try:
        measure(find_arm(args.arm), work, record, args.json)
        record.versions = versions()
        record.save(args.json)
    except Exception as problem:
        record.state, record.problem = "failed", f"{type(problem).__name__}: {problem}"[:2000]
        record.save(args.json)
        traceback.print_exc()
        leave(_FAILED)
    leave(0)


def build(arm: str, work: Work) -> None:
    from bench.peers import zero

    if arm.startswith("deepspeed"):
        zero.build_kernels(arm, work)


def leave(code: int) -> None:
    """Exit without running finalizers, because the threads of some arms never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
