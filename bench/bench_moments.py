"""Loss curves with exact and compressed moments, streamed, on a task that a few steps learn.

    python bench/bench_moments.py --save

Sequences follow one fixed permutation of 256 symbols, so each token tells the next. Every curve
begins with the same weights and sees the same batches; they differ in the moments alone.
docs/convergence.md has longer runs of a smaller model, with seeds and held-out text.
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

SYMBOLS = 256


def batches(chosen: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    follows = torch.randperm(SYMBOLS, generator=drawn)
    found = []
    for _ in range(chosen.steps):
        tokens = [torch.randint(0, SYMBOLS, (chosen.batch,), generator=drawn)]
        for _ in range(chosen.context - 1):
            tokens.append(follows[tokens[-1]])
        found.append({"input_ids": torch.stack(tokens, dim=1)})
    return found


def curve(moments: Any, chosen: argparse.Namespace) -> dict[str, Any]:
    arguments = {
        "context": chosen.context, "batch": chosen.batch, "moments": moments, "init": "random",
        "optimizer": {"lr": chosen.lr, "betas": (0.9, 0.999)},
    }  # fmt: skip
    budget = {"hbm": chosen.hbm, "dram": chosen.dram}
    print(moments, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config_of(chosen.shape, chosen.context).save_pretrained(folder)
        with prepare(folder, budget=budget, **arguments) as engine:
            seconds, losses = run_steps(engine.step, batches(chosen))
            engine.finish()
            held = sum(parts["at_rest"] for parts in engine.tiers().values())
    return {"losses": losses, "step_seconds": seconds, "at_rest_nbytes": held}


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
    chosen = parser.parse_args()
    found: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(chosen).items()}}
    for moments in get_args(Moments):
        found[moments] = curve(moments, chosen)
    for moments in get_args(Moments):
        print(f"{moments}: {found[moments]['losses'][0]:.4f} to {found[moments]['losses'][-1]:.4f}")
    if chosen.save:
        print(certificate.save(f"moments_{chosen.shape}", found))


if __name__ == "__main__":
    main()
