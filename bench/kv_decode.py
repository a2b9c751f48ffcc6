"""The decode part of bench_kv: one token more for rows of a given length, arm by arm."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from bench import certificate
from bench.kv_arms import ARMS, paged_batching

WARM, STEPS = 4, 16
MOST_READ = 65536
"""Prompt tokens of a cell of transformers' own batching, which must read them itself."""

Cell = tuple[int, int]
"""Context and batch."""


def decode(bench: Any) -> list[dict[str, Any]]:
    """Arm after arm over all cells, the slowest to start last: when time runs out, it is theirs."""
    cells = [(context, batch) for context in bench.contexts for batch in bench.batches]
    rows: dict[Cell, dict[str, Any]] = {
        cell: {"context": cell[0], "batch": cell[1]} for cell in cells
    }
    arms = bench.chosen.arms.split(",")
    for mode in bench.modes:
        for name in [each for each in ARMS[mode] if each in arms]:
            for cell in cells:
                _note(rows[cell], f"{name}, {mode}", _measured(bench, mode, name, cell))
    for mode in bench.modes:
        for cell in cells if "paged batching" in arms else []:
            _note(rows[cell], f"paged batching, {mode}", _batched(bench, mode, cell))
    return list(rows.values())


def _note(row: dict[str, Any], name: str, found: Any) -> None:
    if found is None:
        return
    row[name] = found
    told = f"{found['seconds_per_step'] * 1e3:.2f} ms" if isinstance(found, dict) else found
    print(f"{row['context']:>7} x {row['batch']:<3} {name}: {told}", flush=True)


def _measured(bench: Any, mode: str, name: str, cell: Cell) -> Any:
    context, batch = cell
    if name == "penstock ragged" and batch == 1:
        return None
    if name == "static compiled" and cell not in bench.compiled:
        return "not run: each shape is compiled anew, see --compiled"
    return bench.cell(context, batch, partial(_steps, bench, mode, name, cell))


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
        spread = certificate.percentiles(seconds)
        peak = torch.cuda.max_memory_allocated() if bench.device == "cuda" else 0
        return {
            "seconds_per_step": spread["p50"],
            "spread": spread,
            "tokens_per_second": batch / spread["p50"],
            "cache_nbytes": arm.nbytes(),
            "torch_peak_nbytes": peak,
        }
    finally:
        arm.close()
