"""Measure decoding, for bench_kv: generate tokens for rows of a given length, arm by arm."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from bench import certificate
from bench.kv_arms import ARMS, paged_batching

WARM, STEPS = 4, 12
ROUNDS = 2
"""Number of turns of each arm in a cell. Every second turn runs in reverse order, because the speed
of the host, which launches the kernels, varies from second to second."""

MOST_READ = 65536
"""Maximum number of prompt tokens for transformers' continuous batching, which must read them."""

SLOW_TO_START = ("static compiled",)
"""Arms that must compile for each cell. They run last, and once."""

Cell = tuple[int, int]
"""Context and batch of a cell."""


def decode(bench: Any, rows: list[dict[str, Any]]) -> None:
    """Measure every cell and fill `rows`.

    Arms that are slow to start come last, so that they are the ones dropped if time runs out.
    """
    cells = [(context, batch) for context in bench.contexts for batch in bench.batches]
    rows += [{"context": context, "batch": batch} for context, batch in cells]
    arms = bench.args.arms.split(",")
    for mode in bench.modes:
        selected = [name for name in ARMS[mode] if name in arms]
        for cell, row in zip(cells, rows, strict=True):
            _take_turns(bench, mode, cell, row, [n for n in selected if n not in SLOW_TO_START])
    for mode in bench.modes:
        for cell, row in zip(cells, rows, strict=True):
            if "paged batching" in arms:
                _record(bench, row, f"paged batching, {mode}", _batched(bench, mode, cell))
            for name in (each for each in ARMS[mode] if each in arms and each in SLOW_TO_START):
                _record(bench, row, f"{name}, {mode}", _compiled(bench, mode, name, cell))


def _take_turns(bench: Any, mode: str, cell: Cell, row: dict[str, Any], names: list[str]) -> None:
    names = [name for name in names if name != "penstock ragged" or cell[1] > 1]
    figures: dict[str, Any] = {}
    for turn in range(ROUNDS):
        for name in names if turn % 2 == 0 else reversed(names):
            result = bench.cell(*cell, partial(_steps, bench, mode, name, cell))
            if isinstance(result, dict) and isinstance(figures.get(name), dict):
                result["seconds"] = figures[name]["seconds"] + result["seconds"]
            if isinstance(result, dict) or name not in figures:
                figures[name] = result
    for name, result in figures.items():
        _record(bench, row, f"{name}, {mode}", result)


def _record(bench: Any, row: dict[str, Any], name: str, figures: Any) -> None:
    if isinstance(figures, dict) and "seconds" in figures:
        spread = certificate.percentiles(figures.pop("seconds"))
        middle = {"seconds_per_step": spread["p50"], "spread": spread}
        figures = middle | {"tokens_per_second": row["batch"] / spread["p50"]} | figures
    row[name] = figures
    text = f"{figures['seconds_per_step'] * 1e3:.2f} ms" if isinstance(figures, dict) else figures
    print(f"{row['context']:>7} x {row['batch']:<3} {name}: {text}", flush=True)
    bench.save()


def _compiled(bench: Any, mode: str, name: str, cell: Cell) -> Any:
    if cell not in bench.compiled:
        return "not run: each shape must be compiled, see --compiled"
    return bench.cell(*cell, partial(_steps, bench, mode, name, cell))


def _batched(bench: Any, mode: str, cell: Cell) -> Any:
    context, batch = cell
    if context * batch > MOST_READ:
        return "not run: reading the prompts would take too long"
    run = partial(
        paged_batching, bench.model, context, batch, 2 * STEPS, graphs=mode == "graph"
    )  # fmt: skip
    return bench.cell(context, batch, run)


def _steps(bench: Any, mode: str, name: str, cell: Cell) -> dict[str, Any]:
    context, batch = cell
    arm = ARMS[mode][name](bench.model, context, batch)
    try:
        for _ in range(WARM):
            arm.step()
        seconds = []
        for _ in range(STEPS):
            began = time.perf_counter()
            arm.step()
            seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() if bench.device == "cuda" else 0
        return {"seconds": seconds, "cache_nbytes": arm.nbytes(), "torch_peak_nbytes": peak}
    finally:
        arm.close()
