"""Measure steps whose optimizer sweeps are divided between the CPU and the GPU, in turn.

    python bench/bench_hybrid_sweep.py --plan-only --plans carry/hybrid   # without a GPU
    python bench/bench_hybrid_sweep.py --plans carry/hybrid --save

First the rates that decide the split: the CPU sweep alone, copies in both directions alone, and
both together. Then one engine after another: all sweeps on the CPU, splits for several rates of
both together, and the first plan again, since memory is not equally fast all the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from bench.bench_engine import measure_engine
from bench.gpu_cells import PREDICTED, Cell, cells, plan_cell
from bench.repeated_weights import repeat_weights
from bench.shapes import config_of
from penstock.model.meta_model import weight_dtype
from penstock.planner.plan_view import plan_json
from penstock.units import GiB, MiB

SHARED = (0, 220, 300)
"""Rates of sweep and copies together that plans are made for, in GB/s; 0 for sweeps on the CPU."""

RATES_SIZE = 128 * 10**6
"""Parameters of one pass of the measured sweep."""

RATES_SECONDS = 1.5
"""Seconds of one sample of rates."""


def arm_name(cell: Cell, shared: int) -> str:
    return f"{cell.name}-shared-{shared}" if shared else cell.name


def make_plans(selected: Sequence[Cell], args: argparse.Namespace) -> None:
    """Write a plan for each cell and rate, with its prediction next to it."""
    args.plans.mkdir(parents=True, exist_ok=True)
    for cell in selected:
        for shared in SHARED:
            result = plan_cell(
                cell, args.plans, compiled=not args.tiny, traced=not args.tiny,
                shared=shared * 1e9, gpu_sweeps=shared > 0,
            )  # fmt: skip
            path = args.plans / f"{arm_name(cell, shared)}.json"
            result.plan.save(path)
            predicted = plan_json(result)
            path.with_suffix(PREDICTED).write_text(json.dumps(predicted, indent=1) + "\n")
            print(f"{path.stem}: {predicted['step_seconds']:.3f} s, bound by "
                  f"{predicted['bound_by']}; {predicted['sweep']}", flush=True)  # fmt: skip


def measure_rates() -> dict[str, float]:
    """Return bytes per second of a sweep, of copies both ways, and of both together."""
    from penstock.machine.discovery import discover
    from penstock.machine.sysfs import System
    from penstock.probe import shared
    from penstock.probe.copies import Copy, TorchCopier, cuda_ordinals
    from penstock.probe.sweep import NodeSweepBuffers

    machine, node = discover(), 0
    cpus = System().nearest_cpus(node)
    buffers = NodeSweepBuffers(node, "fp32", 2 * RATES_SIZE, cpus)
    gpu, ordinal = next(iter(cuda_ordinals(machine.gpus).items()))
    copier = TorchCopier(node, {gpu: ordinal}, 2 * GiB)
    copy = Copy(direction="both", gpus=(gpu,), nbytes=64 * MiB, streams=1)
    found: dict[str, list[float]] = {"sweep": [], "copies": [], "together": []}
    for _ in range(4):  # the first round warms up
        seconds = min(buffers.seconds(RATES_SIZE, len(cpus)) for _ in range(6))
        found["sweep"].append(RATES_SIZE * buffers.traffic / seconds)
        found["copies"].append(20 * copy.all_bytes / copier.seconds(copy, 20))
        args = (buffers, RATES_SIZE // 4, len(cpus), copier, copy, RATES_SECONDS)
        found["together"].append(shared._sample(*args))
    return {name: statistics.median(rates[1:]) for name, rates in found.items()}


class Link:
    """Copies that run as a sweep on the GPU would need them: some bytes in, and fewer out."""

    def __init__(self, node: int, nbytes: int) -> None:
        import torch

        from penstock.memory.arena import Arena
        from penstock.memory.placement import Node

        self._arena = Arena(2 * nbytes, Node(node), pinned=True)
        self._host = [self._arena.tensor(nbytes, torch.uint8) for _ in range(2)]
        self._device = [torch.empty_like(host, device="cuda") for host in self._host]
        self._streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._at = [0, 0]

    def copy(self, parameters: int, bytes_in: int, bytes_out: int) -> None:
        """Copy what `parameters` need in each direction, and wait."""
        import torch

        for way, each in enumerate((bytes_in, bytes_out)):
            if not each:
                continue
            at, nbytes = self._at[way], parameters * each
            at = at if at + nbytes <= len(self._host[way]) else 0
            self._at[way] = at + nbytes
            pair = self._device[way][at : at + nbytes], self._host[way][at : at + nbytes]
            target, source = pair if way == 0 else pair[::-1]
            with torch.cuda.stream(self._streams[way]):
                target.copy_(source, non_blocking=True)
        for stream in self._streams:
            stream.synchronize()


def measure_parts() -> dict[str, dict[str, float]]:
    """Return parameters per second of sweeps in two parts, alone and next to copies."""
    import os
    import threading

    from penstock.memory.placement import Node
    from penstock.optim.sweep_benchmark import SweepBuffers
    from penstock.optim.thread_pool import Pool

    cpus = sorted(os.sched_getaffinity(0))
    buffers, link, piece = SweepBuffers(4 * RATES_SIZE, "fp32", Node(0)), Link(0, 2 * GiB), 1 << 23
    found: dict[str, dict[str, float]] = {}

    def run(name: str, part: str | None, threads: int, copied: tuple[int, int] | None) -> None:
        pool, at, swept, moved = Pool(threads, cpus=cpus[:threads]), 0, 0, 0
        stop = threading.Event()

        def copy() -> None:
            nonlocal moved
            while not stop.is_set() and copied:
                link.copy(piece, *copied)
                moved += piece

        thread, began = threading.Thread(target=copy), time.perf_counter()
        thread.start()
        while time.perf_counter() - began < RATES_SECONDS / 2:
            if part is None:
                time.sleep(0.05)
                continue
            buffers.step(pool, at=at, numel=RATES_SIZE // 2, part=part)
            at, swept = (at + RATES_SIZE // 2) % buffers.numel, swept + RATES_SIZE // 2
        stop.set()
        thread.join()
        seconds = time.perf_counter() - began
        found[name] = {"swept": swept / seconds / 1e9, "copied": moved / seconds / 1e9}
        print(
            f"{name}: " + ", ".join(f"{k} {v:.2f} G/s" for k, v in found[name].items()), flush=True
        )

    run("warm up", "all", len(cpus), (14, 12))
    for part in ("all", "weights", "moments"):
        run(f"{part}, alone", part, len(cpus), None)
    for copied in ((14, 0), (14, 4), (14, 12), (2, 0)):
        run(f"copies {copied}, alone", None, len(cpus), copied)
        for part in ("all", "weights"):
            for threads in sorted({len(cpus), 3 * len(cpus) // 4}):
                run(f"{part}, {threads} threads, next to copies {copied}", part, threads, copied)
    return found


def measure_arms(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Run the plans of a cell in turn, each in a new engine."""
    config = config_of(cell.shape, cell.context)
    results: dict[str, Any] = {}
    for number, shared in enumerate((*SHARED, SHARED[0])):
        name = arm_name(cell, shared)
        fields = {n: getattr(cell, n) for n in ("context", "batch", "micro_batch", "moments",
                                                "dtype", "steps", "hbm", "dram")}  # fmt: skip
        given = argparse.Namespace(
            **fields, nvme=[], machine=None, device=None, plan=args.plans / f"{name}.json"
        )
        began = time.perf_counter()
        arm = measure_engine(config, given)
        steps = sorted(arm["step_seconds"][1:])
        results[f"{number}: {name}"] = arm | {"median_seconds": steps[len(steps) // 2]}
        planned = arm["predicted"] or {}
        print(f"== {name}: {steps[len(steps) // 2]:.3f} s per step, predicted "
              f"{planned.get('step_seconds', 0):.3f} s, {planned.get('sweep')}; "
              f"{time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip
    return results


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=["fast-4x4096"], help="names of cells")
    parser.add_argument("--plans", type=Path, default=Path("carry/hybrid"))
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--rates-only", action="store_true")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    parser.add_argument(
        "--tiny", action="store_true", help="rehearse with a tiny model, without a GPU"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    from dataclasses import replace

    selected = [replace(cell, steps=args.steps) for cell in cells() if cell.name in args.cells]
    if args.tiny:
        selected = [cell.tiny() for cell in selected]
    if args.plan_only:
        make_plans(selected, args)
        return
    results: dict[str, Any] = {}
    if not args.tiny:
        results["rates"] = measure_rates()
        print({name: f"{rate / 1e9:.1f} GB/s" for name, rate in results["rates"].items()})
        results["parts"] = measure_parts()
    if args.rates_only:
        selected = []
        if args.save:
            print(certificate.save("hybrid_rates", results), flush=True)
    for cell in selected:
        repeat_weights(weight_dtype(cell.dtype))
        results[cell.name] = measure_arms(cell, args)
        if args.save:
            print(certificate.save(f"hybrid_{cell.name}", results), flush=True)


if __name__ == "__main__":
    main()
