"""Prompts over this cache and transformers' own, arms in turns, for bench_kv.py."""

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
"""The longest prompt for StaticCache, whose mask is as wide as it is long."""


def prefill(bench: Any, found: list[dict[str, Any]]) -> None:
    """One prompt, read in chunks by the generator, and at once by the model with its own caches."""
    for context in bench.contexts:
        each = token_nbytes(bench.model.config, bench.dtype)
        measure = partial(_prefill, bench, context)
        row = {"context": context, "found": bench.cell(context, 3, measure, each=each)}
        print("prefill", row, flush=True)
        found.append(row)
        bench.save()


def prompt_of(bench: Any, length: int, seed: int) -> list[int]:
    """Drawn, the same for the same seed."""
    drawn = random.Random(seed)
    return [drawn.randrange(3, bench.model.config.vocab_size) for _ in range(length)]


def _prefill(bench: Any, context: int) -> dict[str, Any]:
    """Tokens a second of each arm. They take turns, so that a slow second of the host is all's."""
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
    """Prompts of one length, never the same: the first round warms up."""
    rounds = min(250, max(3, (1 << 18) // context))
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    told: dict[str, Any] = {}
    for seed in range(rounds):
        if seed > 1 and bench.seconds > bench.chosen.limit:
            break
        prompt = prompt_of(bench, context, seed)
        for name in sorted(seconds, reverse=bool(seed % 2)):
            began = time.perf_counter()
            try:
                arms[name](prompt)
            except (torch.OutOfMemoryError, PenstockError) as full:  # the others go on
                told[name] = f"does not fit: {str(full).splitlines()[0]}"
                del seconds[name]
                continue
            seconds[name].append(time.perf_counter() - began)
    return told | {name: _told(name, seconds, context) for name in seconds}


def _told(name: str, seconds: dict[str, list[float]], context: int) -> dict[str, Any]:
    """Its tokens a second, and how many times those of each other arm in the same round: what slows
    the host down for a while is in both."""
    taken = seconds[name][1:]
    at = {"tokens_per_second": 0.5, "fast_tenth": 0.1, "slow_tenth": 0.9}
    ordered = sorted(taken)
    told: dict[str, Any] = {k: context / ordered[int(p * len(taken))] for k, p in at.items()}
    told["rounds"] = len(taken)
    told["against"] = {
        other: statistics.median(b / a for a, b in zip(taken, theirs[1:], strict=True))
        for other, theirs in seconds.items()
        if other != name
    }
    return told


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
