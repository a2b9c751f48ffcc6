"""Generate one token per row with passes that are recorded once and replayed as CUDA graphs.

A model's forward pass launches about thirty kernels per layer, and launching them takes the host
longer than one token takes the GPU. A CUDA graph launches them all together, but always with the
same addresses and sizes. With this cache both stay the same from token to token: rows keep their
virtual addresses as they grow, and lengths are read on the device (`penstock.kv.decode_batch`).

There is one graph for each padded number of rows and each bound of lengths. A CPU has no graphs:
there the pass is called again with the same buffers, so that everything but the capture itself is
tested without a GPU.
"""

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

from penstock.kv import decode_attention
from penstock.kv.decode_batch import DecodeBatch
from penstock.kv.errors import KvWarning, first_line
from penstock.model.attention import (
    CACHED_ROWS,
    attending_over,
    attention_configs,
    using_attention,
)
from penstock.units import round_up

if TYPE_CHECKING:
    from penstock.generate.compiled_layers import CompiledDecodeLayers

ROW_STEP = 8
"""Graphs are recorded for multiples of this many rows, and below it for powers of two."""

ForwardCall = Callable[[], torch.Tensor]

_cuda: Any = torch.cuda  # untyped, because its streams and graphs have no type annotations


class Replayable(Protocol):
    """A pass that can be repeated."""

    def replay(self) -> torch.Tensor:
        """Run the pass and return its scores, which the next replay of any pass may overwrite."""


class RepeatedCall:
    """A pass that is not recorded, but called again."""

    def __init__(self, call: ForwardCall) -> None:
        self.replay = call


