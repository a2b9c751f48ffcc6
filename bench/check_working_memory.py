"""Compare traced working memory with what the same parts of a step allocate on the GPU.

    python bench/check_working_memory.py --cases 60 --seconds 500 --workers 6 --out memory.jsonl
    python bench/check_working_memory.py --seed 1794832000 --only 17    # repeat one case
    python bench/check_working_memory.py --summarize memory.jsonl

Every case is a random model and workload (`fit_cases.py`). Each part of its step, the embedding,
each kind of layer and the head, is traced without the GPU and then run on it, plain and packed. One
line per part shows both peaks and their ratio, and the summary how far off the traces are. A ratio
above 1 means that the GPU needed more than traced. The seed is the time of the run unless `--seed`
names one.
"""

# ruff: noqa: E402

from __future__ import annotations

import os

# Before torch is imported: many processes share the cores.
for _name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ.setdefault(_name, "1")

import argparse
import gc
import json
import multiprocessing
import queue
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench.fit_cases import TINY, Case, draw_case, make_config
from penstock.engine.device import Device, pick_device
from penstock.engine.step_parts import StepPart, step_parts
from penstock.engine.trace_memory import trace_parts
from penstock.errors import PenstockError
from penstock.model.inventory import Inventory
from penstock.model.meta_model import build_model, check_trainable
from penstock.model.split import SplitModel
from penstock.model.storage_counter import StorageCounter
from penstock.model.survey import survey_config
from penstock.plan.working_memory_estimate import estimate_working_memory
from penstock.plan.workload import Workload, default_numerics
from penstock.units import MiB

Record = dict[str, Any]
Key = tuple[str, str, bool]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=60, help="number of random models")
    parser.add_argument("--seconds", type=float, default=500, help="start no case after this")
    parser.add_argument("--workers", type=int, default=6, help="number of processes")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", type=int, default=None, help="run this case alone")
    parser.add_argument("--compiled", type=float, default=0.85, help="share of compiled cases")
    parser.add_argument("--device", default=None, help="cpu runs without a GPU, uncompiled")
    parser.add_argument("--tiny", action="store_true", help="models of a few parameters")
    parser.add_argument("--out", type=Path, default=None, help="append one JSON line per case")
    parser.add_argument("--summarize", type=Path, nargs="+", default=None)
    return parser.parse_args()


# One case.


def run_case(case: Case, device_name: str | None) -> Record:
    """Trace and measure every part of a case. Never raises: the record has the error."""
    began = time.perf_counter()
    record: Record = {"case": case.record()}
    try:
        record |= _compare(case, device_name)
    except PenstockError as problem:
        record["skipped"] = str(problem)[:300]
    except Exception:
        record["error"] = traceback.format_exc()[-2500:]
    record["seconds"] = round(time.perf_counter() - began, 1)
    return record


def _compare(case: Case, device_name: str | None) -> Record:
    device, config = pick_device(device_name), make_config(case)
    on_gpu = device.torch_device.type == "cuda"
    inventory = survey_config(config, name=case.family, freeze=case.freeze)
    check_trainable(inventory)
    workload = _workload(case, inventory, kernels=case.compiled and on_gpu)
    began = time.perf_counter()
    bare = build_model(config, torch.bfloat16, torch.device("cpu"))
    traced = {
        _key(each.part): each.peak for each in trace_parts(bare, inventory, workload, on_gpu=on_gpu)
    }
    tracing = time.perf_counter() - began
    bare = build_model(config, torch.bfloat16, device.torch_device)
    numerics = workload.numerics
    model = SplitModel(bare, inventory, mlp_tile=numerics.mlp_tile, compiled=numerics.compiled)
    parts = []
    for part in step_parts(model, inventory, workload, device):
        measured = measure(part, device)
        name, phase, packed = _key(part)
        parts.append({"name": name, "phase": phase, "packed": packed,
                      "traced": traced[_key(part)], "measured": measured})  # fmt: skip
    return {
        "parts": parts,
        "estimated": estimate_working_memory(inventory, workload).peak,
        "trace_seconds": round(tracing, 2),
        "compiled": numerics.compiled,
        "attention": numerics.attention,
        "loss_kernel": numerics.loss_kernel,
    }


def _workload(case: Case, inventory: Inventory, *, kernels: bool) -> Workload:
    size = {"context": case.context, "batch": case.batch}
    numerics = default_numerics(inventory, **size, micro_batch=case.micro_batch, kernels=kernels)
    if not kernels:
        numerics = replace(numerics, compiled=False)
    workload = Workload(**size, numerics=numerics)
    workload.check(inventory)
    return workload


def _key(part: StepPart) -> Key:
    return part.name, part.phase, part.packed


def measure(part: StepPart, device: Device) -> int:
    """Return the peak bytes that a part allocates in addition to earlier allocations."""
    part.prepare()
    try:
        if device.torch_device.type != "cuda":
            with StorageCounter() as counter:
                part.run()
            return counter.peak
        part.run()  # compiles, and lets libraries allocate what they keep
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        part.run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    finally:
        part.release()
        gc.collect()
        if device.torch_device.type == "cuda":
            torch.cuda.empty_cache()


