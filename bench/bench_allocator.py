"""Measure what PyTorch's allocator wastes in a training step, and what that costs in time.

    python bench/bench_allocator.py
    python bench/bench_allocator.py --shape 1b --context 3000 --batch 7 --micro-batch 2 --hbm 8GiB

Every arm trains the same model in a process of its own: with PyTorch's default segments, and with
the expandable ones that `prepare` switches on. Prints the most bytes allocated and reserved in a
step, the difference, how often the allocator had to unmap or free memory and try again, seconds of
the preparation (with the rehearsal) and of a step. An arm that runs out of memory says so.

With `--hbm least`, the default, the budget is the least that the planner accepts, so both arms run
at their limit; the last arm has 2 GiB more, and shows the time of a step that is never near it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from bench.shapes import SHAPES, config_of
from penstock.units import GiB, MiB, format_bytes, parse_bytes

ARMS = {
    "default segments": ("expandable_segments:False", 0),
    "expandable segments": (None, 0),
    "expandable segments, 2 GiB more": (None, 2 * GiB),
}
"""Configuration of the allocator, and what is added to the budget."""


def train(args: argparse.Namespace, hbm: int) -> dict[str, Any]:
    """Train in this process, and return the measurements."""
    import torch

    from penstock.engine.prepare import prepare
    from penstock.plan.budget import Budget

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config_of(args.shape, args.context).save_pretrained(folder)
        engine = prepare(
            folder, budget=Budget(hbm=hbm, dram=args.dram), init="random", context=args.context,
            batch=args.batch, micro_batch=args.micro_batch, device=args.device,
        )  # fmt: skip
    result: dict[str, Any] = {
        "prepare_seconds": time.perf_counter() - began, "hbm": hbm, "change": engine.plan_change,
        "slack": sum(p.nbytes for p in engine.plan.pools if p.what == "allocator slack"),
    }  # fmt: skip
    with engine:
        seconds = []
        vocabulary = engine.inventory.vocabulary
        for _ in range(args.steps):
            ids = torch.randint(3, vocabulary, (args.batch, args.context))
            began = time.perf_counter()
            engine.step({"input_ids": ids})
            seconds.append(time.perf_counter() - began)
        stats = torch.cuda.memory_stats() if args.device == "cuda" else Counter[str]()
    result |= {
        "first_step_seconds": seconds[0],
        "step_seconds": certificate.percentiles(seconds[2:]),
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
    }
    return result


def find_least(args: argparse.Namespace) -> int:
    """Return the least HBM budget that the planner accepts."""
    from penstock.engine.model_source import inspect_model
    from penstock.engine.plan_choice import plan_request
    from penstock.errors import InfeasibleError
    from penstock.plan.budget import Budget
    from penstock.probe.machine_choice import this_machine
    from penstock.settings import Settings

    with tempfile.TemporaryDirectory() as folder:
        config_of(args.shape, args.context).save_pretrained(folder)
        settings = Settings.of({
            "context": args.context, "batch": args.batch, "micro_batch": str(args.micro_batch),
        })  # fmt: skip
        config, inventory = inspect_model(folder, settings)
    budget = Budget(hbm=64 * MiB, dram=args.dram)
    request = plan_request(
        inventory, settings, this_machine(args.device), config=config, budget=budget
    )
    try:
        request.make_plan()
    except InfeasibleError as error:
        least = error.least["hbm"]
        assert least is not None
        return least
    raise AssertionError("a plan fits in 64 MiB of HBM")


def run_arm(args: argparse.Namespace, configuration: str | None, hbm: int) -> dict[str, Any]:
    """Train in a child process with an allocator configuration."""
    environment = dict(os.environ)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment.pop(name, None)
    if configuration is not None:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = configuration
    command = [sys.executable, __file__, *args.words, "--child", str(hbm)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines() or [""]
    return json.loads(lines[-1]) if done.returncode == 0 else {"failed": lines[-1]}


def describe(name: str, result: dict[str, Any]) -> str:
    """Format the result of an arm in one line."""
    if "failed" in result:
        return f"{name}: failed: {result['failed']}"
    wasted = result["reserved"] - result["allocated"]
    return (
        f"{name}: allocated {format_bytes(result['allocated'])}, reserved "
        f"{format_bytes(result['reserved'])} ({format_bytes(wasted)} more; planned slack "
        f"{format_bytes(result['slack'])}), {result['retries']} retries; prepared in "
        f"{result['prepare_seconds']:.1f} s, first step {result['first_step_seconds']:.2f} s, "
        f"median step {result['step_seconds']['p50']:.3f} s"
        + (f"; {result['change']}" if result["change"] else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--context", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=7)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--hbm", default="least")
    parser.add_argument("--dram", type=parse_bytes, default=64 * GiB)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda", help="cpu tries the script without a GPU")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.words = [word for word in sys.argv[1:] if word != "--save"]
    if args.child is not None:
        print(json.dumps(train(args, args.child)))
        return
    hbm = find_least(args) if args.hbm == "least" else parse_bytes(args.hbm)
    print(f"{args.shape}, {args.batch} x {args.context}, HBM budget {format_bytes(hbm)}")
    results = {}
    for name, (configuration, more) in ARMS.items():
        results[name] = run_arm(args, configuration, hbm + more)
        print(describe(name, results[name]), flush=True)
    if args.save:
        print(certificate.save(f"allocator_{args.shape}", {"arms": results}))


if __name__ == "__main__":
    main()
