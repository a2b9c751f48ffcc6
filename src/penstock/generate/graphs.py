"""Recording of work as CUDA graphs. Room: hold."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch

from penstock.generate import attention
from penstock.kv import decode_attention
from penstock.kv.decode_batch import DecodeBatch
from penstock.kv.errors import KvWarning, first_line
from penstock.units import round_up

if TYPE_CHECKING:
    from penstock.generate.compiled_layers import CompiledLayers


Call = Callable[[], torch.Tensor]

_cuda: Any = torch.cuda  # whose streams and graphs have no types


class Recorder:
    """Records calls, all into one pool of memory: they are played one at a time."""

    def __init__(self) -> None:
        self._pool = _cuda.graph_pool_handle()

    def forget(self) -> None:
        """What was recorded is not played again: its memory is not for what comes."""
        self._pool = _cuda.graph_pool_handle()

    def record(self, call: Call) -> Graph:
        """The call runs twice, is recorded, and can then be played. RuntimeError if it cannot be
        recorded; what it computed meanwhile is the same as if it had been called."""
        main, side = _cuda.current_stream(), _side(_cuda.current_device())
        side.wait_stream(main)
        try:
            with _cuda.stream(side):
                call()  # compiles kernels, and makes what libraries keep
                with refusing_waits():
                    call()
        finally:
            main.wait_stream(side)  # what it reads is written anew for the next pass
        graph = _cuda.CUDAGraph()
        # "thread_local": what other threads ask of the driver does not spoil the recording.
        # The outer `stream` comes back to ours also when ending the recording fails.
        with (
            _no_collection(),
            _cuda.stream(main),
            _cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"),
        ):
            answer = call()
        return Graph(graph, answer)


@functools.cache
def _side(_device: int) -> Any:
    """The one stream to record on: cuBLAS keeps memory for every stream that it has seen."""
    return _cuda.Stream()


class Graph:
    """One recording, and where its answer appears."""

    def __init__(self, graph: Any, answer: torch.Tensor) -> None:
        self._graph, self._answer = graph, answer

    def play(self) -> torch.Tensor:
        self._graph.replay()
        return self._answer


@contextlib.contextmanager
def refusing_waits() -> Iterator[None]:
    """RuntimeError if this thread has waited for the device inside. A recording would end in the
    middle there, and leave torch's random numbers and allocator as if it still went on."""
    before, mine = _cuda.get_sync_debug_mode(), threading.get_ident()
    waits: list[str] = []

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if threading.get_ident() == mine and "called a synchronizing" in str(message):
            waits.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        _cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            _cuda.set_sync_debug_mode(before)
    if waits:
        raise RuntimeError("its forward pass waits for the GPU")


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What is collected may give memory back to the driver, which must not happen now."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# --------
# Passes of one token a row, recorded once and played for every token. Room: hold.
#
# A model's forward pass launches some thirty kernels a layer, and launching takes the host longer
# than one token takes the GPU. A CUDA graph launches them all at once, but from then on with the
# same
# addresses and sizes. Both are the same for every token here: rows keep their virtual addresses
# as
# they grow, and lengths are read on the device (see `slate`).
#
# There is one recording for each number of rows, in steps, and each bound of lengths. A CPU has
# no
# graphs: there the pass is called again, with the same buffers, so that all but the recording is
# tested without a GPU.

STEP = 8
"""Above so many rows, recordings are made for multiples of it. Below, for powers of two."""


class Recording(Protocol):
    """A pass that can be had again."""

    def play(self) -> torch.Tensor:
        """Its scores; the next play of any recording may overwrite them."""


class Called:
    """Not recorded: called again."""

    def __init__(self, call: Call) -> None:
        self.play = call


