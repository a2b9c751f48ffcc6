"""Find the parts of a training step whose bits differ from run to run.

    python bench/find_nondeterminism.py                   # three families, packed and plain rows
    python bench/find_nondeterminism.py --families llama --repeats 50 --no-deterministic

Runs each part of a step (embedding, every kind of layer, head, a whole step with its optimizer
sweep) many times from identical inputs, while a second stream keeps the GPU's copy engines and
memory busy. Does so in two fresh processes with empty compiler caches, and compares their bits.
Prints one line per part, and exits with status 1 if any part differs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import penstock
from penstock.engine.batches import split_batch
from penstock.engine.determinism import deterministic_kernels
from penstock.engine.gradients import differentiate
from penstock.engine.loss import ChunkedLoss, GradientSink
from penstock.model.compile import layer_kinds
from penstock.model.inventory import Inventory
from penstock.model.meta_model import build_model
from penstock.model.split import MicroBatch, SplitModel
from penstock.model.survey import survey_config
from penstock.plan.workload import Workload, default_numerics
from penstock.probe.machine_choice import this_machine

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "olmo2")
ROWS = 4
"""Rows of a micro-batch."""
STEPS, STEP_REPEATS = 3, 3
"""Optimizer steps of the whole run, and how often one process repeats that run."""

Tensors = dict[str, torch.Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=["llama", "qwen3", "gemma2"]
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-deterministic", action="store_true", help="allow any kernel")
    parser.add_argument("--device", default="cuda", help="cpu to try this script without a GPU")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--part", default="", help="run only parts whose name contains this")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def config_of(family: str) -> Any:
    """Return a model of about 100 million parameters, large enough for the usual kernels."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 50304, "hidden_size": 1024, "intermediate_size": 2816,
        "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64, "max_position_embeddings": 4096, "tie_word_embeddings": family == "qwen3",
    }  # fmt: skip
    kind = {
        "llama": "LlamaConfig", "qwen3": "Qwen3Config", "gemma2": "Gemma2Config",
        "gemma3": "Gemma3TextConfig", "olmo2": "Olmo2Config",
    }[family]  # fmt: skip
    if family.startswith("gemma"):
        sizes |= {"sliding_window": 512}
        sizes |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    return getattr(transformers, kind)(**sizes)


# The parts of a step.


