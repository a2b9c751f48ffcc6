"""Measure LoRA with weights that do not fit in the GPU's memory budget.

    python bench/bench_lora.py --case 8b --save     # bf16 in 12 GiB, against everything in HBM
    python bench/bench_lora.py --case 32b --save    # bf16 and nf4 in 24 GiB, two steps
    python bench/bench_lora.py --case 70b --save    # nf4 and int4 in 24 GiB, two steps
    python bench/bench_lora.py --case tiny          # a rehearsal of all of it, also without a GPU

Weights are one random part that is repeated, because speed does not depend on them. They are made
and quantized tensor by tensor, on the GPU if there is one. The arms of a case run in turn in one
process. With --save, writes bench/results/lora_<case>_<hardware>_<date>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from bench.measuring import HostPeak, device_peak, forget_device_peak, run_steps
from bench.repeated_weights import repeat_weights
from bench.shapes import config_of
from penstock.engine.prepare import prepare
from penstock.model.meta_model import weight_dtype
from penstock.planner import kept_layers
from penstock.tiers import Tier
from penstock.units import format_bytes

RANK, ALPHA = 16, 32
CONTEXT, ROWS = 4096, 4
"""16,384 tokens per step."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train."""

    hbm: str = ""
    """Budget; empty for PEFT in plain torch with everything in HBM."""
    quantize: str | None = None
    steps: int = 3
    recompute: bool = False
    """Whether every layer is recomputed, also where HBM has room for what its forward saved."""


CASES: dict[str, tuple[str, dict[str, Arm]]] = {
    "8b": ("8b", {
        "streamed": Arm(hbm="12GiB", steps=6, recompute=True),
        "resident": Arm(hbm="130GiB", steps=6, recompute=True),
        "resident, all kept": Arm(hbm="130GiB", steps=6),
        "peft": Arm(steps=4),
        "streamed again": Arm(hbm="12GiB", steps=6, recompute=True),
    }),
    "32b": ("32b", {
        "bf16": Arm(hbm="24GiB", steps=2), "nf4": Arm(hbm="24GiB", quantize="nf4", steps=2),
    }),
    "70b": ("70b", {
        "nf4": Arm(hbm="24GiB", quantize="nf4", steps=2),
        "int4": Arm(hbm="24GiB", quantize="int4", steps=2),
    }),
    "tiny": ("tiny", {
        "streamed": Arm(hbm="40MiB", recompute=True),
        "resident": Arm(hbm="1GiB", recompute=True), "resident, all kept": Arm(hbm="1GiB"),
        "peft": Arm(),
        "nf4": Arm(hbm="40MiB", quantize="nf4"), "int4": Arm(hbm="40MiB", quantize="int4"),
    }),
}  # fmt: skip
"""By name: the shape of the model, and what is measured."""

