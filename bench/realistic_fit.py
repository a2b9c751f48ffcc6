"""Train models of published sizes in a small HBM budget, and compare the losses with plain torch.

    python bench/realistic_fit.py --limit 570 --save        # exit code 3: work is left, call again
    python bench/realistic_fit.py --only qwen3-4b --arms penstock
    python bench/realistic_fit.py --tiny --device cpu --out build/realistic   # rehearse on a CPU

Each case runs in Penstock and in plain torch, each in a process of its own, with the same random
weights and tokens. Plain torch has 16-bit weights, fp32 master weights and AdamW states in GPU
memory, gradient checkpointing and a loss in chunks. Each result is one JSON file in `--out`, and a
later call runs what is missing. The losses may differ by 0.02.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from bench.bench_engine import summarize_timeline
from bench.measuring import Batch, HostPeak, device_peak, forget_device_peak, run_steps
from penstock.engine import initial_weights
from penstock.engine.model_source import inspect_model
from penstock.engine.plan_choice import plan_request
from penstock.engine.prepare import prepare
from penstock.plan.buffers import CONTEXT
from penstock.probe.machine_choice import machine_to_plan_for, this_machine
from penstock.settings import Settings
from penstock.tiers import Tier

TOLERANCE = 0.02
"""Largest difference of a loss from that of plain torch."""

ADAMW = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
CLIP = 1.0
STEPS = 6
LEFT = 3
"""Exit code if time ran out."""

CHUNK = 1 << 25
"""Elements of a weight that are drawn at a time: drawing must not need much of the HBM budget."""

ARMS = ("penstock", "plain")

SHOWN = ("planned_hbm", "live_peak", "reserved_peak", "replanned", "predicted_seconds",
         "median_step_seconds", "losses")  # fmt: skip
"""What the table shows of Penstock's record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a workload and budgets."""

    name: str
    family: str
    config: Mapping[str, Any]
    context: int
    batch: int
    hbm: str
    dram: str
    nvme: str | None = None
    micro_batch: int | None = None
    seconds: Mapping[str, int]
    """Expected seconds of each arm, with start-up and compilation."""

    def tiny(self) -> Case:
        """Return the case with a tiny model, to rehearse without a GPU."""
        small = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                 "vocab_size": 1000, "query_pre_attn_scalar": 16, "sliding_window": 16,
                 "layer_types": [_SLIDING, _FULL, _SLIDING]}  # fmt: skip
        config = {**self.config, **{k: v for k, v in small.items() if k in self.config}}
        return replace(self, config=config, context=48, hbm="64MiB", dram="256MiB", nvme=None)


_SLIDING, _FULL = "sliding_attention", "full_attention"


def _gemma3(hidden: int, mlp: int, layers: int, heads: int, shared: int, window: int) -> Any:
    return {
        "vocab_size": 262_144, "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": shared,
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": window,
        "layer_types": [_FULL if n % 6 == 5 else _SLIDING for n in range(layers)],
        "tie_word_embeddings": True,
    }  # fmt: skip


def _sizes(vocabulary: int, hidden: int, mlp: int, layers: int, heads: int, shared: int,
           tied: bool, **more: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": shared,
        "tie_word_embeddings": tied, **more,
    }  # fmt: skip