class Parts:
    """A model's parts with random weights, each a function that returns tensors to compare."""

    def __init__(
        self, config: Any, work: Workload, inventory: Inventory, device: torch.device
    ) -> None:
        self._inventory, self._work, self._device = inventory, work, device
        self._numerics = numerics = work.numerics
        bare = build_model(config, torch.bfloat16, self._device)
        self._model = SplitModel(
            bare, inventory, mlp_tile=numerics.mlp_tile, compiled=numerics.compiled,
            deterministic=numerics.deterministic,
        )  # fmt: skip
        drawn = torch.Generator(self._device).manual_seed(1)
        self._weights = [
            {
                t.name: torch.nn.Parameter(
                    0.02 * torch.randn(t.shape, device=self._device, generator=drawn).bfloat16()
                )
                for t in block.tensors
            }
            for block in inventory.blocks
        ]

    def all(self) -> Iterator[tuple[str, Callable[[], Tensors]]]:
        for rows in ("plain", "packed"):
            micro = self._micro_batch(packed=rows == "packed")
            yield f"{rows} embedding", lambda micro=micro: self._embedding(micro)
            self._bind_embedding()
            with torch.no_grad():
                hidden, micro.calls = self._model.embed(micro)
            kinds = layer_kinds(self._model.layers)
            for index in sorted(kinds.index(kind) for kind in set(kinds)):
                yield (
                    f"{rows} layer {index}",
                    lambda index=index, hidden=hidden, micro=micro: self._layer(
                        index, hidden, micro
                    ),
                )
            yield f"{rows} head", lambda hidden=hidden, micro=micro: self._head(hidden, micro)

    def _micro_batch(self, *, packed: bool) -> MicroBatch:
        batch = make_batch(self._inventory.vocabulary, self._work.context, packed=packed)
        return split_batch(batch, self._work, 1, self._device).rounds[0][0]

    def _bind_embedding(self) -> None:
        self._model.bind(self._weights[0])

    def _embedding(self, micro: MicroBatch) -> Tensors:
        self._bind_embedding()
        with torch.enable_grad():
            out, _ = self._model.embed(micro)
        return {"output": out.detach()} | self._gradients(out, None, self._weights[0])

    def _layer(self, index: int, hidden: torch.Tensor, micro: MicroBatch) -> Tensors:
        weights = self._weights[index + 1]
        self._model.bind(weights)
        assert micro.calls is not None
        with torch.no_grad():
            first = self._model.layer(index, hidden, micro.calls)
        source = hidden.detach().requires_grad_()
        with torch.enable_grad():
            out = self._model.layer(index, source, micro.calls)
        found = {"forward": first, "recomputed": out.detach()}
        return found | self._gradients(out, source, weights)

    def _head(self, hidden: torch.Tensor, micro: MicroBatch) -> Tensors:
        weights = self._weights[-1] | (self._weights[0] if self._inventory.tied else {})
        self._model.bind_head(weights)
        loss = ChunkedLoss(
            self._model.logits, self._numerics.loss_chunk,
            fused=self._numerics.loss_kernel == "fused",
            label_smoothing=self._numerics.label_smoothing,
        )  # fmt: skip
        sums: Tensors = {}

        def add(name: str, gradient: torch.Tensor) -> None:
            sums[name] = gradient.float() + sums[name] if name in sums else gradient.float()

        states = hidden.detach().clone().view(-1, hidden.shape[-1])
        total = loss.backward(
            states, micro.targets.view(-1), GradientSink(weights, add), states.shape[0], 1.0
        )
        return {"loss": total, "gradient of the input": states, **sums}

    def _gradients(
        self, out: torch.Tensor, source: torch.Tensor | None, weights: Tensors
    ) -> Tensors:
        drawn = torch.Generator(self._device).manual_seed(2)
        gradient = torch.randn(out.shape, device=self._device, generator=drawn).to(out.dtype)
        found: Tensors = {}

        def keep(name: str, value: torch.Tensor) -> None:
            found[name] = value.clone()  # its memory is freed when this returns

        into = torch.zeros_like(gradient)
        differentiate(out, gradient, source, weights, keep, into=into)
        return found if source is None else {"gradient of the input": into, **found}


def make_batch(
    vocabulary: int, context: int, *, packed: bool, seed: int = 3
) -> dict[str, torch.Tensor]:
    """Return tokens with a skewed distribution, as in text: many share a row of the embedding."""
    drawn = torch.Generator().manual_seed(seed)
    skewed = torch.rand(ROWS, context, generator=drawn) ** 4
    batch = {"input_ids": (skewed * (vocabulary - 1)).long()}
    batch["labels"] = batch["input_ids"].clone()
    if packed:
        # Documents of 1 to 400 tokens, other ones in each row.
        lengths = torch.randint(1, 400, (ROWS, context), generator=drawn)
        rows = [torch.cat([torch.arange(int(n)) for n in row])[:context] for row in lengths]
        batch["position_ids"] = torch.stack(rows)
    return batch


def run_steps(config: Any, args: argparse.Namespace, packed: bool) -> Tensors:
    """Train a few steps with default settings; return losses and all weights and moments."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    found: Tensors = {}
    with penstock.prepare(
        model, context=args.context, batch=2 * ROWS, micro_batch=str(ROWS), device=args.device,
        budget={"hbm": "8GiB", "dram": "8GiB"}, deterministic=not args.no_deterministic, lr=1e-3,
    ) as engine:  # fmt: skip
        for number in range(STEPS):
            halves = [
                make_batch(config.vocab_size, args.context, packed=packed, seed=10 * number + half)
                for half in range(2)
            ]
            batch = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
            found[f"loss {number}"] = engine.step(batch)
            found[f"norm {number}"] = torch.tensor(engine.grad_norm)
        engine.finish()
        for block in engine.inventory.blocks:
            for tensor in block.tensors:
                for name, value in engine.state[tensor.name].items():
                    found[f"{tensor.name} {name}"] = value.clone()
    return found


# Comparing.


@contextlib.contextmanager
def busy_device(device: torch.device) -> Iterator[None]:
    """Copy to, from and on the GPU on a second stream inside the block."""
    if device.type != "cuda":
        yield
        return
    stop = threading.Event()
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    here, there = (torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))

    def copy() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                here.copy_(host, non_blocking=True)
                there.copy_(here)
                host.copy_(there, non_blocking=True)
                stream.synchronize()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def digest(tensors: Tensors) -> dict[str, str]:
    """Return a hash of each tensor's bits."""
    return {
        name: hashlib.sha256(
            t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        ).hexdigest()[:16]
        for name, t in tensors.items()
    }


