"""Needs a GPU: train under two budgets, and compare speed, memory and the bits of the result.

    python examples/gpu_two_budgets.py                     # 1.2 B parameters, random weights
    python examples/gpu_two_budgets.py --model path/to/model --hbm 12GiB --dram 80GiB

The first run may use all of the GPU, the second only `--hbm`. Losses and weights are equal to the
bit, because a budget decides where bytes are stored and never what is computed.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

import penstock as ps
from penstock.units import format_bytes

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_768},
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256},
}  # fmt: skip


def train(model: Path | PretrainedConfig, hbm: str, options: argparse.Namespace) -> tuple[str, str]:
    """Train some steps; return the losses and a digest of the trained weights."""
    random = isinstance(model, PretrainedConfig)
    vocabulary = (model if random else AutoConfig.from_pretrained(model)).vocab_size
    if random:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        source: Any = AutoModelForCausalLM.from_config(model, dtype=torch.bfloat16)
    else:
        source = model
    budget = {"hbm": hbm, "dram": options.dram}
    if options.nvme:
        budget["nvme"] = options.nvme
    draw = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    with ps.prepare(source, context=options.context, batch=options.batch, lr=1e-5,
                    budget=budget, device=options.device) as engine:  # fmt: skip
        for _ in range(options.steps):
            rows = torch.randint(vocabulary, (options.batch, options.context), generator=draw)
            positions = torch.arange(options.context).expand_as(rows)
            began = time.perf_counter()
            batch = {"input_ids": rows, "labels": rows, "position_ids": positions}
            losses.append(engine.step(batch))
            seconds.append(time.perf_counter() - began)
        digest = hashlib.sha256()
        for name in sorted(engine.state):
            master = engine.state[name]["master"]  # fp32
            digest.update(master.contiguous().numpy().tobytes())
        hold = ", ".join(f"{k} {format_bytes(v['peak'])}" for k, v in engine.tiers().items())
    last = sorted(seconds[1:])[len(seconds[1:]) // 2]
    print(f"--hbm {hbm}: {last:.3f} s per step, {options.batch * options.context / last:,.0f} "
          f"tokens/s; peak {hold}")  # fmt: skip
    return " ".join(f"{loss:.6f}" for loss in losses), digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> bool:
    """Run both budgets, and return whether the results are equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="directory of a model; default: random weights")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--hbm", default="8GiB", help="budget of the second run")
    parser.add_argument("--large-hbm", default="auto", help="budget of the first run")
    parser.add_argument("--dram", default="auto")
    parser.add_argument("--nvme", help="PATH:SIZE")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda", help="cpu rehearses it with --shape tiny")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this example needs a GPU; examples/train.py runs without one")
    model = options.model or LlamaConfig(max_position_embeddings=32_768, **SHAPES[options.shape])
    results = [train(model, hbm, options) for hbm in (options.large_hbm, options.hbm)]
    equal = results[0] == results[1]
    print(f"losses {results[0][0]}")
    print(f"losses and weights are equal to the bit: {equal}")
    return equal


if __name__ == "__main__":
    main()