CASES = (
    Case(
        name="qwen3-4b", family="qwen3",
        config=_sizes(151_936, 2560, 9728, 36, 32, 8, True, head_dim=128),
        context=3000, batch=7, micro_batch=2, hbm="12GiB", dram="80GiB",
        seconds={"penstock": 130, "plain": 70},
    ),
    Case(
        name="gemma-3-1b", family="gemma3_text", config=_gemma3(1152, 6912, 26, 4, 1, 512),
        context=8192, batch=2, hbm="16GiB", dram="40GiB", seconds={"penstock": 100, "plain": 50},
    ),
    Case(
        name="gemma-3-4b", family="gemma3_text", config=_gemma3(2560, 10240, 34, 8, 4, 1024),
        context=4096, batch=4, hbm="16GiB", dram="80GiB", seconds={"penstock": 140, "plain": 70},
    ),
    Case(
        name="phi-4-mini", family="phi3",
        config=_sizes(200_064, 3072, 8192, 32, 24, 8, True, partial_rotary_factor=0.75),
        context=4096, batch=4, hbm="16GiB", dram="80GiB", seconds={"penstock": 130, "plain": 70},
    ),
    Case(
        name="mistral-7b", family="mistral",
        config=_sizes(32_768, 4096, 14336, 32, 32, 8, False, head_dim=128, sliding_window=None),
        context=4096, batch=4, hbm="16GiB", dram="100GiB", nvme="24GiB",
        seconds={"penstock": 190, "plain": 100},
    ),
    Case(
        name="olmo-2-7b", family="olmo2", config=_sizes(100_352, 4096, 11008, 32, 32, 32, False),
        context=4096, batch=4, hbm="16GiB", dram="100GiB", nvme="24GiB",
        seconds={"penstock": 190, "plain": 100},
    ),
    Case(
        name="qwen3-8b", family="qwen3",
        config=_sizes(151_936, 4096, 12288, 36, 32, 8, False, head_dim=128),
        context=4096, batch=4, hbm="16GiB", dram="102GiB", nvme="30GiB",
        seconds={"penstock": 220, "plain": 110},
    ),
    # For the predicted time of a step: models that no constant was fitted to.
    Case(
        name="qwen3-4b-in-24gib", family="qwen3",
        config=_sizes(151_936, 2560, 9728, 36, 32, 8, True, head_dim=128),
        context=4096, batch=4, hbm="24GiB", dram="80GiB", seconds={"penstock": 130, "plain": 70},
    ),
    Case(
        name="mistral-7b-in-20gib", family="mistral",
        config=_sizes(32_768, 4096, 14336, 32, 32, 8, False, head_dim=128, sliding_window=None),
        context=4096, batch=4, hbm="20GiB", dram="100GiB", seconds={"penstock": 190, "plain": 100},
    ),
)  # fmt: skip