GOAL = 1.05
"""Time of a streamed step relative to that of the same LoRA with everything in HBM."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="tiny")
    parser.add_argument("--arm", action="append", help="only this one; repeatable")
    parser.add_argument("--context", type=int)
    parser.add_argument("--save", action="store_true")
    return parser.parse_args()


def batches(vocabulary: int, context: int, steps: int) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    shape = (ROWS, context)
    return [
        {"input_ids": torch.randint(0, vocabulary, shape, generator=drawn)} for _ in range(steps)
    ]


def measure_engine(config: Any, arm: Arm, context: int) -> dict[str, Any]:
    plans = mock.patch.object(kept_layers, "may_keep", return_value=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        HostPeak() as host,
        plans if arm.recompute else contextlib.nullcontext(),
    ):
        config.save_pretrained(folder)
        began = time.perf_counter()
        engine = prepare(
            folder, context=context, batch=ROWS, lora=f"r={RANK},alpha={ALPHA}",
            quantize=arm.quantize, init="random", lr=1e-4, weight_decay=0.0,
            budget={"hbm": arm.hbm, "dram": "auto"}, self_check=False,
        )  # fmt: skip
        ready = time.perf_counter() - began
        plan = engine.plan
        seconds, losses = run_steps(engine.step, batches(config.vocab_size, context, arm.steps))
        engine.finish()
        allocated, reserved = device_peak()
        measured = {
            "ready_seconds": ready, "step_seconds": seconds, "losses": losses,
            "tokens_per_second": ROWS * context / min(seconds[1:] or seconds),
            "planned": {tier.value: plan.peak(tier) for tier in Tier},
            "hbm_allocated": allocated, "hbm_reserved": reserved,
            "tiers": engine.tiers(), "host": engine.host_memory(),
            "plan_change": engine.plan_change,
            "kept_passes": sum(block.kept for block in plan.placement.blocks),
        }  # fmt: skip
        engine.close()
        del engine
    forget_device_peak()
    return measured | {"host_peak_nbytes": host.nbytes}


def measure_peft(config: Any, arm: Arm, context: int) -> dict[str, Any]:
    """Measure PEFT in a torch loop: frozen bf16 weights, fp32 adapters, checkpointing."""
    import transformers
    from peft import LoraConfig, get_peft_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    forget_device_peak()
    family: Any = transformers.AutoModelForCausalLM
    with torch.device(device):
        model: Any = family.from_config(config, dtype=weight_dtype("bf16"))
        wanted = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
        model = get_peft_model(model, wanted, autocast_adapter_dtype=False)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    step = peft_step(model)
    seconds, losses = run_steps(step, batches(config.vocab_size, context, arm.steps))
    allocated, reserved = device_peak()
    del model, step
    return {
        "step_seconds": seconds, "losses": losses,
        "tokens_per_second": ROWS * context / min(seconds[1:] or seconds),
        "hbm_allocated": allocated, "hbm_reserved": reserved,
    }  # fmt: skip


def peft_step(model: Any) -> Callable[[Any], float]:
    """Return a function that trains the adapter for one step, one row at a time."""
    adapter = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float() for p in adapter]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.0)
    device = adapter[0].device

    def step(batch: Any) -> float:
        ids = batch["input_ids"].to(device)
        items, total = ids.shape[0] * (ids.shape[1] - 1), 0.0
        for row in ids.split(1):
            loss = model(input_ids=row, labels=row, num_items_in_batch=items).loss
            loss.backward()
            total += float(loss.detach())
        for master, parameter in zip(masters, adapter, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, adapter, strict=True):
                parameter.copy_(master)
        return total

    return step


def show(name: str, found: dict[str, Any]) -> None:
    steps = ", ".join(f"{s:.2f}" for s in found["step_seconds"])
    print(f"{name}: steps {steps} s; {found['tokens_per_second']:,.0f} tokens/s; "
          f"HBM reserved {format_bytes(found['hbm_reserved'])}", flush=True)  # fmt: skip
    if "planned" in found:
        planned = {tier: format_bytes(n) for tier, n in found["planned"].items() if n}
        ready = f"{found['ready_seconds']:.1f} s"
        print(f"  ready after {ready}; planned {planned}; tiers {found['tiers']}", flush=True)


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """Return the median streamed step relative to the other arms, without the first steps."""
    streamed = [s for n, r in results.items() if "streamed" in n for s in r["step_seconds"][1:]]
    others = {n: r["step_seconds"][1:] for n, r in results.items() if n in ("resident", "peft")}
    if not streamed:
        return {}
    return {n: statistics.median(streamed) / statistics.median(s) for n, s in others.items() if s}


def main() -> None:
    args = arguments()
    shape, arms = CASES[args.case]
    context = args.context or (CONTEXT if args.case != "tiny" else 128)
    config = config_of(shape, context)
    repeat_weights(weight_dtype("bf16"))
    results: dict[str, Any] = {}
    for name, arm in arms.items():
        if args.arm and name not in args.arm:
            continue
        measure = measure_engine if arm.hbm else measure_peft
        results[name] = measure(config, arm, context)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        show(name, results[name])
        compared = ratios(results)
        if args.save:  # so far, so that it survives if the next arm fails
            saved = {"context": context, "rows": ROWS, "rank": RANK, "arms": results}
            certificate.save(f"lora_{args.case}", saved | {"ratios": compared, "goal": GOAL})
    for name, ratio in compared.items():
        print(f"streamed / {name}: {ratio:.3f} (goal for resident: at most {GOAL})")


if __name__ == "__main__":
    main()