# Many cases.


def work(tasks: Any, results: Any, args: argparse.Namespace, deadline: float) -> None:
    """Run cases until there are none left or the time is up."""
    while time.time() < deadline:
        try:
            number = tasks.get_nowait()
        except queue.Empty:
            return
        limits = {"limits": TINY} if args.tiny else {}
        case = draw_case(args.seed, number, compiled=args.compiled, **limits)
        results.put(run_case(case, args.device))
        torch._dynamo.reset()


def run_all(args: argparse.Namespace) -> list[Record]:
    numbers = range(args.cases) if args.only is None else [args.only]
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    for number in numbers:
        tasks.put(number)
    deadline = time.time() + args.seconds
    count = min(args.workers, len(numbers))
    processes = [
        context.Process(target=work, args=(tasks, results, args, deadline)) for _ in range(count)
    ]
    for process in processes:
        process.start()
    records: list[Record] = []
    while any(process.is_alive() for process in processes) or not results.empty():
        try:
            record = results.get(timeout=0.5)
        except queue.Empty:
            continue
        records.append(record)
        print(describe(record), flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    for process in processes:
        process.join()
    return records


# Text.


def describe(record: Record) -> str:
    case = record["case"]
    kind = "compiled" if record.get("compiled") else "eager"
    title = (
        f"case {case['number']}: {case['family']} hidden {case['config']['hidden_size']} "
        f"vocabulary {case['config']['vocab_size']} context {case['context']} "
        f"batch {case['batch']} micro-batch {case['micro_batch']} {kind} ({record['seconds']} s)"
    )
    for reason in ("skipped", "error"):
        if reason in record:
            return f"{title}\n    {reason}: {record[reason]}"
    lines = [
        f"    {part['name']:28s} {part['phase']:8s} {'packed' if part['packed'] else 'plain ':6s} "
        f"traced {part['traced'] / MiB:9.1f} measured {part['measured'] / MiB:9.1f} MiB "
        f"ratio {ratio(part):6.3f}"
        for part in record["parts"]
    ]
    return "\n".join([title, *lines])


def ratio(part: Record) -> float:
    return float(part["measured"] / max(part["traced"], 1))


def summarize(records: Iterable[Record]) -> str:
    """Describe the ratios of measured to traced bytes: by part, and for whole models."""
    every = list(records)
    done = [record for record in every if "parts" in record]
    ratios: dict[str, list[float]] = defaultdict(list)
    for record in done:
        kind = "compiled" if record["compiled"] else "eager"
        names = list(dict.fromkeys(part["name"] for part in record["parts"]))
        for part in record["parts"]:
            at = names.index(part["name"])
            block = "embedding" if at == 0 else "head" if at == len(names) - 1 else f"layer {kind}"
            ratios[f"{block} {part['phase']}"].append(ratio(part))
        peak = {"name": "", **{k: max(p[k] for p in record["parts"])
                               for k in ("traced", "measured")}}  # fmt: skip
        ratios["whole model"].append(ratio(peak))
        ratios["whole model / estimate"].append(peak["measured"] / record["estimated"])
    lines = [f"{len(done)} cases compared, {sum('skipped' in r for r in every)} skipped, "
             f"{sum('error' in r for r in every)} failed"]  # fmt: skip
    lines += [f"{name:28s} {_spread(found)}" for name, found in sorted(ratios.items())]
    seconds = [record["trace_seconds"] for record in done]
    if seconds:
        lines.append(f"seconds per trace: median {statistics.median(seconds)}, most {max(seconds)}")
    worst = sorted(
        ((ratio(part), record["case"]["number"], record["case"]["family"], part)
         for record in done for part in record["parts"]),
        key=lambda found: -found[0],
    )[:8]  # fmt: skip
    lines.append("measured most above traced:")
    lines += [
        f"    {value:.3f} case {number} {family} {part['name']} {part['phase']} "
        f"{'packed' if part['packed'] else 'plain'} {part['measured'] / MiB:.1f} MiB"
        for value, number, family, part in worst
    ]
    return "\n".join(lines)


def _spread(found: Sequence[float]) -> str:
    ordered = sorted(found)
    return (
        f"{len(ordered):4d} ratios: least {ordered[0]:.3f} median {statistics.median(ordered):.3f} "
        f"most {ordered[-1]:.3f}; above 1.00: {sum(r > 1.0 for r in ordered)}, "
        f"above 1.05: {sum(r > 1.05 for r in ordered)}"
    )


def main() -> None:
    args = arguments()
    if args.summarize:
        lines = [line for path in args.summarize for line in path.read_text().splitlines()]
        print(summarize(json.loads(line) for line in lines))
        return
    if args.seed is None:
        args.seed = int(time.time())
    print(f"seed {args.seed}", flush=True)
    print(summarize(run_all(args)))


if __name__ == "__main__":
    main()
