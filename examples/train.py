"""Fine-tune a small model on chats under a memory budget per tier, from Python, without a GPU.

    python examples/train.py [directory]

The script makes its own chats and the config of a model with two million parameters. Full training
needs 16 bytes per parameter in fp32, and the budgets of HBM and DRAM are smaller, so part of the
optimizer states is on disk. With your own model, pass its directory or Hugging Face ID to
`prepare`, and your file of chats to `open_dataset`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from make_demo_data import capital, day, make
from transformers import AutoModelForCausalLM

import penstock as ps
from penstock.data import load_tokenizer, open_dataset
from penstock.units import format_bytes

CONTEXT, BATCH = 128, 4


def main(argv: Sequence[str] | None = None) -> float:
    """Train, save, and load the result with transformers. Return the loss on held-out chats."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--chats", type=int, default=2000)
    options = parser.parse_args(argv)
    folder = options.directory or Path(tempfile.mkdtemp(prefix="penstock-train-"))
    make(folder, chats=options.chats, tasks=(capital, day), hidden=192, layers=4)
    disk, cache = folder / "disk", folder / "tokens"
    disk.mkdir(exist_ok=True)
    shutil.rmtree(folder / "out", ignore_errors=True)  # of an earlier run

    tokenizer = load_tokenizer(folder / "model")
    chats = open_dataset(folder / "chats.jsonl", tokenizer, cache_dir=cache)
    train, held_out = chats.split(0.02, seed=0)
    batches = train.pack(CONTEXT).batches(BATCH, steps=options.steps, seed=0)
    evaluation = held_out.pack(CONTEXT)

    with ps.prepare(
        folder / "model",
        init="random",  # the directory has no weights; leave this out for a real model
        context=CONTEXT,
        batch=BATCH,
        lr=3e-3,
        steps=options.steps,
        dtype="fp32",  # most CPUs are slow in bf16, the default
        budget={"hbm": "24MiB", "dram": "8MiB", "nvme": f"{disk}:64MiB"},
        device="cpu",
    ) as engine:
        for name, tier in engine.tiers().items():
            print(f"{name:5} {format_bytes(tier['used'])} of {format_bytes(tier['budget'])}")
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            engine.optimizer, max_lr=3e-3, total_steps=options.steps, cycle_momentum=False
        )
        for step, batch in enumerate(batches, 1):
            loss = engine.step(batch)  # forward, backward, clipping and the update
            schedule.step()
            if step % 10 == 0 or step == options.steps:
                print(f"step {step:3} loss {loss:.3f}")
        found = engine.evaluate(evaluation.batches(BATCH, shuffle=False))
        print(f"held-out loss {found.loss:.3f} over {found.tokens:,} tokens")
        engine.write(folder / "out", optimizer=False)

    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    print(f"{folder}/out: {model.num_parameters():,} parameters, {model.dtype}")
    return float(found.loss)


if __name__ == "__main__":
    main()
