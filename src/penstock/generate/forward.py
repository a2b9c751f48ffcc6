"""Forward passes over the cache, for a model whose weights are resident on one device."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.generate.attention import RowLengths, register_row_attention
from penstock.generate.graphs import Decoder, make_decoder
from penstock.generate.requests import UnfitModelError
from penstock.kv.layout import layer_windows
from penstock.kv.views import copy_to_device
from penstock.model.attention import (
    CACHED_ROWS,
    attending_over,
    attention_configs,
    using_attention,
)
from penstock.model.compile import was_compiled
from penstock.model.copy_check import is_foreign

SMALL_CHUNK, MEDIUM_CHUNK, LARGE_CHUNK = 512, 2048, 4096
"""Numbers of prompt tokens that a step reads. A GPU that holds the weights needs many to be fast;
more would delay the sequences that decode in the same step: 4096 tokens take an 8B model 0.2 s on
an H200. A CPU reads the medium number while no sequence decodes: each later chunk needs masks,
which cost more than the matrix products."""

ALONE = 2
"""Factor by which the large chunk grows while no sequence decodes. On an H200, chunks of 8192
tokens are as fast as a prompt of 32768 tokens in one piece, and chunks of 2048 are 2 % slower."""

_pass_lock = threading.RLock()
"""Serializes passes, also those of several generators: a pass changes the model while it runs,
models may share a config, and all graphs are recorded on one stream."""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Rows that read the same number of tokens in one call of the model."""

    sequences: Sequence[Any]
    """The rows' sequences in the cache."""
    tokens: Sequence[Sequence[int]]
    """The tokens that each row reads."""
    lengths: Sequence[int]
    """Number of tokens that each row holds before."""

    @property
    def new(self) -> int:
        """Number of tokens that each row reads."""
        return len(self.tokens[0])

    def inputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the arguments of the model."""
        return {
            "input_ids": copy_to_device(self.tokens, torch.int64, device),
            "position_ids": self._positions(device),
        }

    def _positions(self, device: torch.device) -> torch.Tensor:
        first = self.lengths[0]
        if all(length == first for length in self.lengths):
            # Computed on the device, so that nothing has to be copied there.
            row = torch.arange(first, first + self.new, device=device)
            return row.expand(len(self.lengths), -1)
        every = torch.tensor(self.lengths)[:, None] + torch.arange(self.new)
        return copy_to_device(every, torch.int64, device)

    @contextmanager
    def rows(self, cache: Any) -> Iterator[None]:
        """Set the rows that the cache and the attention work on inside the block."""
        lengths = RowLengths(tuple(self.lengths), self.new)
        with cache.rows(self.sequences, padded=False), attending_over(lengths):
            yield


class Forward(Protocol):
    """Runs forward passes; a `Generator` can use any object of this kind."""

    @property
    def config(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, cache: Any, passes: Sequence[ForwardPass]) -> list[torch.Tensor]:
        """Return `[rows, vocabulary]` for each pass: scores of the token after each row's last."""
        ...


