"""Direct reads of large tensors return the same bytes as buffered ones."""

from __future__ import annotations

import fcntl
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.checkpoint import reader as reader_module
from penstock.checkpoint.errors import CheckpointReadError, TruncatedShardError
from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.writer import ShardWriter
from tests.support.safetensors_files import same_bits, tensor_out

COUNT = 100_003
PIECE = 1 << 16


@pytest.fixture
def tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Three tensors on disk, with direct reads small enough that each needs many."""
    monkeypatch.setattr(reader_module, "_DIRECT_NBYTES", PIECE)
    monkeypatch.setattr(reader_module, "_thread", threading.local())
    tensors = {f"t{i}": torch.arange(i, i + COUNT, dtype=torch.int32) for i in range(3)}
    ShardWriter([tensor_out(name, tensor) for name, tensor in tensors.items()]).write(tmp_path)
    return tensors


@pytest.fixture(autouse=True)
def nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the disk: the files of these tests were just written."""
    monkeypatch.setattr(reader_module, "_read_cached", lambda *_: 0)


def part(reader: ShardReader, name: str, low: int, high: int) -> torch.Tensor:
    out = torch.full((high - low,), -1, dtype=torch.int32)
    reader.read_into(name, out, low)
    return out


def test_any_part_is_read_by_any_thread(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    rng = random.Random(0)
    wanted = [("t0", 0, COUNT), ("t2", COUNT - 4096, COUNT), ("t1", 1, COUNT)]
    for _ in range(60):
        low = rng.randrange(COUNT)
        wanted.append((f"t{rng.randrange(3)}", low, rng.randrange(low, COUNT) + 1))
    with ShardReader(tmp_path) as reader, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: part(reader, *each), wanted))
    for (name, low, high), values in zip(wanted, found, strict=True):
        assert same_bits(values, tensors[name][low:high]), (name, low, high)


def test_large_reads_do_not_use_the_page_cache(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ShardReader(tmp_path) as reader:
        if next(iter(reader._tensors.values()))[0].direct_fd is None:
            pytest.skip("this file system has no O_DIRECT")
        monkeypatch.setattr(reader_module, "_read", None)  # a buffered read would fail
        assert same_bits(part(reader, "t1", 0, COUNT), tensors["t1"])


def test_short_reads_are_continued(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.preadv
    with ShardReader(tmp_path) as reader:
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:4096]], at))
        assert same_bits(part(reader, "t2", 3, COUNT), tensors["t2"][3:])


def test_a_refused_direct_read_falls_back_to_the_page_cache(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.preadv

    def refusing(fd: int, views: list[memoryview], at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return whole(fd, views, at)

    monkeypatch.setattr(os, "preadv", refusing)
    with ShardReader(tmp_path) as reader:
        assert same_bits(part(reader, "t1", 5, COUNT), tensors["t1"][5:])


@pytest.mark.usefixtures("tensors")
def test_truncation_and_read_errors_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with ShardReader(tmp_path) as reader:
        os.truncate(tmp_path / "model.safetensors", 5000)
        with pytest.raises(TruncatedShardError, match="t1"):
            part(reader, "t1", 0, COUNT)
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(CheckpointReadError, match=r"tensor t0: .*Input/output error"):
            part(reader, "t0", 0, COUNT)


def test_a_refused_direct_open_falls_back_to_the_page_cache(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refusing(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    with ShardReader(tmp_path) as reader:
        assert same_bits(part(reader, "t0", 0, COUNT), tensors["t0"])
