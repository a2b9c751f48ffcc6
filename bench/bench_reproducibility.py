"""Measure what reproducibility costs: whole steps with the default kernels and with others.

    python bench/bench_reproducibility.py --shape 3b --batch 4 --context 4096 --hbm 24GiB

The variants take turns, each with an engine of its own: the default; any kernel allowed; and any
kernel allowed with PyTorch's attention, whose backward is not deterministic. Rows are whole:
PyTorch has no such kernel for packed rows. Prints the seconds per step and the ratios; with --save,
writes bench/results/reproducibility_<shape>_<batch>x<context>_<hardware>_<date>.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from bench.measuring import forget_device_peak, timed
from bench.repeated_weights import repeat_weights
from bench.shapes import SHAPES, config_of
from penstock import prepare
from penstock.engine.plan_choice import plan_request
from penstock.model.survey import survey_config
from penstock.plan.plan import Plan
from penstock.probe.machine_choice import this_machine
from penstock.settings import Settings

VARIANTS: dict[str, dict[str, Any]] = {
    "reproducible": {},
    "any kernel": {"deterministic": False},
    "any kernel, PyTorch's attention": {"deterministic": False, "attention": "sdpa"},
}

WARM_UP = 2
"""Steps of every engine that are not timed."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--hbm", default="24GiB")
    parser.add_argument("--dram", default="auto")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of an engine")
    parser.add_argument("--turns", type=int, default=2, help="engines of each variant")
    parser.add_argument("--save", action="store_true")
    return parser.parse_args()


def plan_of(config: Any, args: argparse.Namespace, changes: dict[str, Any]) -> Plan:
    """Make the plan of a variant: the default one, with other numerics."""
    inventory = survey_config(config, name=args.shape)
    settings = Settings.of({"context": args.context, "batch": args.batch})
    budget = {"hbm": args.hbm, "dram": args.dram}
    request = plan_request(inventory, settings, this_machine(), config=config, budget=budget)
    numerics = replace(request.workload.numerics, **changes)
    request = replace(request, workload=replace(request.workload, numerics=numerics))
    return request.make_plan().plan


def measure(config: Any, args: argparse.Namespace, plan: Plan) -> list[float]:
    """Return the seconds of each timed step of a new engine."""
    drawn = torch.Generator().manual_seed(0)
    shape = (args.batch, args.context)
    ids = torch.randint(0, config.vocab_size, shape, generator=drawn)
    forget_device_peak()
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        size = {"context": args.context, "batch": args.batch}
        with prepare(folder, plan=plan, init="random", **size) as engine:
            seconds = [
                timed(lambda: engine.step({"input_ids": ids})) for _ in range(WARM_UP + args.steps)
            ]
    return seconds[WARM_UP:]


def main() -> None:
    args = arguments()
    repeat_weights(torch.bfloat16)
    config = config_of(args.shape, args.context)
    plans = {name: plan_of(config, args, changes) for name, changes in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(args.turns):
        for name, plan in plans.items():
            measured = measure(config, args, plan)
            seconds[name] += measured
            print(f"turn {turn + 1}, {name}: {[round(s, 4) for s in measured]}", flush=True)
    results: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(args).items()}}
    results |= {name: certificate.percentiles(samples) for name, samples in seconds.items()}
    default = results["reproducible"]["p50"]
    for name in VARIANTS:
        median = results[name]["p50"]
        print(f"{name}: {median:.4f} s; the default takes {default / median:.3f} times as long")
    if args.save:
        what = f"reproducibility_{args.shape}_{args.batch}x{args.context}"
        print(certificate.save(what, results))


if __name__ == "__main__":
    main()
