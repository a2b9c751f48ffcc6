"""Needs a GPU: one step with a context that does not fit next to the model without Penstock.

    python examples/gpu_long_context.py                         # 131,072 tokens in 16 GiB of HBM
    python examples/gpu_long_context.py --context 262144 --hbm 24GiB

Memory is planned before anything is allocated, and the plan is printed next to what was measured.
Activations of the layers go to host memory, and the loss is computed in chunks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from gpu_two_budgets import SHAPES
from transformers import LlamaConfig, LlamaForCausalLM

import penstock as ps
from penstock.units import format_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Take the steps, and return the bytes of HBM at their peak."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument("--hbm", default="16GiB")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--device", default="cuda", help="cpu rehearses it with --shape tiny")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this example needs a GPU; examples/train.py runs without one")
    config = LlamaConfig(max_position_embeddings=options.context, **SHAPES[options.shape])
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    rows = torch.randint(config.vocab_size, (1, options.context))
    positions = torch.arange(options.context)[None]
    with ps.prepare(model, context=options.context, batch=1, lr=1e-5,
                    budget={"hbm": options.hbm}, device=options.device) as engine:  # fmt: skip
        for step in range(1, options.steps + 1):
            began = time.perf_counter()
            loss = engine.step({"input_ids": rows, "labels": rows, "position_ids": positions})
            print(f"step {step}: loss {loss:.4f}, {time.perf_counter() - began:.2f} s")
        tiers = {name: tier for name, tier in engine.tiers().items() if tier["planned"]}
    for name, tier in tiers.items():
        shown = {key: format_bytes(tier[key]) for key in ("budget", "planned", "peak")}
        print(f"{name:5}", ", ".join(f"{key} {value}" for key, value in shown.items()))
    return tiers["hbm"]["peak"]


if __name__ == "__main__":
    main()
