"""The attention implementations that Penstock registers with transformers.

A transformers model looks up its attention function by the name in its config. Penstock registers
one name for training and two for generation. None of them uses an attention mask: which keys a
query may see follows from what the calling thread attends over, such as the documents of packed
rows or the cached rows of a batch. Each implementation lives in its own module:

- `DOCUMENTS`: `penstock.model.document_attention`
- `CACHED_ROWS`: `penstock.generate.attention`
- `COMPILED_CACHED_ROWS`: `penstock.generate.compiled_layers`
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from penstock.errors import UnsupportedModelError

DOCUMENTS = "penstock"
"""Name of causal attention within the documents of packed rows, for training."""

CACHED_ROWS = "penstock-kv"
"""Name of attention over rows of a KV cache that differ in length, for generation."""

COMPILED_CACHED_ROWS = "penstock-kv-compiled"
"""Name of the same for compiled layers, which also write the cache inside the attention call."""

IGNORED = frozenset(
    (
        *("position_ids", "position_embeddings", "cache_position", "past_key_values"),
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
        *("logits_to_keep", "num_items_in_batch", "output_router_logits"),
    )
)
"""Keyword arguments that transformers passes on and that do not change what attention computes."""

AttentionFunction = Callable[..., tuple[torch.Tensor, None]]
"""A function with the signature that transformers calls."""


class AttentionOptions(NamedTuple):
    """What a layer asks of its attention function, in addition to the tensors."""

    scaling: float | None
    """Factor of the scores; None means one over the square root of the head size."""
    dropout: float
    window: int | None
    """Number of tokens that a query sees, its own included; None means all before it."""
    softcap: float | None
    """Bound of the scores, applied as `tanh(score / softcap) * softcap`."""
    sinks: torch.Tensor | None = None
    """For each head, a score that takes part in the softmax but has no value."""


Implementation = Callable[
    [torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions], torch.Tensor
]
"""Computes attention for a module from queries, keys, values and options. See
`attention_function` for the shapes."""


def attention_function(
    implementation: Implementation, *, supports_sinks: bool = False
) -> AttentionFunction:
    """Wrap an implementation in the signature that transformers calls.

    Queries, keys and values are `[rows, heads, tokens, head size]`; the output is
    `[rows, tokens, heads, head size]`. Call this once per implementation, at module level: compiled
    code is guarded by the identity of the function, so a new wrapper would compile layers again.
    """

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **others: object,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is not None:  # transformers makes none for this attention
            raise UnsupportedModelError(
                f"{type(module).__name__} makes an attention mask of its own, and Penstock's "
                f"attention takes none"
            )
        if s_aux is not None and not supports_sinks:
            raise UnsupportedModelError(
                f"{type(module).__name__} has attention sinks, which Penstock's attention does not "
                f"support here"
            )
        # Without the argument, the module decides, as in the functions of transformers.
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise UnsupportedModelError(
                f"{type(module).__name__} asks for attention to later tokens, which Penstock's "
                f"attention hides"
            )
        for name, other in others.items():
            if name not in IGNORED and other is not None and other is not False:
                raise UnsupportedModelError(
                    f"{type(module).__name__} passes {name} to its attention function, which "
                    f"Penstock's attention does not support"
                )
        options = AttentionOptions(scaling, dropout, sliding_window, softcap, s_aux)
        return implementation(module, query, key, value, options), None

    return attend


def register(name: str, function: AttentionFunction) -> None:
    """Register an attention function with transformers."""
    from transformers import AttentionInterface

    interface: Any = AttentionInterface
    interface.register(name, function)


# The scope of attention.


class _Scope(threading.local):
    """The documents or rows that the attention of one thread works on.

    The attribute is set in `__init__`, which threading.local calls in every thread, so that
    compiled code can read it without a default.
    """

    def __init__(self) -> None:
        self.current: Any = None


_scope = _Scope()


@contextlib.contextmanager
def attending_over(scope: Any) -> Iterator[None]:
    """Set what this thread's attention is over: an object that the implementation understands.

    For `DOCUMENTS` it is where documents begin, or None if each row is one document; for
    `CACHED_ROWS` it is the rows' lengths or their spans in the cache.
    """
    before = _scope.current
    _scope.current = scope
    try:
        yield
    finally:
        _scope.current = before


def current_scope() -> Any:
    """Return what `attending_over` set in this thread, or None."""
    return _scope.current


# Which implementation a model uses.


def attention_configs(*parts: Any) -> list[Any]:
    """Return each config in which some module of `parts` looks up its attention function, once."""
    configs = (
        getattr(module, "config", None) for part in parts for module in part.modules()
    )  # fmt: skip
    return list({id(config): config for config in configs if config}.values())


def set_attention(configs: Sequence[Any], name: str) -> None:
    """Make the models that own these configs use a registered attention function."""
    for config in configs:
        config._attn_implementation = name


@contextlib.contextmanager
def using_attention(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Use a registered attention function inside the block, and each config's own one after it."""
    before = [config._attn_implementation for config in configs]
    set_attention(configs, name)
    try:
        yield
    finally:
        for config, own_name in zip(configs, before, strict=True):
            config._attn_implementation = own_name
