"""KV caches to compare: each holds `batch` rows of `context` tokens and generates tokens for them.

The keys and values of the context are not computed: decoding takes the same time with any values.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import transformers

from penstock.generate.forward import ForwardPass, ResidentForward
from penstock.kv import VirtualCache
from penstock.units import MiB

AHEAD = 64
"""Number of tokens that a cell may generate."""

PAGE = 256
"""Tokens per page of transformers' continuous batching."""


class Arm(Protocol):
    """One cache and its settings."""

    def step(self) -> None:
        """Generate one token for each row and copy it to the host."""

    def nbytes(self) -> int:
        """Return the bytes that the cache uses."""

    def close(self) -> None: ...


def token_nbytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * head * dtype.itemsize)


class Virtual:
    """Penstock's cache. Each row is `spread` tokens shorter than the one before it."""

    def __init__(
        self,
        model: Any,
        context: int,
        batch: int,
        *,
        spread: int = 0,
        graphs: bool = False,
        compiled: bool = False,
        ahead: int = AHEAD,
    ) -> None:
        self.forward = ResidentForward(model, graphs, compiled=compiled)
        lengths = [max(1, context - row * spread) for row in range(batch)]
        each = token_nbytes(model.config, self.forward.dtype)
        pages = sum(-(-(length + ahead) * each // (2 * MiB)) + 2 for length in lengths)
        self.cache = VirtualCache(
            model.config, max_batch=batch, max_context=context + ahead, budget=pages * 2 * MiB,
            device=self.forward.device, dtype=self.forward.dtype,
        )  # fmt: skip
        self.rows = [self.cache.admit() for _ in lengths]
        pairs = list(zip(self.rows, lengths, strict=True))
        self.cache.prepare(pairs)
        self.cache.advance(pairs)
        self.last = [5] * batch

    def step(self) -> None:
        growth = [(row, 1) for row in self.rows]
        self.cache.prepare(growth)
        lengths = [row.length for row in self.rows]
        each = ForwardPass(self.rows, [[token] for token in self.last], lengths)
        scores = self.forward.forward(self.cache, [each])[0]
        self.cache.advance(growth)
        self.last = scores.argmax(dim=-1).tolist()

    def nbytes(self) -> int:
        return self.cache.stats.mapped_bytes

    def close(self) -> None:
        self.forward.close()
        self.cache.close()


class _Plain:
    """A cache of transformers, used as `generate` uses it."""

    def __init__(
        self,
        model: Any,
        cache: Any,
        context: int,
        batch: int,
        call: Callable[..., Any] | None = None,
    ) -> None:
        self.call, self.cache, self.at = call or model, cache, context
        self.device = next(model.parameters()).device
        self.last = torch.full((batch, 1), 5, device=self.device)

    def step(self) -> None:
        positions = torch.full_like(self.last, self.at)
        with torch.inference_mode():
            out = self.call(
                input_ids=self.last, position_ids=positions, past_key_values=self.cache,
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
        self.last = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        self.last.tolist()  # like a server, which returns every token
        self.at += 1

    def nbytes(self) -> int:
        return sum(t.nbytes for layer in self.cache.layers for t in (layer.keys, layer.values))

    def close(self) -> None:
        del self.cache


def dynamic(model: Any, context: int, batch: int) -> Arm:
    """Return the arm of DynamicCache, which concatenates keys and values for every token."""
    cache = transformers.DynamicCache(config=model.config)
    shape = _shape(model, batch, context)
    device = next(model.parameters()).device
    for layer in range(model.config.num_hidden_layers):
        keys = torch.zeros(shape, dtype=model.dtype, device=device)
        cache.update(keys, keys.clone(), layer)
    return _Plain(model, cache, context, batch)


def static(model: Any, context: int, batch: int, call: Callable[..., Any] | None = None) -> Arm:
    """Return the arm of StaticCache, which reserves the maximum length."""
    cache: Any = transformers.StaticCache(config=model.config, max_cache_len=context + AHEAD)
    _, heads, _, head = _shape(model, batch, 1)
    device = next(model.parameters()).device
    cache.early_initialization(
        batch_size=batch, num_heads=heads, head_dim=head, dtype=model.dtype, device=device
    )
    for layer in cache.layers:
        layer.cumulative_length.fill_(context)
    return _Plain(model, cache, context, batch, call)


def compiled(model: Any, context: int, batch: int) -> Arm:
    """Return the arm of StaticCache with a compiled forward pass and CUDA graphs."""
    compiler: Any = torch.compiler
    compiler.reset()  # torch stops compiling after a few shapes otherwise
    forward: Any = torch.compile(model.forward, mode="reduce-overhead", dynamic=False)

    def call(**given: Any) -> Any:
        compiler.cudagraph_mark_step_begin()
        return forward(**given)

    return static(model, context, batch, call)


def _shape(model: Any, batch: int, context: int) -> tuple[int, int, int, int]:
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return batch, config.num_key_value_heads, context, head


def paged_batching(
    model: Any, context: int, batch: int, tokens: int, *, graphs: bool
) -> dict[str, float]:
    """Measure transformers' continuous batching.

    It reads its prompts itself. Returns the seconds per token once every row decodes, and the
    prompt tokens per second before that.
    """
    make: Any = transformers.GenerationConfig
    settings = make(max_new_tokens=tokens, do_sample=False, eos_token_id=-1,
                                pad_token_id=0)  # fmt: skip
    drawn = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    prompts = torch.randint(3, vocabulary, (batch, context), generator=drawn).tolist()
    began = time.perf_counter()
    outputs = model.generate_batch(
        prompts,
        generation_config=settings,
        continuous_batching_config=batching_config(context, batch, tokens, graphs),
        record_timestamps=True,
        warmup=graphs,
    )
    times = [each.timestamps for each in outputs.values()]
    first = max(each[0] for each in times)
    last = max(each[-1] for each in times)
    after = min(sum(at > first for at in each) for each in times)
    return {
        "seconds_per_step": (last - first) / max(1, after),
        "prefill_tokens_per_second": batch * context / (first - began),
    }


def batching_config(context: int, batch: int, tokens: int, graphs: bool) -> Any:
    """Return the configuration, restricted to the fields of the installed version.

    Names of fields differ between versions.
    """
    from transformers import ContinuousBatchingConfig

    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    settings_by_name: dict[str, Any] = {
        "use_cuda_graph": graphs,
        "use_async_batching": False,
        "allow_block_sharing": False,
        "page_size" if "page_size" in known else "block_size": PAGE,
        "num_blocks": batch * (-(-(context + tokens) // PAGE) + 2),
        "max_batch_tokens": max(2048, batch),
    }
    return ContinuousBatchingConfig(
        **{name: value for name, value in settings_by_name.items() if name in known}
    )


ARMS: dict[str, dict[str, Callable[[Any, int, int], Arm]]] = {
    "eager": {
        "penstock": Virtual,
        "penstock ragged": partial(Virtual, spread=7),
        "dynamic": dynamic,
        "static": static,
    },
    "graph": {
        "penstock": partial(Virtual, graphs=True),
        "penstock ragged": partial(Virtual, spread=7, graphs=True),
        "penstock compiled": partial(Virtual, graphs=True, compiled=True),
        "static compiled": compiled,
    },
}
"""The arms of each mode: eager kernels, or CUDA graphs."""