def make_config(case: Case) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fixed = {"max_position_embeddings": max(case.context, 4096), "pad_token_id": 0,
             "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    return CONFIG_MAPPING[case.family](**{**fixed, **case.config})


def batches(case: Case) -> Iterator[dict[str, torch.Tensor]]:
    """Return batches of tokens with unequal frequencies, so that the loss falls in few steps."""
    drawn = torch.Generator().manual_seed(7)
    shape, vocabulary = (case.batch, case.context), case.config["vocab_size"]
    for _ in range(STEPS):
        uniform = torch.rand(shape, generator=drawn)
        yield {
            "input_ids": torch.exp(uniform * math.log(vocabulary)).long().clamp(max=vocabulary - 1)
        }


# Weights: the same in both arms, drawn on the device.


def fill(name: str, family: str, into: torch.Tensor, device: str) -> None:
    """Set a weight by its name: norms to one, biases to zero, and matrices to random numbers."""
    if into.dim() == 1:
        adds_one = family.startswith("gemma")
        into.fill_(0.0 if name.endswith("bias") or adds_one else 1.0)
        return
    drawn: Any = torch.Generator(device)
    drawn.manual_seed(zlib.crc32(name.encode()))
    flat = into.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        part = torch.empty(min(CHUNK, flat.numel() - start), dtype=into.dtype, device=device)
        flat[start : start + part.numel()].copy_(part.normal_(0.0, 0.02, generator=drawn))


def use_drawn_weights(family: str, device: str) -> None:
    """Make `init="random"` draw with `fill`."""

    def draw_block(_: object, block: Any, __: int) -> dict[str, torch.Tensor]:
        drawn = {}
        for tensor in block.tensors:
            drawn[tensor.name] = torch.empty(tensor.shape, dtype=torch.bfloat16)
            fill(tensor.name, family, drawn[tensor.name], device)
        return drawn

    # Assigning to a name that does not exist would silently draw other weights.
    assert hasattr(initial_weights, "_draw_block")
    initial_weights._draw_block = draw_block


# The arms.


def run_penstock(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    device = args.device or "cuda"
    use_drawn_weights(case.family, device)
    with tempfile.TemporaryDirectory() as folder, HostPeak() as host:
        make_config(case).save_pretrained(folder)
        asked = {"context": case.context, "batch": case.batch, "clip": CLIP, "init": "random"}
        if case.micro_batch is not None:
            asked["micro_batch"] = case.micro_batch
        args.scratch.mkdir(parents=True, exist_ok=True)
        nvme = [f"{args.scratch}:{case.nvme}"] if case.nvme else []
        budget = {"hbm": case.hbm, "dram": case.dram, "nvme": nvme}
        began = time.perf_counter()
        predicted, parts, first = predict(folder, asked, budget, args)
        planned = time.perf_counter()
        engine = prepare(
            folder, budget=budget, device=args.device, optimizer=ADAMW, seed=0, **asked
        )
        ready = time.perf_counter()
        prepared = device_peak()
        forget_device_peak()
        seconds, losses = run_steps(engine.step, list(batches(case)))
        timeline = summarize_timeline(engine.timeline())
        engine.finish()
        live, reserved = device_peak()
        plan, outside = engine.plan, engine.device.nbytes_outside_torch()
        changed = engine.plan_change
        engine.close()
    return {
        "losses": losses, "step_seconds": seconds,
        "median_step_seconds": statistics.median(seconds[1:]), "predicted_seconds": predicted,
        "budget": budget, "planned_hbm": plan.peak(Tier.HBM),
        "context_planned": sum(p.nbytes for p in plan.pools if p.what == CONTEXT),
        "hbm_parts": dict(plan.parts(Tier.HBM)), "planned_dram": plan.peak(Tier.DRAM),
        "live_peak": live, "reserved_peak": reserved, "prepare_reserved": prepared[1],
        "host_peak": host.nbytes, "replanned": plan.pools != first.pools
        or plan.placement != first.placement, "plan_change": changed,
        "context_measured": outside, "plan_seconds": planned - began,
        "prepare_seconds": ready - planned, "micro_batch": plan.workload.numerics.micro_batch,
        "timeline": timeline, "predicted_parts": parts,
    }  # fmt: skip


def predict(folder: str, asked: Mapping[str, Any], budget: Any, args: argparse.Namespace) -> Any:
    """Return predicted seconds of a step, of its parts, and the plan before any rehearsal.

    Seconds are predicted with the speeds of this machine's own probe, if there is one, and with
    those of a preset.
    """
    settings = Settings().replace(dict(asked))
    config, inventory = inspect_model(folder, settings)
    here = this_machine(args.device, [str(args.scratch)] if budget["nvme"] else ())
    choice = plan_request(inventory, settings, here, config=config, budget=budget).make_plan()
    assert choice.planned is not None
    costs = {"this": choice.planned.cost}
    if args.machine and here.machine.gpus:
        named = machine_to_plan_for(args.machine)
        other = plan_request(inventory, settings, named, config=config, budget=budget).make_plan()
        assert other.planned is not None
        costs[args.machine] = other.planned.cost
    predicted = {name: cost.step_seconds for name, cost in costs.items()}
    parts = {
        name: {"phases": dict(cost.phases)}
        | {"busy": {key: share * cost.step_seconds for key, share in cost.busy.items()}}
        for name, cost in costs.items()
    }
    return predicted, parts, choice.plan


def run_plain(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Train with plain torch, everything in GPU memory."""
    import transformers

    device = args.device or "cuda"
    if args.plain_hbm:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.plain_hbm * 2**30 / total)
    family: Any = transformers.AutoModelForCausalLM
    began = time.perf_counter()
    with torch.device(device):
        model = family.from_config(make_config(case), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, case.family, parameter.data, device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model.config.use_cache = False
    step = PlainStep(model, case.micro_batch or max(1, 16384 // case.context))
    ready = time.perf_counter()
    forget_device_peak()
    seconds, losses = run_steps(step, list(batches(case)))
    live, reserved = device_peak()
    return {"losses": losses, "step_seconds": seconds, "live_peak": live,
            "median_step_seconds": statistics.median(seconds[1:]), "reserved_peak": reserved,
            "prepare_seconds": ready - began}  # fmt: skip


class PlainStep:
    """One optimizer step: AdamW on fp32 master weights, one parameter at a time to save memory."""

    def __init__(self, model: Any, micro_batch: int) -> None:
        self.model, self.micro_batch = model, micro_batch
        self.parameters = list(model.parameters())
        self.device = self.parameters[0].device
        self.masters = [p.detach().float() for p in self.parameters]
        fused = self.device.type == "cuda"
        self.optimizers = [torch.optim.AdamW([m], fused=fused, **ADAMW) for m in self.masters]

    def __call__(self, batch: Batch) -> float:
        ids = batch["input_ids"].to(self.device)
        items = ids.shape[0] * (ids.shape[1] - 1)
        total = torch.zeros((), device=self.device)
        for part in torch.split(ids, self.micro_batch):
            loss = self._loss(part) / items
            loss.backward()
            total += loss.detach()
        norms = torch.stack([p.grad.float().norm() for p in self.parameters])
        scale = (CLIP / (norms.norm() + 1e-6)).clamp(max=1.0)
        for parameter, master, optimizer in zip(
            self.parameters, self.masters, self.optimizers, strict=True
        ):
            master.grad = parameter.grad.float() * scale
            parameter.grad = None
            optimizer.step()
            master.grad = None
            parameter.data.copy_(master)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return float(total)

    def _loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of all tokens, in chunks whose logits are recomputed."""
        from torch.utils.checkpoint import checkpoint

        hidden = self.model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        targets = ids[:, 1:].flatten()

        def chunk_loss(some: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            logits = self.model.lm_head(some).float()
            return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")

        parts = zip(hidden.split(1024), targets.split(1024), strict=True)
        losses = [checkpoint(chunk_loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum()


# The table.


def run_all(args: argparse.Namespace) -> int:
    """Run the missing arms that fit into the time; return the exit code."""
    end = time.monotonic() + args.limit
    left: list[str] = []
    for case in select(args):
        for arm in args.arms:
            path = args.out / f"{case.name}-{arm}.json"
            if path.exists() and not _must_run(json.loads(path.read_text())):
                continue
            remaining = end - time.monotonic()
            if remaining < min(case.seconds[arm], args.limit - 1):
                left.append(path.stem)
                continue
            run_child(case.name, arm, args, remaining - 5)
    if left:
        print("not started because time ran out:", ", ".join(left), flush=True)
    results = collect(args)
    print(json.dumps(results["summary"], indent=1))
    if args.save:
        print(certificate.save("realistic_fit", results))
    bad = [
        row["case"] for row in results["summary"] if row["verdict"] in ("failed", "losses differ")
    ]
    return 1 if bad else LEFT if left else 0


def _must_run(record: Mapping[str, Any]) -> bool:
    """Return whether a record is no result: plain torch that does not fit is one."""
    return "error" in record and not (record["arm"] == "plain" and record.get("out_of_memory"))


def select(args: argparse.Namespace) -> list[Case]:
    cases = [case for case in CASES if not args.only or case.name in args.only]
    return [case.tiny() for case in cases] if args.tiny else cases


def run_child(name: str, arm: str, args: argparse.Namespace, seconds: float) -> None:
    """Run one arm in a process of its own, with its output in a log."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--child", name, arm,
               "--out", str(args.out), "--scratch", str(args.scratch)]  # fmt: skip
    command += ["--tiny"] if args.tiny else []
    command += ["--device", args.device] if args.device else []
    command += ["--machine", args.machine] if args.machine else []
    command += ["--plain-hbm", str(args.plain_hbm)] if args.plain_hbm else []
    log, began = args.out / f"{name}-{arm}.log", time.monotonic()
    print(f"== {name}: {arm}", flush=True)
    with log.open("w") as stream:
        child = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    tail = log.read_text(errors="replace").splitlines()[-8:]
    print("\n".join(f"   {line[:240]}" for line in tail))
    print(f"   exit code {child.returncode} after {time.monotonic() - began:.0f} s", flush=True)
    path = args.out / f"{name}-{arm}.json"
    if not path.exists():
        error = f"exit code {child.returncode}: {' '.join(tail)[-1000:]}"
        path.write_text(json.dumps({"case": name, "arm": arm, "error": error}))


def child_main(args: argparse.Namespace) -> int:
    """Run one arm in this process and write its record."""
    name, arm = args.child
    args.only = [name]
    (case,) = select(args)
    record: dict[str, Any] = {"case": name, "arm": arm}
    path = args.out / f"{name}-{arm}.json"
    path.unlink(missing_ok=True)
    try:
        record |= (run_penstock if arm == "penstock" else run_plain)(case, args)
    except Exception as failed:
        traceback.print_exc()
        record |= {"error": f"{type(failed).__name__}: {failed}"[:2000],
                   "out_of_memory": isinstance(failed, torch.OutOfMemoryError)}  # fmt: skip
    path.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if "error" in record else 0


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Read every record in the output directory and compare the arms of each case."""
    records = {}
    for case in CASES:
        for arm in ARMS:
            path = args.out / f"{case.name}-{arm}.json"
            if path.exists():
                records[case.name, arm] = json.loads(path.read_text())
    summary = [compare(case.name, records) for case in CASES
               if (case.name, "penstock") in records]  # fmt: skip
    return {"summary": summary, "records": list(records.values())}


def compare(name: str, records: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[str, Any]:
    """Return one line of the table."""
    mine, plain = records[name, "penstock"], records.get((name, "plain"))
    row: dict[str, Any] = {"case": name, "verdict": "trained"}
    if "error" in mine:
        return row | {"verdict": "failed", "error": mine["error"]}
    row |= {key: mine[key] for key in SHOWN}
    if not all(math.isfinite(loss) for loss in mine["losses"]):
        return row | {"verdict": "failed", "error": "a loss is not finite"}
    if plain is None:
        return row | {"plain": "not run"}
    if plain.get("out_of_memory"):
        return row | {"plain": "does not fit"}
    if "error" in plain:
        return row | {"verdict": "failed", "error": f"plain torch: {plain['error'][:500]}"}
    apart = max(abs(a - b) for a, b in zip(mine["losses"], plain["losses"], strict=True))
    verdict = "losses agree" if apart <= TOLERANCE else "losses differ"
    return row | {"verdict": verdict, "largest_difference": apart, "plain_losses": plain["losses"],
                  "plain_step_seconds": plain["median_step_seconds"]}  # fmt: skip


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--limit", type=float, default=570, help="seconds for this call")
    parser.add_argument("--device", help="cpu to rehearse; default: the GPU")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to rehearse on a CPU")
    parser.add_argument("--machine", default="h200", help="preset to predict with as well")
    parser.add_argument("--plain-hbm", type=float, help="GiB that plain torch may keep")
    parser.add_argument("--out", type=Path, default=Path("build/realistic_fit"))
    parser.add_argument("--scratch", type=Path, default=Path("build/scratch"))
    parser.add_argument("--save", action="store_true", help="write bench/results")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    args.out, args.scratch = args.out.resolve(), args.scratch.resolve()
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    args.out.mkdir(parents=True, exist_ok=True)
    return child_main(args) if args.child else run_all(args)


if __name__ == "__main__":
    sys.exit(main())
