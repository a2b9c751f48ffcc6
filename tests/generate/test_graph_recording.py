"""Recording of CUDA graphs, over a stand-in for torch.cuda that logs the order of calls."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.generate import graphs

WAIT = "called a synchronizing CUDA operation"


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class Cuda:
    """The part of torch.cuda that `penstock.generate.graphs` uses."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now, self.mode, self.fail = Stream(self, "main"), 0, False
        self.pools = 0

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> Stream:
        return self.now

    def Stream(self) -> Stream:  # noqa: N802  # torch's name
        return Stream(self, "side")

    def CUDAGraph(self) -> Any:  # noqa: N802
        return self

    def replay(self) -> None:
        self.log.append("replay")

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    @contextlib.contextmanager
    def graph(
        self, graph: Any, *, pool: int, stream: Stream, capture_error_mode: str
    ) -> Iterator[None]:
        self.log.append(f"record {capture_error_mode} in {pool}")
        self.now = stream
        yield
        if self.fail:  # like torch, which then leaves its stream the current one
            raise RuntimeError("operation failed due to a previous error during capture")
        self.now = Stream(self, "main")

    def get_sync_debug_mode(self) -> int:
        return self.mode

    def set_sync_debug_mode(self, mode: Any) -> None:
        self.mode = mode


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    fake = Cuda()
    monkeypatch.setattr(graphs, "_cuda", fake)
    graphs._side_stream.cache_clear()
    yield fake
    graphs._side_stream.cache_clear()


def test_a_call_runs_twice_on_the_side_stream_and_is_then_recorded(cuda: Cuda) -> None:
    output, seen = torch.ones(1), []

    def call() -> torch.Tensor:
        seen.append((cuda.now.name, cuda.mode, gc.isenabled()))
        return output

    recorder = graphs.Recorder()
    graph = recorder.record(call)

    assert seen == [("side", 0, True), ("side", "warn", True), ("side", 0, False)]
    assert cuda.log == [
        "side waits for main", "main waits for side", "record thread_local in 1",
    ]  # fmt: skip
    assert graph.replay() is output
    assert cuda.log[-1] == "replay"
    recorder.forget()
    recorder.record(call)
    assert cuda.log[-1] == "record thread_local in 2"


def test_a_call_that_waits_is_refused_before_the_recording(cuda: Cuda) -> None:
    def call() -> torch.Tensor:
        if cuda.mode == "warn":
            warnings.warn(WAIT, UserWarning, stacklevel=1)
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="waits for the GPU"):
        graphs.Recorder().record(call)

    assert cuda.mode == 0
    # Work after a failed recording must wait for the work already submitted.
    assert cuda.log == ["side waits for main", "main waits for side"]


def test_other_threads_may_wait(cuda: Cuda) -> None:
    def wait() -> None:
        warnings.warn(WAIT, UserWarning, stacklevel=1)

    with graphs.refusing_synchronization():
        other = threading.Thread(target=wait)
        other.start()
        other.join()
        warnings.warn("something else", UserWarning, stacklevel=1)


def test_a_failed_recording_restores_the_stream(cuda: Cuda) -> None:
    cuda.fail, main = True, cuda.now

    with pytest.raises(RuntimeError, match="previous error"):
        graphs.Recorder().record(lambda: torch.ones(1))

    assert cuda.now is main
    assert gc.isenabled()
