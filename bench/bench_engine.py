"""Measure whole training steps with the engine, relative to plain torch in HBM.

    python bench/bench_engine.py --shape 3b --context 4096 --batch 4 --hbm 24GiB --dram 60GiB

Weights are random, because speed does not depend on them. Prints one line per step. With --save,
writes bench/results/engine_<name>_<hardware>_<date>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from bench.gpu_cells import PREDICTED
from bench.measuring import Batch, HostPeak, device_peak, forget_device_peak, run_steps
from bench.plain import plain_step
from bench.repeated_weights import repeat_weights
from bench.shapes import ALL_SHAPES, config_of
from penstock.engine.prepare import prepare
from penstock.engine.startup import IMPORT, StartUp
from penstock.engine.step_records import Event, busy, idle
from penstock.machine.presets import preset
from penstock.model.inventory import Inventory
from penstock.model.meta_model import weight_dtype
from penstock.plan.budget import with_paths
from penstock.plan.plan import Plan
from penstock.planner.cost import Rates, estimate
from penstock.planner.cost.rates import DiskRates
from penstock.storage.benchmark import StorageBench
from penstock.storage.store import Store
from penstock.tiers import Tier
from penstock.train.progress import format_start_up
from penstock.units import GiB, format_bytes

DISK_NBYTES = 2 * GiB
"""Size of the store with which the disk alone is measured."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=ALL_SHAPES, default="3b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--hbm", default="24GiB")
    parser.add_argument("--dram", default="auto")
    parser.add_argument("--nvme", action="append", default=[])
    parser.add_argument("--moments", default="fp32")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--device")
    parser.add_argument("--plan", type=Path)
    parser.add_argument(
        "--resident", type=Path, help="also measure this plan, with everything in HBM"
    )
    parser.add_argument(
        "--plain", action="store_true", help="also measure plain torch, with everything in HBM"
    )
    parser.add_argument("--compile", action="store_true", help="compile the layers of plain torch")
    parser.add_argument(
        "--repeat-weights",
        action="store_true",
        help="draw 4 M weights and repeat them, which is faster",
    )
    parser.add_argument(
        "--trace", type=Path, help="write a trace of one more step here, for launch_gaps.py"
    )
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--name", help="name of the results file, after engine_")
    return parser.parse_args()


