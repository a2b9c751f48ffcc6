"""Recording, over a stand-in for torch's CUDA that keeps the order of calls."""

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
        self.cuda.told.append(f"{self.name} waits for {other.name}")


class Cuda:
    """What `recording` asks of torch.cuda."""

    def __init__(self) -> None:
        self.told: list[str] = []
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
        self.told.append("replay")

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
        self.told.append(f"record {capture_error_mode} in {pool}")
        self.now = stream
        yield
        if self.fail:  # as torch does, which then leaves its stream the current one
            raise RuntimeError("operation failed due to a previous error during capture")
        self.now = Stream(self, "main")

    def get_sync_debug_mode(self) -> int:
        return self.mode

    def set_sync_debug_mode(self, mode: Any) -> None:
        self.mode = mode


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    made = Cuda()
    monkeypatch.setattr(graphs, "_cuda", made)
    graphs._side_stream.cache_clear()
    yield made
    graphs._side_stream.cache_clear()


def test_it_runs_twice_beside_and_is_then_recorded(cuda: Cuda) -> None:
    answer, seen = torch.ones(1), []

    def call() -> torch.Tensor:
        seen.append((cuda.now.name, cuda.mode, gc.isenabled()))
        return answer

    recorder = graphs.Recorder()
    graph = recorder.record(call)

    assert seen == [("side", 0, True), ("side", "warn", True), ("side", 0, False)]
    assert cuda.told == [
        "side waits for main", "main waits for side", "record thread_local in 1",
    ]  # fmt: skip
    assert graph.replay() is answer
    assert cuda.told[-1] == "replay"
    recorder.forget()
    recorder.record(call)
    assert cuda.told[-1] == "record thread_local in 2"


def test_a_pass_that_waits_is_refused_before_it_is_recorded(cuda: Cuda) -> None:
    def call() -> torch.Tensor:
        if cuda.mode == "warn":
            warnings.warn(WAIT, UserWarning, stacklevel=1)
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="waits for the GPU"):
        graphs.Recorder().record(call)

    assert cuda.mode == 0
    # What goes on without recording must not overtake what was begun.
    assert cuda.told == ["side waits for main", "main waits for side"]


def test_others_may_wait(cuda: Cuda) -> None:
    def wait() -> None:
        warnings.warn(WAIT, UserWarning, stacklevel=1)

    with graphs.refusing_synchronization():
        other = threading.Thread(target=wait)
        other.start()
        other.join()
        warnings.warn("something else", UserWarning, stacklevel=1)


def test_a_recording_that_breaks_off_leaves_the_stream_as_it_was(cuda: Cuda) -> None:
    cuda.fail, main = True, cuda.now

    with pytest.raises(RuntimeError, match="previous error"):
        graphs.Recorder().record(lambda: torch.ones(1))

    assert cuda.now is main
    assert gc.isenabled()
