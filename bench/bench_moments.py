"""Compare loss curves of exact and compressed moments, trained with the engine on an easy task.

    python bench/bench_moments.py --save

Sequences follow one fixed permutation of 256 symbols, so each token determines the next. Every run
starts from the same weights and sees the same batches; runs differ only in the format of the
moments. docs/convergence.md has longer runs of a smaller model, with several seeds and held-out
text.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from bench.measuring import run_steps
from bench.shapes import SHAPES, config_of
from penstock.engine.prepare import prepare
from penstock.roles import Moments
from penstock.tiers import Tier

SYMBOLS = 256


def batches(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    successor = torch.randperm(SYMBOLS, generator=drawn)
    results = []
    for _ in range(args.steps):
        tokens = [torch.randint(0, SYMBOLS, (args.batch,), generator=drawn)]
        for _ in range(args.context - 1):
            tokens.append(successor[tokens[-1]])
        results.append({"input_ids": torch.stack(tokens, dim=1)})
    return results


def curve(moments: Any, args: argparse.Namespace) -> dict[str, Any]:
    settings = {
        "context": args.context, "batch": args.batch, "moments": moments, "init": "random",
        "optimizer": {"lr": args.lr, "betas": (0.9, 0.999)},
    }  # fmt: skip
    budget = {"hbm": args.hbm, "dram": args.dram}
    print(moments, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config_of(args.shape, args.context).save_pretrained(folder)
        with prepare(folder, budget=budget, **settings) as engine:
            seconds, losses = run_steps(engine.step, batches(args))
            engine.finish()
            at_rest = sum(engine.plan.at_rest(tier) for tier in Tier)
    return {"losses": losses, "step_seconds": seconds, "at_rest_nbytes": at_rest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--hbm", default="4GiB")
    parser.add_argument("--dram", default="4GiB")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(args).items()}}
    for moments in get_args(Moments):
        results[moments] = curve(moments, args)
    for moments in get_args(Moments):
        print(
            f"{moments}: {results[moments]['losses'][0]:.4f} to "
            f"{results[moments]['losses'][-1]:.4f}"
        )
    if args.save:
        print(certificate.save(f"moments_{args.shape}", results))


if __name__ == "__main__":
    main()
