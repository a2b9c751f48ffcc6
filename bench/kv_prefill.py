"""Measure reading prompts with Penstock's cache and those of transformers, for bench_kv."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.kv_arms import AHEAD, token_nbytes
from penstock.errors import PenstockError
from penstock.generate import Generator, Request

MASKED = 32768
"""The longest prompt for StaticCache, whose attention mask grows with its square."""


def prefill(bench: Any, rows: list[dict[str, Any]]) -> None:
    """Read one prompt in chunks with the generator, and in one pass with the model's own caches."""
    for context in bench.contexts:
        each = token_nbytes(bench.model.config, bench.dtype)
        measure = partial(_prefill, bench, context)
        row = {"context": context, "found": bench.cell(context, 3, measure, each=each)}
        print("prefill", row, flush=True)
        rows.append(row)
        bench.save()


def prompt_of(bench: Any, length: int, seed: int) -> list[int]:
    """Return random tokens that depend only on the seed."""
    drawn = random.Random(seed)
    return [drawn.randrange(3, bench.model.config.vocab_size) for _ in range(length)]


def _prefill(bench: Any, context: int) -> dict[str, Any]:
    """Return the tokens per second of each arm. They take turns, so that host noise affects all."""
    nbytes = (context + 2 * AHEAD) * token_nbytes(bench.model.config, bench.dtype) + (16 << 20)
    arms: dict[str, Callable[[list[int]], Any]] = {"dynamic": partial(_read_plain, bench, _dynamic)}
    if context <= MASKED:
        arms["static"] = partial(_read_plain, bench, _static(bench, context))
    with contextlib.ExitStack() as stack:
        for chunk in (None, 2048) if 2048 < context <= 32768 else (None,):
            generator = Generator(
                bench.model, budget=nbytes, max_batch=1, max_context=context + AHEAD,
                prefill_chunk=chunk,
            )  # fmt: skip
            name = f"penstock, chunks of {chunk}" if chunk else "penstock"
            arms[name] = partial(_read, stack.enter_context(generator))
        return _per_second(arms, bench, context)


def _per_second(
    arms: dict[str, Callable[[list[int]], Any]], bench: Any, context: int
) -> dict[str, Any]:
    """Time different prompts of one length. The first round is a warm-up."""
    rounds = min(250, max(3, (1 << 18) // context))
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    failures: dict[str, Any] = {}
    for seed in range(rounds):
        if seed > 1 and bench.seconds > bench.args.limit:
            break
        prompt = prompt_of(bench, context, seed)
        for name in sorted(seconds, reverse=bool(seed % 2)):
            began = time.perf_counter()
            try:
                arms[name](prompt)
            except (torch.OutOfMemoryError, PenstockError) as full:  # the other arms continue
                failures[name] = f"does not fit: {str(full).splitlines()[0]}"
                del seconds[name]
                continue
            seconds[name].append(time.perf_counter() - began)
    return failures | {name: _summary(name, seconds, context) for name in seconds}


def _summary(name: str, seconds: dict[str, list[float]], context: int) -> dict[str, Any]:
    """Return an arm's tokens per second, and its speed relative to each other arm.

    Ratios are taken within a round, so that host noise affects both sides.
    """
    samples = seconds[name][1:]
    at = {"tokens_per_second": 0.5, "fast_tenth": 0.1, "slow_tenth": 0.9}
    ordered = sorted(samples)
    summary: dict[str, Any] = {k: context / ordered[int(p * len(samples))] for k, p in at.items()}
    summary["rounds"] = len(samples)
    summary["against"] = {
        other: statistics.median(b / a for a, b in zip(samples, other_samples[1:], strict=True))
        for other, other_samples in seconds.items()
        if other != name
    }
    return summary


def _read(generator: Generator, prompt: list[int]) -> None:
    list(generator.run([Request(prompt=prompt, max_new=1)]))


def _dynamic(bench: Any) -> Any:
    import transformers

    return transformers.DynamicCache(config=bench.model.config)


def _static(bench: Any, context: int) -> Callable[[Any], Any]:
    import transformers

    config = bench.model.config
    cache: Any = transformers.StaticCache(config=config, max_cache_len=context + AHEAD)

    def emptied(_: Any) -> Any:
        cache.reset()
        return cache

    return emptied


def _read_plain(bench: Any, make: Callable[[Any], Any], prompt: list[int]) -> None:
    ids = torch.tensor([prompt], device=bench.device)
    with torch.inference_mode():
        out = bench.model(
            input_ids=ids, past_key_values=make(bench), use_cache=True, logits_to_keep=1
        )
    out.logits.argmax(dim=-1).tolist()
