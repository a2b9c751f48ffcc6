"""Measure forward and backward of one layer: compiled or eager, packed or not, tiled or not.

    python bench/bench_layer.py --shape 8b --batch 4 --context 4096 --documents 500
    python bench/bench_layer.py --shape 8b --batch 1 --context 131072

Prints seconds and peak memory next to the working memory that a plan reserves. With --save, writes
bench/results/layer_<shape>_<batch>x<context>_<hardware>_<date>.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from bench.shapes import ALL_SHAPES, config_of
from penstock.engine.batches import split_batch
from penstock.engine.gradients import differentiate
from penstock.model.inventory import Inventory
from penstock.model.meta_model import build_model
from penstock.model.split import MicroBatch, SplitModel
from penstock.model.survey import survey_config
from penstock.plan.working_memory_estimate import estimate_working_memory
from penstock.plan.workload import Numerics, Workload, default_numerics
from penstock.units import format_bytes

WAYS: dict[str, dict[str, Any]] = {
    "as planned": {},
    "not compiled": {"compiled": False},
    "one call a document": {"compiled": False, "attention": "sdpa"},
    "one tile": {"mlp_tile": 1 << 30},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=ALL_SHAPES, default="8b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--documents", type=int, help="tokens per document (default: one document per row)"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["as planned", "not compiled"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", action="store_true")
    return parser.parse_args()


def measure(config: Any, args: argparse.Namespace, changes: dict[str, Any]) -> dict[str, Any]:
    inventory = survey_config(config, name=args.shape)
    size = {"context": args.context, "batch": args.batch}
    # One micro-batch with all rows: this measures a layer and not a step.
    numerics = default_numerics(inventory, **size, micro_batch=args.batch, kernels=True)
    numerics = replace(numerics, **changes)
    work = Workload(**size, numerics=numerics)
    device = torch.device(args.device)
    body, parameters = bound(config, inventory, numerics, device)
    micro = split_batch(batch(config, args), work, 1, device).rounds[0][0]
    step = layer_step(body, parameters, micro)
    began = time.perf_counter()
    step()
    first = time.perf_counter() - began
    seconds = [timed(step, device) for _ in range(args.repeats)]
    return {
        "first_seconds": first,
        "seconds": certificate.percentiles(seconds),
        "peak_nbytes": peak(step, device),
        "working_nbytes": estimate_working_memory(inventory, work).peak,
        "graphs": int(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
    }


def bound(
    config: Any, inventory: Inventory, numerics: Numerics, device: torch.device
) -> tuple[SplitModel, dict[str, torch.nn.Parameter]]:
    """Build the model with random weights for the embedding and the first layer."""
    bare = build_model(config, torch.bfloat16, device)
    body = SplitModel(bare, inventory, mlp_tile=numerics.mlp_tile, compiled=numerics.compiled)
    parameters_of = [
        {
            t.name: torch.nn.Parameter(torch.randn(t.shape, device=device).bfloat16() * 0.02)
            for t in block.tensors
        }
        for block in inventory.blocks[:2]
    ]
    for tensors in parameters_of:
        body.bind(tensors)
    return body, parameters_of[1]


def batch(config: Any, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, config.vocab_size, (args.batch, args.context))
    row = torch.arange(args.context) % (args.documents or args.context)
    return {"input_ids": ids, "position_ids": row.expand_as(ids).clone()}


def layer_step(
    body: SplitModel, parameters: dict[str, torch.nn.Parameter], micro: MicroBatch
) -> Callable[[], None]:
    """Return a function that runs the engine's forward and backward pass of the layer."""
    with torch.no_grad():
        hidden, calls = body.embed(micro)
    gradient = torch.ones_like(hidden)

    def step() -> None:
        with torch.no_grad():
            body.layer(0, hidden, calls)
        source = hidden.detach().requires_grad_()
        with torch.enable_grad():
            out = body.layer(0, source, calls)
        differentiate(out, gradient, source, parameters, lambda name, parameters_of: None)

    return step


def timed(step: Callable[[], None], device: torch.device) -> float:
    settle(device)
    began = time.perf_counter()
    step()
    settle(device)
    return time.perf_counter() - began


def peak(step: Callable[[], None], device: torch.device) -> int:
    """Return the peak bytes that a step allocates on a GPU, or 0 on a CPU."""
    if device.type != "cuda":
        return 0
    settle(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    settle(device)
    return torch.cuda.max_memory_allocated() - before


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    args = arguments()
    config = config_of(args.shape, args.context)
    results: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(args).items()}}
    for way in args.ways:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        measured = results[way] = measure(config, args, WAYS[way])
        sizes = [format_bytes(measured[k]) for k in ("peak_nbytes", "working_nbytes")]
        print(
            f"{way}: {measured['seconds']['p50']:.4f} s (first {measured['first_seconds']:.1f} s), "
            f"{sizes[0]} used of {sizes[1]} planned, {measured['graphs']} graphs",
            flush=True,
        )
    if args.save:
        what = f"layer_{args.shape}_{args.batch}x{args.context}"
        name = f"{what}_documents-{args.documents}" if args.documents else what
        print(certificate.save(name, results))


if __name__ == "__main__":
    main()