class ResidentForward:
    """Runs passes with a transformers model as it is.

    The model's attention is replaced only during a pass, so that the model can be used for other
    things in between. Passes of one token per row are recorded as CUDA graphs unless `graphs` is
    False; on a CPU, True runs them the same way without recording. With `compiled`, the layers are
    compiled for these passes.
    """

    def __init__(self, model: Any, graphs: bool | None = None, *, compiled: bool = False) -> None:
        check_fit(model)
        _check_one_device(model)
        register_row_attention()
        self.model, self.graphs, self.compiled = model, graphs, compiled
        self._configs = attention_configs(model)
        self._decoder: tuple[Any, Decoder | None] = (None, None)
        """A cache, and the decoder made for it."""
        self._was_compiled = was_compiled(model)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    def forward(self, cache: Any, passes: Sequence[ForwardPass]) -> list[torch.Tensor]:
        """Run passes, one after the other."""
        autocast = _autocast_disabled(self.device.type)
        with (
            _pass_lock,
            self._eager(),
            _evaluation_mode(self.model),
            torch.inference_mode(),
            autocast,
        ):
            return [self._run(cache, each) for each in passes]

    def decoder(self, cache: Any) -> Decoder | None:
        """Return the decoder of a cache; None if passes of one token run like any other."""
        if self._decoder[0] is not cache:
            options: dict[str, Any] = {"graphs": self.graphs, "compiled": self.compiled}
            self._decoder = (cache, make_decoder(self.model, cache, **options))
        return self._decoder[1]

    def close(self) -> None:
        """Drop the cache and everything that was recorded for it."""
        if self._decoder[1] is not None:
            self._decoder[1].forget()
        self._decoder = (None, None)

    def _eager(self) -> contextlib.AbstractContextManager[object]:
        """Run a model that its owner compiled as it is written.

        Compiled code would treat the whole range of the cache as a tensor that it writes, and read
        addresses without memory.
        """
        if not self._was_compiled:
            return contextlib.nullcontext()
        stance: Any = torch.compiler.set_stance("force_eager")
        return stance  # type: ignore[no-any-return]

    def _run(self, cache: Any, forward_pass: ForwardPass) -> torch.Tensor:
        if forward_pass.new == 1 and (decoder := self.decoder(cache)) is not None:
            return decoder.run(forward_pass)
        with forward_pass.rows(cache), using_attention(self._configs, CACHED_ROWS):
            out = self.model(
                **forward_pass.inputs(self.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        scores: torch.Tensor = out.logits[:, -1]
        return scores


def _autocast_disabled(device: str) -> contextlib.AbstractContextManager[object]:
    """Disable autocast: keys and values must have the type of the cache, which is the weights'."""
    # Checked first, because entering torch.autocast takes far longer than the check.
    if not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    # Checked first, because everything below goes through all modules, for every token.
    if not model.training:
        yield
        return
    evaluating = [part for part in model.modules() if not part.training]
    model.eval()
    try:
        yield
    finally:
        model.train()
        for part in evaluating:
            part.training = False


def default_chunks(forward: Forward) -> tuple[int, int]:
    """Return how many prompt tokens a step reads while other sequences decode, and while none does.

    Streamed weights leave little memory for activations, so their chunks are small.
    """
    if not isinstance(forward, ResidentForward):
        return SMALL_CHUNK, SMALL_CHUNK
    if forward.device.type == "cuda":
        return LARGE_CHUNK, ALONE * LARGE_CHUNK
    return SMALL_CHUNK, MEDIUM_CHUNK


# Checking whether a model fits.


def check_fit(model: Any, layers: Sequence[torch.nn.Module] = ()) -> None:
    """Raise UnfitModelError for a model whose attention Penstock cannot replace.

    `layers` are the model's layers where they were lifted out of it.
    """
    name = type(model).__name__
    if not _uses_attention_interface(model):
        for path, inner in model.named_modules():
            # A wrapper of PEFT, torch.compile or DistributedDataParallel
            if _uses_attention_interface(inner) and inner.can_generate():
                kind = type(inner).__name__
                raise UnfitModelError(f"{name} wraps a {kind}; pass model.{path} instead")
    parts = [part for each in (model, *layers) for part in each.modules()]
    for reason in _reasons_against(model, parts):
        raise UnfitModelError(
            f"{name} {reason}; use model.generate() with one of transformers' own caches"
        )


def _uses_attention_interface(model: Any) -> bool:
    """Return whether a model looks up its attention function in transformers' registry."""
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    return can_set is not None and bool(can_set())


def _reasons_against(model: Any, parts: Sequence[torch.nn.Module]) -> Iterator[str]:
    """Yield what Penstock's attention would compute differently from the model's own."""
    if not _uses_attention_interface(model):
        yield (
            "does not look up its attention function in transformers, so it cannot read this "
            "cache row by row"
        )
    if any("sinks" in dict(part.named_parameters(recurse=False)) for part in parts):
        yield "has attention sinks, which Penstock's attention does not support"
    if own := next((part for part in parts if _attends_by_itself(part)), None):
        yield (
            f"has a {type(own).__name__} whose forward does not call the attention function that "
            f"its config names (ALL_ATTENTION_FUNCTIONS)"
        )
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    for kind in sorted({*kinds} - {"full_attention", "sliding_attention"}):
        yield f"uses {kind}, which Penstock's attention does not support"
    if any(layer_windows(model.config)) and not any(map(_passes_window, parts)):
        yield "has sliding windows only in its masks, and Penstock makes no masks"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        yield "does not take position_ids, so rows of different lengths cannot run together"


def _attends_by_itself(part: torch.nn.Module) -> bool:
    """Return whether a caller's own code computes attention, which knows nothing of this cache.

    Every module of transformers that looks up its attention function says whether it is causal.
    """
    forward: Any = part.forward
    if not hasattr(part, "is_causal") or not is_foreign(getattr(forward, "__func__", forward)):
        return False
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return "ALL_ATTENTION_FUNCTIONS" not in getattr(code, "co_names", ())


def _passes_window(part: torch.nn.Module) -> bool:
    """Return whether a module's code calls something with an argument named `sliding_window`."""
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    # The names of keyword arguments of calls are tuples among a function's constants.
    names = (each for each in getattr(code, "co_consts", ()) if isinstance(each, tuple))
    return any("sliding_window" in each for each in names)


def _check_one_device(model: Any) -> None:
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1 or "meta" in devices:
        raise UnfitModelError(
            f"{type(model).__name__} has its weights on {' and '.join(devices)}, but a generator "
            f"needs them on one device; load it without device_map, or use `penstock generate`, "
            f"which can stream the weights"
        )
