"""Large tensors are read past the page cache, with the same answers."""

from __future__ import annotations

import fcntl
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.checkpoint import reader as module
from penstock.checkpoint.errors import CheckpointReadError, TruncatedShardError
from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.writer import ShardWriter
from tests.support.safetensors_files import same_bits, tensor_out

COUNT = 100_003
PIECE = 1 << 16


@pytest.fixture
def tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """On disk, and reads small enough for there to be many."""
    monkeypatch.setattr(module, "_DIRECT", PIECE)
    monkeypatch.setattr(module, "_scratch", threading.local())
    made = {f"t{i}": torch.arange(i, i + COUNT, dtype=torch.int32) for i in range(3)}
    ShardWriter([tensor_out(name, tensor) for name, tensor in made.items()]).write(tmp_path)
    return made


def part(reader: ShardReader, name: str, low: int, high: int) -> torch.Tensor:
    out = torch.full((high - low,), -1, dtype=torch.int32)
    reader.read_into(name, out, low)
    return out


def test_any_part_by_any_thread(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    drawn = random.Random(0)
    wanted = [("t0", 0, COUNT), ("t2", COUNT - 4096, COUNT), ("t1", 1, COUNT)]
    for _ in range(60):
        low = drawn.randrange(COUNT)
        wanted.append((f"t{drawn.randrange(3)}", low, drawn.randrange(low, COUNT) + 1))
    with ShardReader(tmp_path) as reader, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: part(reader, *each), wanted))
    for (name, low, high), values in zip(wanted, found, strict=True):
        assert same_bits(values, tensors[name][low:high]), (name, low, high)


def test_no_page_stays_in_the_page_cache_where_the_file_system_can(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ShardReader(tmp_path) as reader:
        if next(iter(reader._tensors.values()))[0].direct is None:
            pytest.skip("this file system knows no O_DIRECT")
        monkeypatch.setattr(module, "_read", None)  # the other way is not taken
        assert same_bits(part(reader, "t1", 0, COUNT), tensors["t1"])


def test_short_answers_are_continued(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.preadv
    with ShardReader(tmp_path) as reader:
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:4096]], at))
        assert same_bits(part(reader, "t2", 3, COUNT), tensors["t2"][3:])


def test_a_file_system_that_refuses_only_the_read_goes_through_the_page_cache(
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
def test_a_file_that_shrinks_and_a_disk_that_fails_are_told(
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


def test_without_it_the_page_cache_will_do(
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
