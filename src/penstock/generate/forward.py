"""Forward passes over the cache, for a model whose weights are where it computes. Room: hold."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.generate import attention
from penstock.generate.graphs import Decoder, make_decoder
from penstock.generate.requests import UnfitModelError
from penstock.kv.cache import send
from penstock.kv.layout import windows_of
from penstock.model.compile import was_compiled

SMALL_CHUNK, MEDIUM_CHUNK, LARGE_CHUNK = 512, 2048, 4096
"""Prompt tokens of a step. A GPU that holds the weights wants many. More would delay those that
decode beside it: 4096 take an H200 and an 8B model 0.2 s. A CPU takes the medium while nobody does:
each later chunk needs masks, which cost more than the products."""

ALONE = 2
"""So many times as much while nobody decodes. On that machine 8192 tokens at a time are as fast as
all 32768 at once, and 2048 are 2 % slower."""

_turn = threading.RLock()
"""Passes come one after the other, also those of several generators: a model is changed while one
lasts, models may share a config, and there is one stream to record on."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows that read equally many tokens."""

    sequences: Sequence[Any]
    """Their places in the cache."""
    tokens: Sequence[Sequence[int]]
    lengths: Sequence[int]
    """What each row holds before."""

    @property
    def new(self) -> int:
        return len(self.tokens[0])

    def inputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        return {
            "input_ids": send(self.tokens, torch.int64, device),
            "position_ids": self._positions(device),
        }

    def _positions(self, device: torch.device) -> torch.Tensor:
        first = self.lengths[0]
        if all(length == first for length in self.lengths):  # made there: nothing has to cross
            row = torch.arange(first, first + self.new, device=device)
            return row.expand(len(self.lengths), -1)
        every = torch.tensor(self.lengths)[:, None] + torch.arange(self.new)
        return send(every, torch.int64, device)

    @contextmanager
    def rows(self, cache: Any) -> Iterator[None]:
        """The cache and attention are about these rows inside."""
        with cache.rows(self.sequences, padded=False), attention.rows(self.lengths, self.new):
            yield


class Forward(Protocol):
    """Whatever can carry passes out."""

    @property
    def config(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, cache: Any, passes: Sequence[Pass]) -> list[torch.Tensor]:
        """Per pass, [rows, vocabulary]: scores for the token after each row's last."""
        ...


