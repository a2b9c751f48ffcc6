"""Recording of work as CUDA graphs. Room: hold."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

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