class Decoder:
    """Generates one token per row, for rows anywhere in one cache.

    With `graphs`, rows are padded to few sizes, and on a GPU passes are recorded as CUDA graphs.
    With `compiled`, the model's layers are compiled first.
    """

    def __init__(self, model: Any, cache: Any, *, graphs: bool, compiled: bool = False) -> None:
        self.model, self.cache = model, cache
        self._compiled = self._compile() if compiled else None
        self._pad = graphs
        self._device: torch.device = cache.views.flat[0][0].device
        self._recorder = Recorder() if graphs and self._device.type == "cuda" else None
        self._recordings: dict[tuple[int, int], tuple[DecodeBatch, Replayable]] = {}
        self._addresses = WeightAddresses(model)
        self._configs = attention_configs(model)

    def run(self, decode_pass: Any) -> torch.Tensor:
        """Run a `ForwardPass` of one token per row: `[rows, vocabulary]`."""
        with decode_attention.current_device(self._device):
            return self._run(decode_pass)

    def _run(self, decode_pass: Any) -> torch.Tensor:
        if self._addresses.changed():
            self.forget()
            self._addresses = WeightAddresses(self.model)
            self._compiled = self._compile() if self._compiled is not None else None
        count = len(decode_pass.sequences)
        rows = padded_rows(count) if self._pad else count
        key = (rows, decode_attention.length_bound(max(decode_pass.lengths) + 1))
        recorded = self._recordings.get(key)
        batch = recorded[0] if recorded is not None else self.cache.make_decode_batch(*key)
        batch.fill(
            decode_pass.sequences, [tokens[0] for tokens in decode_pass.tokens], decode_pass.lengths
        )
        if key not in self._recordings:
            self._recordings[key] = batch, self._record(batch)
        scores = self._recordings[key][1].replay()[:count]
        # A graph writes its scores to the same memory every time, so the caller gets a copy.
        return scores if self._recorder is None else scores.clone()

    def forget(self) -> None:
        """Drop all recordings and their memory."""
        self._recordings.clear()
        if self._recorder is not None:
            self._recorder.forget()

    @property
    def recorded(self) -> list[tuple[int, int]]:
        """The numbers of rows, each with a bound of lengths, for which there is a recording."""
        return list(self._recordings)

    def _record(self, batch: DecodeBatch) -> Replayable:
        def call() -> torch.Tensor:
            return self._forward(batch)

        if self._recorder is None:
            return RepeatedCall(call)
        try:
            # The background thread must not call the driver during the capture.
            with self.cache.growth_paused():
                return self._recorder.record(call)
        except RuntimeError as error:
            self._recorder = None
            self._pad = False
            self._recordings.clear()
            self._warn("recorded as a CUDA graph", "is slower for small batches", error)
            return RepeatedCall(call)

    def _warn(self, what: str, cost: str, error: Exception) -> None:
        warnings.warn(
            f"{type(self.model).__name__} cannot be {what}; generation continues without it and "
            f"{cost}: {first_line(error)}",
            KvWarning,
            stacklevel=2,
        )

    def _compile(self) -> CompiledDecodeLayers | None:
        from penstock.generate import compiled_layers

        try:
            if len(compiled_layers.find_layers(self.model)) != len(self.cache.views.flat):
                raise LookupError("some of its layers share keys and values")
            return compiled_layers.CompiledDecodeLayers(self.model)
        except LookupError as error:
            self._warn("compiled", "is slower", error)
            return None

    def _forward(self, batch: DecodeBatch) -> torch.Tensor:
        if self._compiled is not None:
            from penstock.generate.compiled_layers import COMPILE_ERRORS

            try:
                with self._compiled.installed(self.cache):
                    return self._call_model(batch)
            except COMPILE_ERRORS as error:
                self._compiled = None
                self._warn("compiled", "is slower", error)
        return self._call_model(batch)

    def _call_model(self, batch: DecodeBatch) -> torch.Tensor:
        own_attention = using_attention(self._configs, CACHED_ROWS)
        with self.cache.decoding(batch), attending_over(batch.spans), own_attention:
            out = self.model(
                input_ids=batch.tokens, position_ids=batch.positions, past_key_values=self.cache,
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
        scores: torch.Tensor = out.logits[:, -1]
        return scores


def make_decoder(
    model: Any, cache: Any, *, graphs: bool | None, compiled: bool = False
) -> Decoder | None:
    """Make a decoder, or return None where passes of one token should run like any other.

    That is so on a CPU, unless graphs or compiled layers are asked for, and where the decode kernel
    is missing or does not support the model.
    """
    keys = cache.views.flat[0][0]
    if keys.device.type != "cuda":
        wanted = graphs or compiled
        return Decoder(model, cache, graphs=bool(graphs), compiled=compiled) if wanted else None
    if not decode_attention.fits(keys.device, keys.dtype, head := keys.shape[-1]):
        if compiled:
            warnings.warn(
                f"Penstock's decode kernel is not available for heads of size {head} in "
                f"{keys.dtype}, so layers are not compiled and generation is slower",
                KvWarning,
                stacklevel=2,
            )
        return None
    return Decoder(model, cache, graphs=graphs is not False, compiled=compiled)


def padded_rows(count: int) -> int:
    """Return the number of rows of the recording that serves `count` rows."""
    if count <= ROW_STEP:
        return decode_attention.next_power_of_two(count)
    return round_up(count, ROW_STEP)


class WeightAddresses:
    """The addresses of a model's weights, with a fast check whether they changed.

    A graph reads the addresses that it was recorded with. Writing into the same weights is not a
    change.
    """

    def __init__(self, model: Any) -> None:
        parts = model.modules()
        tables = (t for p in parts for t in (p._modules, p._parameters, p._buffers))
        self._tables: list[dict[str, Any]] = [table for table in tables if table]
        self._values = list(chain.from_iterable(map(dict.values, self._tables)))
        self._weights = [value for value in self._values if isinstance(value, torch.Tensor)]
        self._pointers = [weight.data_ptr() for weight in self._weights]

    def changed(self) -> bool:
        """Return whether modules, weights or their addresses are others than before."""
        # Before every token: `map` over C functions, without a Python call per weight.
        now = chain.from_iterable(map(dict.values, self._tables))
        return (
            sum(map(len, self._tables)) != len(self._values)
            or not all(map(operator.is_, now, self._values))
            or list(map(torch.Tensor.data_ptr, self._weights)) != self._pointers
        )


# Recording.


class Recorder:
    """Records calls as CUDA graphs that share one pool of memory: they run one at a time."""

    def __init__(self) -> None:
        self._pool = _cuda.graph_pool_handle()

    def forget(self) -> None:
        """Use a new pool from now on. The old graphs, and with them their pool, are dropped."""
        self._pool = _cuda.graph_pool_handle()

    def record(self, call: ForwardCall) -> Graph:
        """Run a call twice, record it, and return the graph.

        Raises RuntimeError if it cannot be recorded. What the call computed until then is the same
        as if it had been called normally.
        """
        main, side = _cuda.current_stream(), _side_stream(_cuda.current_device())
        side.wait_stream(main)
        try:
            with _cuda.stream(side):
                call()  # compiles kernels, and lets libraries allocate their workspaces
                with refusing_synchronization():
                    call()
        finally:
            # The next pass overwrites the inputs that these calls read.
            main.wait_stream(side)
        graph = _cuda.CUDAGraph()
        # "thread_local": driver calls of other threads do not invalidate the capture.
        # The outer `stream` restores our stream also when ending the capture fails.
        with (
            _garbage_collection_disabled(),
            _cuda.stream(main),
            _cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"),
        ):
            output = call()
        return Graph(graph, output)


@functools.cache
def _side_stream(_device: int) -> Any:
    """Return the one stream to record on: cuBLAS keeps a workspace for every stream it has seen."""
    return _cuda.Stream()


class Graph:
    """A CUDA graph, and the tensor in which its output appears."""

    def __init__(self, graph: Any, output: torch.Tensor) -> None:
        self._graph, self._output = graph, output

    def replay(self) -> torch.Tensor:
        """Launch the graph, and return its output."""
        self._graph.replay()
        return self._output


@contextlib.contextmanager
def refusing_synchronization() -> Iterator[None]:
    """Raise RuntimeError at the end if this thread waited for the device inside the block.

    During a capture such a wait would end the capture in the middle, and leave torch's random
    numbers and allocator as if it were still going on. So it is detected before the capture, by
    torch's debug mode, which reports waits as warnings.
    """
    before, this_thread = _cuda.get_sync_debug_mode(), threading.get_ident()
    waits: list[str] = []

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if threading.get_ident() == this_thread and "called a synchronizing" in str(message):
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
def _garbage_collection_disabled() -> Iterator[None]:
    """Disable garbage collection: it could free memory to the driver, which breaks a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
