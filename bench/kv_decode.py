"""The decode part of bench_kv: one token more for rows of a given length, arm by arm."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from bench import certificate
from bench.kv_arms import ARMS, paged_batching

WARM, STEPS = 4, 12
ROUNDS = 2
"""How often each arm has its turn in a cell, every other time in the opposite order: the host's
speed changes from one second to the next, and launches are the host's work."""

MOST_READ = 65536
"""Prompt tokens of a cell of transformers' own batching, which must read them itself."""

SLOW_TO_START = ("static compiled",)
"""Compiled anew for each cell: last, and once."""

Cell = tuple[int, int]
"""Context and batch."""


def decode(bench: Any, rows: list[dict[str, Any]]) -> None:
    """Cell after cell, then what is slow to start: when time runs out, it is theirs. `rows` is
    filled as figures come."""
    cells = [(context, batch) for context in bench.contexts for batch in bench.batches]
    rows += [{"context": context, "batch": batch} for context, batch in cells]
    arms = bench.chosen.arms.split(",")
    for mode in bench.modes:
        wanted = [name for name in ARMS[mode] if name in arms]
        for cell, row in zip(cells, rows, strict=True):
            _take_turns(bench, mode, cell, row, [n for n in wanted if n not in SLOW_TO_START])
    for mode in bench.modes:
        for cell, row in zip(cells, rows, strict=True):
            if "paged batching" in arms:
                _note(bench, row, f"paged batching, {mode}", _batched(bench, mode, cell))
            for name in (each for each in ARMS[mode] if each in arms and each in SLOW_TO_START):
                _note(bench, row, f"{name}, {mode}", _compiled(bench, mode, name, cell))


def _take_turns(bench: Any, mode: str, cell: Cell, row: dict[str, Any], names: list[str]) -> None:
    names = [name for name in names if name != "penstock ragged" or cell[1] > 1]
    found: dict[str, Any] = {}
    for turn in range(ROUNDS):
        for name in names if turn % 2 == 0 else reversed(names):
            told = bench.cell(*cell, partial(_steps, bench, mode, name, cell))
            if isinstance(told, dict) and isinstance(found.get(name), dict):
                told["seconds"] = found[name]["seconds"] + told["seconds"]
            if isinstance(told, dict) or name not in found:
                found[name] = told
    for name, told in found.items():
        _note(bench, row, f"{name}, {mode}", told)


def _note(bench: Any, row: dict[str, Any], name: str, found: Any) -> None:
    if isinstance(found, dict) and "seconds" in found:
        spread = certificate.percentiles(found.pop("seconds"))
        middle = {"seconds_per_step": spread["p50"], "spread": spread}
        found = middle | {"tokens_per_second": row["batch"] / spread["p50"]} | found
    row[name] = found
    told = f"{found['seconds_per_step'] * 1e3:.2f} ms" if isinstance(found, dict) else found
    print(f"{row['context']:>7} x {row['batch']:<3} {name}: {told}", flush=True)
    bench.save()


def _compiled(bench: Any, mode: str, name: str, cell: Cell) -> Any:
    if cell not in bench.compiled:
        return "not run: each shape is compiled anew, see --compiled"
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