def check(name: str, run: Callable[[], Tensors], repeats: int) -> dict[str, Any]:
    """Run a part several times; report its bits, and how many repeats differ in which tensors."""
    first = {key: value.clone() for key, value in run().items()}
    counts: dict[str, int] = {}
    for _ in range(repeats - 1):
        for key, value in run().items():
            same = torch.equal(
                first[key].contiguous().flatten().view(torch.uint8),
                value.contiguous().flatten().view(torch.uint8),
            )
            counts[key] = counts.get(key, 0) + (not same)
    differing = {key: count for key, count in counts.items() if count}
    return {"part": name, "digest": digest(first), "differing": differing, "repeats": repeats}


def run_in_process(args: argparse.Namespace) -> None:
    """Check every part, and print one line of JSON for each."""
    deterministic, device = not args.no_deterministic, torch.device(args.device)
    for family in args.families:
        config = config_of(family)
        inventory = survey_config(config, name=family)
        size = {"context": args.context, "batch": ROWS}
        kernels = this_machine(args.device).kernels
        numerics = default_numerics(inventory, **size, micro_batch=ROWS, kernels=kernels)
        work = Workload(**size, numerics=replace(numerics, deterministic=deterministic))
        with busy_device(device), deterministic_kernels(deterministic):
            for name, run in Parts(config, work, inventory, device).all():
                if args.part in name:
                    print(json.dumps(check(f"{family} {name}", run, args.repeats)), flush=True)
        for rows in ("plain", "packed"):
            if args.part in f"{rows} steps":
                run = functools.partial(run_steps, config, args, rows == "packed")
                with busy_device(device):
                    result = check(f"{family} {rows} steps", run, STEP_REPEATS)
                print(json.dumps(result), flush=True)


def start_process(number: int, caches: Path) -> list[dict[str, Any]]:
    """Run all parts in a fresh process with empty compiler caches."""
    environment = dict(os.environ)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        folder = caches / f"{name}-{number}"
        folder.mkdir()
        environment[name] = str(folder)
    line = [sys.executable, "-W", "ignore", __file__, "--in-process", *sys.argv[1:]]
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"process {number} failed with status {done.returncode}")
    return [json.loads(text) for text in done.stdout.splitlines() if text.startswith('{"part"')]


def report(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Print one line about a part; return whether it always gave the same bits."""
    lines = []
    for number, result in enumerate((first, second), 1):
        if result["differing"]:
            worst = sorted(result["differing"].items(), key=lambda item: -item[1])
            named = ", ".join(f"{name} ({count})" for name, count in worst[:4])
            lines.append(f"within process {number}: {named}")
    apart = [name for name, bits in first["digest"].items() if second["digest"][name] != bits]
    if apart:
        lines.append(f"between processes: {', '.join(apart[:4])} ({len(apart)} in all)")
    tensors = f"{len(first['digest'])} tensors, 2 x {first['repeats']} repeats"
    print(f"{first['part']}: {'DIFFERS ' + '; '.join(lines) if lines else 'same bits'}, {tensors}")
    return not lines


def main() -> int:
    args = arguments()
    if args.in_process:
        run_in_process(args)
        return 0
    with tempfile.TemporaryDirectory() as caches:
        results = [start_process(number, Path(caches)) for number in range(2)]
    same = [report(*pair) for pair in zip(*results, strict=True)]
    print(f"{same.count(False)} of {len(same)} parts differ")
    return 0 if all(same) else 1


if __name__ == "__main__":
    raise SystemExit(main())
