"""Run DeepSpeed's aio handle on the bytes of a store, for bench_storage.

DeepSpeed runs in a separate process, because importing it takes seconds and its failures end the
process. The process reads one request per line ("PATTERN PATH OFFSET NBYTES"), transfers the bytes
and prints bytes per second. The handle uses its own locked buffers and the settings of the store.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

LANES = 4


class DeepSpeedAio:
    """Client of the child process. `home` is a directory with DeepSpeed and its dependencies."""

    def __init__(self, home: str, *, request: int, depth: int, chunk: int) -> None:
        env = os.environ | {"PYTHONPATH": home, "DS_ACCELERATOR": "cpu"}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        self._child = subprocess.Popen(
            [sys.executable, __file__, str(request), str(depth), str(chunk)],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def run(self, pattern: str, path: str, offset: int, nbytes: int) -> float:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(pattern, path, offset, nbytes, file=self._child.stdin)
        while line := self._child.stdout.readline():  # building the extension prints lines too
            if line.startswith("rate "):
                return float(line.split()[1])
        raise SystemExit(f"the DeepSpeed process exited with code {self._child.wait()}")

    def __enter__(self) -> DeepSpeedAio:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def serve(request: int, depth: int, chunk: int) -> None:
    """Answer requests from standard input until it is closed."""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found]

    module = AsyncIOBuilder().load(verbose=False)
    handles = [module.aio_handle(request, depth // 2, False, True, 1) for _ in range(2)]
    whole = module.aio_handle(request, depth, False, True, 1)
    example = torch.empty(0, dtype=torch.uint8)
    lanes = [whole.new_cpu_locked_tensor(chunk, example) for _ in range(LANES)]
    for line in sys.stdin:
        pattern, path, offset, nbytes = line.split()
        chunks = [int(offset) + i * chunk for i in range(int(nbytes) // chunk)]
        began = time.perf_counter()
        if pattern == "mixed":
            moved = mixed(*handles, lanes, path, chunks)
        else:
            moved = one_way(whole, pattern, lanes, path, chunks)
        print("rate", moved / (time.perf_counter() - began), flush=True)


def one_way(handle: Any, pattern: str, lanes: list[Any], path: str, chunks: list[int]) -> int:
    """Transfer one chunk per lane, then wait for all of them:

    `wait` cannot wait for a single one.
    """
    start = handle.async_pread if pattern == "read" else handle.async_pwrite
    for first in range(0, len(chunks), LANES):
        for lane, at in zip(lanes, chunks[first : first + LANES], strict=False):
            start(lane, path, at)
        handle.wait()
    return sum(lanes[0].nbytes for _ in chunks)


def mixed(reads: Any, writes: Any, lanes: list[Any], path: str, chunks: list[int]) -> int:
    """Read the first half while writing the second, like an optimizer sweep."""
    half = len(chunks) // 2
    for source, target in zip(chunks[:half], chunks[half:], strict=False):
        reads.async_pread(lanes[0], path, source)
        writes.async_pwrite(lanes[1], path, target)
        reads.wait()
        writes.wait()
    return 2 * half * int(lanes[0].nbytes)


if __name__ == "__main__":
    serve(*(int(word) for word in sys.argv[1:4]))
