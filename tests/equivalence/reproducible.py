"""Train a small model with default numerics on a GPU, and print hashes of every bit as JSON.

Run in fresh processes by `test_reproducible.py`:

    python -m tests.equivalence.reproducible FAMILY DIRECTORY resident
    python -m tests.equivalence.reproducible FAMILY DIRECTORY dram disk resumed

The model is larger than the tiny ones of other tests: their sums are too short for kernels that
split a reduction, and for rounding to depend on the order.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from penstock.engine.engine import Engine
from penstock.plan.workload import default_numerics
from tests.equivalence.runs import Setup, Way, state_of
from tests.support import engines

STEPS, SAVED = 4, 2
"""Steps of a run, and the step after which it writes a checkpoint."""

SIZES = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip

WAYS = {
    "resident": Way("resident", ("hhhh",)),
    "dram": Way("dram", ("dddd", "hhhd")),
    "disk": Way("disk", ("nnnn", "dndd"), {"piece": 1 << 20, "slots": 3}),
}

Digests = dict[str, str]


def make_setup(family: str) -> Setup:
    """Make a setup of three micro-batches with the numerics that a user gets by default."""
    config: dict[str, Any] = {**SIZES, "tie_word_embeddings": family == "qwen3"}
    config |= {"sliding_window": 128} if family.startswith("gemma") else {}
    size = {"context": 512, "batch": 5, "micro_batch": 2}
    inventory = engines.inventory(engines.tiny_config(family, **config))
    numerics = default_numerics(inventory, **size, kernels=True)
    assert numerics.deterministic
    assert numerics.compiled
    chosen = {name: getattr(numerics, name) for name in ("attention", "loss_kernel", "mlp_tile")}
    # Several chunks of the loss, so that the head's gradient is summed per micro-batch.
    return Setup.of(
        family, freeze=(), config=config, compiled=True, loss_chunk=256, **chosen, **size
    )


def batches(setup: Setup, packed: bool) -> list[Any]:
    """Return batches of text-like tokens; packed rows have other documents in each batch."""
    found = []
    for number, batch in enumerate(setup.batches(STEPS)):
        # Frequent tokens share a row of the embedding.
        batch["input_ids"] = batch["input_ids"] ** 2 // setup.config.vocab_size
        if packed:
            row = torch.arange(setup.work.context) % (90 + 37 * number)
            batch["position_ids"] = row.expand_as(batch["input_ids"]).clone()
        found.append(batch)
    return found


def run(setup: Setup, way: Way, disk: Path, packed: bool, saved: Path) -> dict[str, Digests]:
    """Train under one plan and save after `SAVED` steps; return what "run" ended with."""
    with setup.engine(way, disk, device="cuda") as engine:
        found: Digests = {}
        for number, batch in enumerate(batches(setup, packed)):
            step(engine, batch, number, found)
            if number + 1 == SAVED and not saved.exists():
                saved.mkdir(parents=True)
                engine.write(saved)
        return {"run": found | digests(state_of(engine))}


def resume(setup: Setup, way: Way, disk: Path, packed: bool, saved: Path) -> dict[str, Digests]:
    """Continue from a checkpoint under another plan."""
    with setup.engine(way, disk, device="cuda") as engine:
        engine.read(saved)
        found: Digests = {}
        for number, batch in list(enumerate(batches(setup, packed)))[SAVED:]:
            step(engine, batch, number, found)
        return {"run": found | digests(state_of(engine))}


def step(engine: Engine, batch: Any, number: int, found: Digests) -> None:
    found[f"loss {number}"] = float(engine.step(batch)).hex()
    found[f"norm {number}"] = float(engine.grad_norm).hex()


def digests(tensors: dict[str, torch.Tensor]) -> Digests:
    return {
        name: hashlib.sha256(
            tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, tensor in tensors.items()
    }


def main(family: str, directory: str, *names: str) -> None:
    setup, disk = make_setup(family), Path(directory)
    for packed in (False, True):
        saved = disk / f"saved-{packed}"
        for name in names:
            if name == "resumed":
                found = resume(setup, WAYS["disk"], disk, packed, saved)
            else:
                found = run(setup, WAYS[name], disk, packed, saved)
            print(json.dumps({"name": name, "packed": packed, **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