class Resident:
    """A transformers model as it is. Its attention is another only during a pass, so that it can be
    used for other things in between.

    Passes of one token a row are recorded as CUDA graphs, unless `graphs` is False; on a CPU, True
    makes them as if they were. With `compiled` their layers are compiled first."""

    def __init__(self, model: Any, graphs: bool | None = None, *, compiled: bool = False) -> None:
        check_fit(model)
        _check_place(model)
        attention.register()
        self.model, self.graphs, self.compiled = model, graphs, compiled
        self._configs = attention.configs_of(model)
        self._decoder: tuple[Any, Decoder | None] = (None, None)
        self._was_compiled = was_compiled(model)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        found: torch.device = next(self.model.parameters()).device
        return found

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.model.dtype
        return found

    def forward(self, cache: Any, passes: Sequence[Pass]) -> list[torch.Tensor]:
        own = _no_autocast(self.device.type)
        with _turn, self._as_written(), _evaluating(self.model), torch.inference_mode(), own:
            return [self._one(cache, each) for each in passes]

    def decoder(self, cache: Any) -> Decoder | None:
        """What makes the tokens of this cache; None: passes of one token are as any other."""
        if self._decoder[0] is not cache:
            how: dict[str, Any] = {"graphs": self.graphs, "compiled": self.compiled}
            self._decoder = (cache, make_decoder(self.model, cache, **how))
        return self._decoder[1]

    def close(self) -> None:
        """Let go of the cache and of what was recorded over it."""
        if self._decoder[1] is not None:
            self._decoder[1].forget()
        self._decoder = (None, None)

    def _as_written(self) -> contextlib.AbstractContextManager[object]:
        """Code that others have compiled would take the whole of the cache for what it writes, and
        read where there is no memory."""
        if not self._was_compiled:
            return contextlib.nullcontext()
        stance: Any = torch.compiler.set_stance("force_eager")
        return stance  # type: ignore[no-any-return]

    def _one(self, cache: Any, one: Pass) -> torch.Tensor:
        if one.new == 1 and (decoder := self.decoder(cache)) is not None:
            return decoder.run(one)
        with one.rows(cache), attention.chosen(self._configs):
            out = self.model(
                **one.inputs(self.device), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        scores: torch.Tensor = out.logits[:, -1]
        return scores


def _no_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """The cache is of the weights' type."""
    if not torch.is_autocast_enabled(device):  # asked first: setting it aside takes far longer
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    if not model.training:  # asked first: all else goes through all modules, for every token
        yield
        return
    resting = [part for part in model.modules() if not part.training]
    model.eval()
    try:
        yield
    finally:
        model.train()
        for part in resting:
            part.training = False


def usual_chunks(forward: Forward) -> tuple[int, int]:
    """How many tokens of prompts a step reads, if nobody says, beside others that decode and alone.
    Streamed weights leave little room beside them."""
    if not isinstance(forward, Resident):
        return SMALL_CHUNK, SMALL_CHUNK
    if forward.device.type == "cuda":
        return LARGE_CHUNK, ALONE * LARGE_CHUNK
    return SMALL_CHUNK, MEDIUM_CHUNK


def _asks(model: Any) -> bool:
    """Whether it is a model of transformers that asks for its attention function."""
    can = getattr(type(model), "_can_set_attn_implementation", None)
    return can is not None and bool(can())


def _check_place(model: Any) -> None:
    places = sorted({str(weight.device) for weight in model.parameters()})
    if len(places) > 1 or "meta" in places:
        raise UnfitModelError(
            f"{type(model).__name__}'s weights are on {' and '.join(places)}, and a generator "
            f"wants them all on one device; load it without device_map, or let `penstock generate` "
            f"stream it"
        )


def check_fit(model: Any, layers: Sequence[torch.nn.Module] = ()) -> None:
    """Raise UnfitModelError for a model whose attention cannot be replaced by ours. `layers` are
    those that are not in it."""
    name = type(model).__name__
    if not _asks(model):
        for path, inner in model.named_modules():
            if _asks(inner) and inner.can_generate():  # of PEFT, torch.compile or several GPUs
                kind = type(inner).__name__
                raise UnfitModelError(f"{name} wraps a {kind}; give model.{path} instead")
    for why in _reasons(model, [part for each in (model, *layers) for part in each.modules()]):
        raise UnfitModelError(
            f"{name} {why}; use model.generate() with a cache of transformers' own"
        )


def _reasons(model: Any, parts: Sequence[torch.nn.Module]) -> Iterator[str]:
    """What Penstock's attention would compute otherwise than the model."""
    if not _asks(model):
        yield (
            "does not ask transformers for its attention function, so it cannot read this cache "
            "row by row"
        )
    if any("sinks" in dict(part.named_parameters(recurse=False)) for part in parts):
        yield "has attention sinks, which Penstock's attention does not know"
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    for kind in sorted({*kinds} - {"full_attention", "sliding_attention"}):
        yield f"attends by {kind}, which Penstock's attention does not know"
    if any(windows_of(model.config)) and not any(map(_tells_window, parts)):
        yield "has windows in its masks only, and Penstock makes no masks"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        yield "does not take position_ids, so rows of several lengths cannot run together"


def _tells_window(part: torch.nn.Module) -> bool:
    """Whether its code calls something with that name."""
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    names = (each for each in getattr(code, "co_consts", ()) if isinstance(each, tuple))
    return any("sliding_window" in each for each in names)