class Decoder:
    """Makes tokens for rows of one cache, wherever they lie, by compiled layers if wanted."""

    def __init__(self, model: Any, cache: Any, *, graphs: bool, compiled: bool = False) -> None:
        self.model, self.cache = model, cache
        self._compiled = self._compile() if compiled else None
        self._pad = graphs
        self._device: torch.device = cache.views.flat[0][0].device
        self._recorder = Recorder() if graphs and self._device.type == "cuda" else None
        self._made: dict[tuple[int, int], tuple[DecodeBatch, Recording]] = {}
        self._addresses = Addresses(model)
        self._configs = attention.configs_of(model)

    def run(self, one: Any) -> torch.Tensor:
        """A `Pass` of one token a row: [rows, vocabulary]."""
        with decode_attention.on(self._device):
            return self._run(one)

    def _run(self, one: Any) -> torch.Tensor:
        if self._addresses.moved():
            self.forget()
            self._addresses = Addresses(self.model)
            self._compiled = self._compile() if self._compiled is not None else None
        count = len(one.sequences)
        rows = padded_rows(count) if self._pad else count
        key = (rows, decode_attention.bucket(max(one.lengths) + 1))
        slate = self._made[key][0] if key in self._made else self.cache.slate(*key)
        slate.fill(one.sequences, [tokens[0] for tokens in one.tokens], one.lengths)
        if key not in self._made:
            self._made[key] = slate, self._record(slate)
        scores = self._made[key][1].play()[:count]
        return scores if self._recorder is None else scores.clone()

    def forget(self) -> None:
        """Let go of recordings and their memory."""
        self._made.clear()
        if self._recorder is not None:
            self._recorder.forget()

    @property
    def recorded(self) -> list[tuple[int, int]]:
        """Rows, and bounds of lengths, for which there is something to play."""
        return list(self._made)

    def _record(self, slate: DecodeBatch) -> Recording:
        def call() -> torch.Tensor:
            return self._forward(slate)

        if self._recorder is None:
            return Called(call)
        try:
            # The driver is not called from the background thread meanwhile.
            with self.cache.quiet():
                return self._recorder.record(call)
        except RuntimeError as failed:
            self._recorder = None
            self._pad = False
            self._made.clear()
            self._warn("recorded as a CUDA graph", "slower for small batches", failed)
            return Called(call)

    def _warn(self, what: str, cost: str, why: Exception) -> None:
        warnings.warn(
            f"{type(self.model).__name__} cannot be {what} and goes on without, {cost}: "
            f"{first_line(why)}",
            KvWarning,
            stacklevel=2,
        )

    def _compile(self) -> CompiledLayers | None:
        from penstock.generate import compiled_layers

        try:
            if len(compiled_layers.layers_of(self.model)) != len(self.cache.views.flat):
                raise LookupError("some of its layers share keys and values")
            return compiled_layers.CompiledLayers(self.model)
        except LookupError as missing:
            self._warn("compiled", "more slowly", missing)
            return None

    def _forward(self, slate: DecodeBatch) -> torch.Tensor:
        if self._compiled is not None:
            from penstock.generate.compiled_layers import PROBLEMS

            try:
                with self._compiled.used(self.cache):
                    return self._plain(slate)
            except PROBLEMS as failed:
                self._compiled = None
                self._warn("compiled", "more slowly", failed)
        return self._plain(slate)

    def _plain(self, slate: DecodeBatch) -> torch.Tensor:
        told = attention.chosen(self._configs)
        with self.cache.showing(slate), attention.spots(slate.spots), told:
            out = self.model(
                input_ids=slate.tokens, position_ids=slate.positions, past_key_values=self.cache,
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
        scores: torch.Tensor = out.logits[:, -1]
        return scores


def make_decoder(
    model: Any, cache: Any, *, graphs: bool | None, compiled: bool = False
) -> Decoder | None:
    """None where passes of one token are as any other: on a CPU, unless graphs or compiled layers
    are asked for, and where the decode kernel is missing or does not fit."""
    keys = cache.views.flat[0][0]
    if keys.device.type != "cuda":
        wanted = graphs or compiled
        return Decoder(model, cache, graphs=bool(graphs), compiled=compiled) if wanted else None
    if not decode_attention.fits(keys.device, keys.dtype, head := keys.shape[-1]):
        if compiled:
            warnings.warn(
                f"Penstock's kernel for attention is not there for heads of {head} in "
                f"{keys.dtype}, so layers are not compiled, and tokens made more slowly",
                KvWarning,
                stacklevel=2,
            )
        return None
    return Decoder(model, cache, graphs=graphs is not False, compiled=compiled)


def padded_rows(count: int) -> int:
    """How many rows a recording has that serves `count`."""
    return decode_attention.power(count) if count <= STEP else round_up(count, STEP)


class Addresses:
    """Where a model's weights are, and a quick look whether they still are there: a recording reads
    the addresses that it was made with. What is written into the same weights is no change."""

    def __init__(self, model: Any) -> None:
        parts = model.modules()
        tables = (t for p in parts for t in (p._modules, p._parameters, p._buffers))
        self._tables: list[dict[str, Any]] = [table for table in tables if table]
        self._held = list(chain.from_iterable(map(dict.values, self._tables)))
        self._weights = [held for held in self._held if isinstance(held, torch.Tensor)]
        self._at = [weight.data_ptr() for weight in self._weights]

    def moved(self) -> bool:
        now = chain.from_iterable(map(dict.values, self._tables))
        return (
            sum(map(len, self._tables)) != len(self._held)
            or not all(map(operator.is_, now, self._held))
            or list(map(torch.Tensor.data_ptr, self._weights)) != self._at
        )