def batches(config: Any, args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    shape = (args.batch, args.context)
    return [
        {"input_ids": torch.randint(0, config.vocab_size, shape, generator=drawn)}
        for _ in range(args.steps)
    ]


def measure_engine(
    config: Any, args: argparse.Namespace, record: StartUp | None = None
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, HostPeak() as host:
        config.save_pretrained(folder)
        record = StartUp() if record is None else record
        began = time.perf_counter()
        plan = Plan.load(args.plan) if args.plan else None
        budget = None if plan else {"hbm": args.hbm, "dram": args.dram, "nvme": args.nvme}
        engine = prepare(
            folder,
            context=args.context,
            batch=args.batch,
            micro_batch=args.micro_batch,
            moments=args.moments,
            dtype=args.dtype,
            init="random",
            device=args.device,
            optimizer={"lr": 1e-5},
            budget=budget,
            machine=preset(args.machine) if args.machine else None,
            plan=plan,
            start_up=record,
        )
        start_up = time.perf_counter() - began
        print(
            f"ready after {start_up:.1f} s: {record.by_name()}; tiers {engine.tiers()}", flush=True
        )
        seconds, losses = run_steps(engine.step, batches(config, args))
        print(format_start_up({"seconds": record.seconds, "phases": record.by_name()}), flush=True)
        timeline = summarize_timeline(engine.timeline())
        if args.trace:
            trace_step(engine.step, batches(config, args)[0], args.trace)
        engine.finish()
        hbm, tiers, process = device_peak(), engine.tiers(), engine.host_memory()
        in_memory = engine.resident_nbytes()
        plan, inventory = engine.plan, engine.inventory
        engine.close()
        del engine
    forget_device_peak()
    on_disk = len(plan.budget.nvme) == 1 and plan.at_rest(Tier.NVME) > 0
    disk = measure_disk(plan, inventory, args) if on_disk else None
    print(f"host peak {format_bytes(host.nbytes)}, HBM allocated / reserved "
          f"{format_bytes(hbm[0])} / {format_bytes(hbm[1])}", flush=True)  # fmt: skip
    return {
        "start_up_seconds": start_up, "start_up": record.by_name(),
        "step_seconds": seconds, "losses": losses, "tiers": tiers,
        "timeline": timeline, "host_peak_nbytes": host.nbytes,
        "host": process, "arenas_in_memory": in_memory,
        "hbm_allocated": hbm[0], "hbm_reserved": hbm[1], "predicted": predicted(args.plan),
        "disk": disk,
    }  # fmt: skip


def trace_step(step: Callable[[Batch], object], batch: Batch, path: Path) -> None:
    """Write a trace of what the GPU does in one step, and of the calls that launch it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def measure_disk(plan: Plan, inventory: Inventory, args: argparse.Namespace) -> dict[str, float]:
    """Measure the disk, and predict the step with its rates instead of those of the machine file.

    Disks of lent machines differ from day to day, so a step is compared with the disk of its own
    run. `mixed` counts the bytes of both directions.
    """
    path = plan.budget.nvme[0].path
    nbytes = min(DISK_NBYTES, plan.budget.nvme[0].nbytes)
    with Store.create(path, nbytes) as store:
        bench = StorageBench(store, nbytes)
        bench.run("write")  # also allocates the file system's metadata
        rates = {pattern: bench.run(pattern) for pattern in ("write", "read")}
        rates["mixed"] = statistics.mean(bench.run("mixed") for _ in range(2))
    result = {pattern: round(rate) for pattern, rate in rates.items()}
    if args.machine:
        machine, _ = with_paths(preset(args.machine), plan.budget)
        work = plan.workload
        known = Rates.of(machine, work.moments, dtype=work.dtype, compiled=work.numerics.compiled)
        measured = DiskRates(read=rates["read"], write=rates["write"], both=rates["mixed"])
        known = replace(known, disks={path: measured})
        cost = estimate(inventory, work, plan.placement, known)
        result["predicted_step_seconds"] = cost.step_seconds
    print("disk alone, bytes per second", result, flush=True)
    return result


def predicted(plan: Path | None) -> Any:
    """Return the prediction that was saved with the plan, if there is one."""
    path = plan.with_suffix(PREDICTED) if plan else None
    return json.loads(path.read_text()) if path and path.exists() else None


def summarize_timeline(events: list[Event]) -> dict[str, Any]:
    """Print and return the busy seconds of each lane and the longest waits of the GPU."""
    lanes = {lane: round(seconds, 4) for lane, seconds in busy(events).items()}
    gaps = sorted(idle(events, "compute"), key=lambda gap: gap[0] - gap[1])
    waits = [
        f"{start:.3f} to {end:.3f} s before {op.verb} {op.block} of {op.phase}"
        for start, end, op in gaps[:8]
    ]
    by_verb: dict[str, float] = {}
    for event in events:
        device = "GPU " if event.operation.gpu else ""
        key = f"{device}{event.operation.verb} {event.operation.phase}"
        by_verb[key] = round(by_verb.get(key, 0.0) + event.seconds, 4)
    print("busy", lanes, flush=True)
    print("by verb", by_verb, flush=True)
    print("GPU idle", round(sum(end - start for start, end, _ in gaps), 4), waits, flush=True)
    disk = summarize_disk(events)
    print("disk", disk, flush=True)
    return {"busy": lanes, "by_verb": by_verb, "waits": waits, "disk": disk}


def summarize_disk(events: list[Event]) -> dict[str, float]:
    """Return how long the disk had something to read or write, and how many bytes it moved.

    The lanes `read` and `write` overlap, so neither of them says how long the disk was idle.
    """
    by_way: dict[str, list[tuple[float, float]]] = {"read": [], "written": []}
    moved = {"read": 0, "written": 0}
    for event in events:
        for transfer in event.transfers:
            if "disk" in (transfer.source, transfer.target):
                way = "read" if transfer.source == "disk" else "written"
                by_way[way].append((event.start, event.end))
                moved[way] += transfer.nbytes
    reads, writes, either = (
        covered_seconds(spans)
        for spans in (by_way["read"], by_way["written"], by_way["read"] + by_way["written"])
    )
    total = moved["read"] + moved["written"]
    return {
        "read_nbytes": moved["read"], "written_nbytes": moved["written"],
        "busy_seconds": round(either, 4), "both_ways_seconds": round(reads + writes - either, 4),
        "bytes_per_busy_second": round(total / either) if either else 0,
    }  # fmt: skip


def covered_seconds(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def measure_plain(config: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the baseline: plain torch with everything in the device's memory."""
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    forget_device_peak()
    family: Any = transformers.AutoModelForCausalLM
    with HostPeak() as host:
        with torch.device(device):
            model = family.from_config(config, dtype=weight_dtype(args.dtype))
        model.gradient_checkpointing_enable()
        model.train()
        if args.compile:
            for layer in model.get_decoder().layers:
                layer.compile()
        size = args.micro_batch or args.batch
        step = plain_step(model, adamw={"lr": 1e-5}, clip=1.0, micro_batch=size)
        seconds, losses = run_steps(step, batches(config, args))
    allocated, reserved = device_peak()
    return {
        "step_seconds": seconds, "losses": losses, "host_peak_nbytes": host.nbytes,
        "hbm_allocated": allocated, "hbm_reserved": reserved,
    }  # fmt: skip


def main() -> None:
    record = StartUp.of_process()
    args = arguments()
    with record.phase(IMPORT):  # the config imports transformers
        if args.repeat_weights:
            repeat_weights(weight_dtype(args.dtype))
        config = config_of(args.shape, args.context)
    results: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(args).items()}}
    results["streamed"] = measure_engine(config, args, record)
    save_so_far(args, results)
    if args.resident:
        whole = argparse.Namespace(**(vars(args) | {"hbm": "130GiB", "plan": args.resident}))
        results["resident"] = measure_engine(config, whole)
        save_so_far(args, results)
    if args.plain:
        results["plain"] = measure_plain(config, args)
    for arm in ("plain", "resident"):
        if arm in results:
            engine, baseline = (sorted(results[k]["step_seconds"][1:]) for k in ("streamed", arm))
            ratio = engine[len(engine) // 2] / baseline[len(baseline) // 2]
            results["ratio" if arm == "plain" else f"ratio_to_{arm}"] = ratio
            print(f"ratio to {arm}: {ratio:.2f}")
    save_so_far(args, results)


def save_so_far(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Save the results so far, so that they survive if the next measurement fails."""
    if args.save:
        name = args.name or f"{args.shape}_{args.batch}x{args.context}_{args.hbm}"
        print(certificate.save(f"engine_{name}", results), flush=True)


if __name__ == "__main__":
    main()
