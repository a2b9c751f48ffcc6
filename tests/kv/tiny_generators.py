"""Tiny models, and the tokens that transformers generates with them one prompt at a time."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from penstock.generate.generator import Generator
from penstock.generate.requests import Request, TokenChunk
from penstock.kv.cache import VirtualCache
from tests.support.engines import plain_model, tiny_config

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")

WINDOW = 12
"""Shorter than prompts and answers, so that the window hides tokens."""

VOCABULARY = 260

PAGE = 4096
"""Page size in bytes: a little more than ten tokens of these models."""


@functools.cache
def tiny_model(family: str) -> Any:
    """Make a model in fp32, so that the gap between the two likeliest tokens exceeds rounding.

    Its weights are scaled up, so that it does not always generate the same token.
    """
    changes: dict[str, Any] = {"eos_token_id": None}
    if family in ("mistral", "gemma2", "gemma3"):
        changes["sliding_window"] = WINDOW
    model = plain_model(tiny_config(family, **changes), dtype=torch.float32, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
    return model.eval()


def random_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


_known: dict[Any, dict[tuple[int, ...], list[int]]] = {}


def reference_tokens(model: Any, prompt: Sequence[int], new: int) -> list[int]:
    """Return what transformers generates for the prompt by itself.

    A shorter answer is the beginning of a longer one, so each prompt is generated once.
    """
    known = _known.setdefault(model, {})  # the key keeps the model alive; an id could be reused
    if len(known.get(tuple(prompt), ())) < new:
        known[tuple(prompt)] = _generated(model, prompt, new)
    return known[tuple(prompt)][:new]


def _generated(model: Any, prompt: Sequence[int], new: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    sequences = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=transformers.DynamicCache(config=model.config),
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = sequences[0, len(prompt) :].tolist()
    return tokens


def tokens_by_request(chunks: Sequence[TokenChunk]) -> dict[str | int, list[int]]:
    """Collect the tokens of each request."""
    tokens: dict[str | int, list[int]] = {}
    for chunk in chunks:
        tokens.setdefault(chunk.request, []).extend(chunk.tokens)
    return tokens


def small_generator(
    model: Any, *, tokens: int, max_batch: int, graphs: bool | None = None
) -> Generator:
    """Make a generator whose cache has small pages and holds about `tokens` tokens in all."""
    text = model.config.get_text_config()
    each = text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim * 4
    cache = VirtualCache(
        model.config, max_batch=max_batch, max_context=128, budget=tokens * each, device="cpu",
        dtype=torch.float32, page_nbytes=PAGE,
    )  # fmt: skip
    return Generator(model, max_batch=max_batch, prefill_chunk=16, cache=cache, graphs=graphs)


def run(generator: Generator, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """Run prompts concurrently, and return the answers in the order of the prompts."""
    requests = [Request(prompt=prompt, max_new=new) for prompt in prompts]
    first = generator._number
    tokens = tokens_by_request(list(generator.run(requests)))
    return [tokens[first + at] for at in range(len(prompts))]
