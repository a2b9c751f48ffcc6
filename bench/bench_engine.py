"""Whole optimizer steps of a model of a given shape, streamed, beside plain torch in HBM.

    python bench/bench_engine.py --shape 3b --context 4096 --batch 4 --hbm 24GiB --dram 60GiB

Weights are random: speed does not depend on them. Prints one line per step and writes
bench/results/engine_<shape>_<hardware>_<date>.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from bench.measuring import HostPeak, device_peak, forget_device_peak, run_steps
from bench.plain import plain_step
from bench.shapes import SHAPES, config_of
from penstock.engine import initial_weights
from penstock.engine.prepare import prepare
from penstock.engine.timeline import Event, busy, idle
from penstock.machine.presets import preset
from penstock.plan.plan import Plan
from penstock.units import format_bytes

PREDICTED = ".predicted.json"
"""Beside a plan: what it was expected to take."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--hbm", default="24GiB")
    parser.add_argument("--dram", default="auto")
    parser.add_argument("--nvme", action="append", default=[])
    parser.add_argument("--moments", default="fp32")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--device")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--resident", type=Path, help="also this plan: all of it in HBM")
    parser.add_argument("--plain", action="store_true", help="also the same in HBM by plain torch")
    parser.add_argument(
        "--repeat-weights",
        action="store_true",
        help="draw 16 M weights and repeat them: quicker, and as good for speed",
    )
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--name", help="of the results file, after engine_")
    return parser.parse_args()


def batches(config: Any, chosen: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    shape = (chosen.batch, chosen.context)
    return [
        {"input_ids": torch.randint(0, config.vocab_size, shape, generator=drawn)}
        for _ in range(chosen.steps)
    ]


def streamed(config: Any, chosen: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, HostPeak() as host:
        config.save_pretrained(folder)
        began = time.perf_counter()
        budget = {"hbm": chosen.hbm, "dram": chosen.dram, "nvme": chosen.nvme}
        engine = prepare(
            folder,
            context=chosen.context,
            batch=chosen.batch,
            micro_batch=chosen.micro_batch,
            moments=chosen.moments,
            dtype=chosen.dtype,
            init="random",
            device=chosen.device,
            optimizer={"lr": 1e-5},
            budget=budget,
            machine=preset(chosen.machine) if chosen.machine else None,
            plan=Plan.load(chosen.plan) if chosen.plan else None,
        )
        start_up = time.perf_counter() - began
        print(f"ready after {start_up:.1f} s; tiers {engine.tiers()}", flush=True)
        seconds, losses = run_steps(engine.step, batches(config, chosen))
        told = tell_timeline(engine.timeline())
        engine.finish()
        hbm, tiers = device_peak(), engine.tiers()
        engine.close()
        del engine
    forget_device_peak()
    print(f"host peak {format_bytes(host.nbytes)}, HBM allocated/reserved "
          f"{format_bytes(hbm[0])} / {format_bytes(hbm[1])}", flush=True)  # fmt: skip
    return {
        "start_up_seconds": start_up, "step_seconds": seconds, "losses": losses, "tiers": tiers,
        "timeline": told, "host_peak_nbytes": host.nbytes,
        "hbm_allocated": hbm[0], "hbm_reserved": hbm[1], "predicted": predicted(chosen.plan),
    }  # fmt: skip


def predicted(plan: Path | None) -> Any:
    """What the plan was expected to take, where it was made in advance."""
    beside = plan.with_suffix(PREDICTED) if plan else None
    return json.loads(beside.read_text()) if beside and beside.exists() else None


def tell_timeline(events: list[Event]) -> dict[str, Any]:
    """Busy seconds of each lane, and where the GPU waited."""
    lanes = {lane: round(seconds, 4) for lane, seconds in busy(events).items()}
    gaps = sorted(idle(events, "compute"), key=lambda gap: gap[0] - gap[1])
    waits = [
        f"{start:.3f} to {end:.3f} s before {op.verb} {op.block} of {op.phase}"
        for start, end, op in gaps[:8]
    ]
    by_verb: dict[str, float] = {}
    for event in events:
        where = "GPU " if event.operation.gpu else ""
        key = f"{where}{event.operation.verb} {event.operation.phase}"
        by_verb[key] = round(by_verb.get(key, 0.0) + event.seconds, 4)
    print("busy", lanes, flush=True)
    print("by verb", by_verb, flush=True)
    print("GPU idle", round(sum(end - start for start, end, _ in gaps), 4), waits, flush=True)
    return {"busy": lanes, "by_verb": by_verb, "waits": waits}


def plain(config: Any, chosen: argparse.Namespace) -> dict[str, Any]:
    """The yardstick: all of it in the device's memory."""
    import transformers

    where = "cuda" if torch.cuda.is_available() else "cpu"
    if where == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    forget_device_peak()
    dtype = torch.bfloat16 if chosen.dtype == "bf16" else torch.float16
    family: Any = transformers.AutoModelForCausalLM
    with HostPeak() as host:
        with torch.device(where):
            model = family.from_config(config, dtype=dtype)
        model.gradient_checkpointing_enable()
        model.train()
        size = chosen.micro_batch or chosen.batch
        step = plain_step(model, adamw={"lr": 1e-5}, clip=1.0, micro_batch=size)
        seconds, losses = run_steps(step, batches(config, chosen))
    allocated, reserved = device_peak()
    return {
        "step_seconds": seconds, "losses": losses, "host_peak_nbytes": host.nbytes,
        "hbm_allocated": allocated, "hbm_reserved": reserved,
    }  # fmt: skip


def repeat_weights(chosen: argparse.Namespace) -> None:
    """Instead of drawing each weight anew. In 16 bit, so that masters have no low half to find."""
    dtype = torch.bfloat16 if chosen.dtype == "bf16" else torch.float16
    drawn = (0.02 * torch.randn(1 << 24)).to(dtype)

    def repeated(_: object, block: Any, __: int) -> dict[str, torch.Tensor]:
        def of(tensor: Any) -> torch.Tensor:
            times = -(-tensor.elements // drawn.numel())
            return drawn.repeat(times)[: tensor.elements].view(tensor.shape)

        return {tensor.name: of(tensor) for tensor in block.tensors}

    setattr(initial_weights, "_drawn", repeated)  # noqa: B010


def main() -> None:
    chosen = arguments()
    if chosen.repeat_weights:
        repeat_weights(chosen)
    config = config_of(chosen.shape, chosen.context)
    found: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(chosen).items()}}
    found["streamed"] = streamed(config, chosen)
    keep(chosen, found)
    if chosen.resident:
        whole = argparse.Namespace(**(vars(chosen) | {"hbm": "130GiB", "plan": chosen.resident}))
        found["resident"] = streamed(config, whole)
        keep(chosen, found)
    if chosen.plain:
        found["plain"] = plain(config, chosen)
    for arm in ("plain", "resident"):
        if arm in found:
            ours, theirs = (sorted(found[k]["step_seconds"][1:]) for k in ("streamed", arm))
            ratio = ours[len(ours) // 2] / theirs[len(theirs) // 2]
            found["ratio" if arm == "plain" else f"ratio_to_{arm}"] = ratio
            print(f"ratio to {arm}: {ratio:.2f}")
    keep(chosen, found)


def keep(chosen: argparse.Namespace, found: dict[str, Any]) -> None:
    """After each arm: if the next one dies, this one has been measured."""
    if chosen.save:
        name = chosen.name or f"{chosen.shape}_{chosen.batch}x{chosen.context}_{chosen.hbm}"
        print(certificate.save(f"engine_{name}", found), flush=True)


if __name__ == "__main__":
    main()
