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
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import certificate

from penstock.bundled import bundled
from penstock.plan import Plan
from penstock.preparing import Recipe, prepare
from penstock.stream import initial
from penstock.stream.timeline import Event, busy, idle
from penstock.units import format_bytes

_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
           "num_attention_heads", "num_key_value_heads", "tie_word_embeddings")  # fmt: skip
SHAPES: dict[str, tuple[int, ...]] = {
    "tiny": (1000, 128, 512, 4, 8, 4, True),
    "1b": (128256, 2048, 8192, 16, 32, 8, True),
    "3b": (151936, 2048, 11008, 36, 16, 2, True),
    "8b": (128256, 4096, 14336, 32, 32, 8, False),
}
"""Llama bodies: Llama-3.2-1B's sizes, Qwen2.5-3B's (3.086 B parameters), Llama-3.1-8B's."""


class HostPeak:
    """The most that MemAvailable fell, sampled at 50 Hz."""

    def __enter__(self) -> HostPeak:
        self.before = self.least = _available()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def nbytes(self) -> int:
        return self.before - self.least

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.least = min(self.least, _available())


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise AssertionError


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
    return parser.parse_args()


def config_of(shape: str, context: int) -> Any:
    import transformers

    return transformers.LlamaConfig(
        **dict(zip(_FIELDS, SHAPES[shape], strict=True)), max_position_embeddings=max(context, 4096)
    )


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
        recipe = Recipe(
            context=chosen.context, batch=chosen.batch, micro_batch=chosen.micro_batch,
            moments=chosen.moments, init="random", device=chosen.device,
            optimizer={"lr": 1e-5},
        )  # fmt: skip
        budget = {"hbm": chosen.hbm, "dram": chosen.dram, "nvme": chosen.nvme}
        engine = prepare(
            folder,
            recipe=recipe,
            budget=budget,
            machine=bundled(chosen.machine) if chosen.machine else None,
            plan=Plan.load(chosen.plan) if chosen.plan else None,
        )
        start_up = time.perf_counter() - began
        print(f"ready after {start_up:.1f} s; tiers {engine.tiers()}", flush=True)
        seconds, losses = run_steps(engine.step, batches(config, chosen))
        told = tell_timeline(engine.timeline())
        engine.finish()
        if torch.cuda.is_available():
            hbm = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
        else:
            hbm = [0, 0]
        tiers = engine.tiers()
        engine.close()
        del engine
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    print(f"host peak {format_bytes(host.nbytes)}, HBM allocated/reserved "
          f"{format_bytes(hbm[0])} / {format_bytes(hbm[1])}", flush=True)  # fmt: skip
    return {
        "start_up_seconds": start_up, "step_seconds": seconds, "losses": losses, "tiers": tiers,
        "timeline": told, "host_peak_nbytes": host.nbytes,
        "hbm_allocated": hbm[0], "hbm_reserved": hbm[1],
    }  # fmt: skip


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
        key = f"{event.operation.verb} {event.operation.phase}"
        by_verb[key] = round(by_verb.get(key, 0.0) + event.seconds, 4)
    print("busy", lanes, flush=True)
    print("by verb", by_verb, flush=True)
    print("GPU idle", round(sum(end - start for start, end, _ in gaps), 4), waits, flush=True)
    return {"busy": lanes, "by_verb": by_verb, "waits": waits}


def run_steps(step: Any, todo: list[dict[str, torch.Tensor]]) -> tuple[list[float], list[float]]:
    seconds, losses = [], []
    for batch in todo:
        began = time.perf_counter()
        losses.append(float(step(batch)))
        seconds.append(time.perf_counter() - began)
        print(f"  {seconds[-1]:.3f} s  loss {losses[-1]:.4f}", flush=True)
    return seconds, losses


def plain(config: Any, chosen: argparse.Namespace) -> dict[str, Any]:
    """fp32 master in torch's fused AdamW, bf16 compute by autocast-free copies, checkpointing."""
    import transformers

    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.train()
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> float:
        ids = batch["input_ids"].cuda()
        size, total = chosen.micro_batch or chosen.batch, 0.0
        items = ids.shape[0] * (ids.shape[1] - 1)
        for low in range(0, ids.shape[0], size):
            part = ids[low : low + size]
            loss = model(input_ids=part, labels=part, num_items_in_batch=items).loss
            loss.backward()
            total += float(loss.detach())
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
                master.grad = None
        torch.cuda.synchronize()
        return total

    seconds, losses = run_steps(step, batches(config, chosen))
    return {"step_seconds": seconds, "losses": losses}


def repeat_weights() -> None:
    """Instead of drawing each weight anew."""
    drawn = 0.02 * torch.randn(1 << 24)

    def repeated(_: object, block: Any, __: int) -> dict[str, torch.Tensor]:
        def of(tensor: Any) -> torch.Tensor:
            times = -(-tensor.elements // drawn.numel())
            return drawn.repeat(times)[: tensor.elements].view(tensor.shape)

        return {tensor.name: of(tensor) for tensor in block.tensors}

    initial._drawn = repeated


def main() -> None:
    chosen = arguments()
    if chosen.repeat_weights:
        repeat_weights()
    config = config_of(chosen.shape, chosen.context)
    found: dict[str, Any] = {"streamed": streamed(config, chosen)}
    if chosen.resident:
        whole = argparse.Namespace(**(vars(chosen) | {"hbm": "130GiB", "plan": chosen.resident}))
        found["resident"] = streamed(config, whole)
    if chosen.plain:
        found["plain"] = plain(config, chosen)
        ours, theirs = (sorted(found[k]["step_seconds"][1:]) for k in ("streamed", "plain"))
        found["ratio"] = ours[len(ours) // 2] / theirs[len(theirs) // 2]
        print(f"ratio to plain torch in HBM: {found['ratio']:.2f}")
    if chosen.save:
        told = {k: str(v) for k, v in vars(chosen).items()}
        name = f"engine_{chosen.shape}_{chosen.batch}x{chosen.context}_{chosen.hbm}"
        certificate.save(name, {"settings": told, **found})
    print(json.dumps({k: v for k, v in found.items() if k == "ratio"}))


if __name__ == "__main__":
    main()
