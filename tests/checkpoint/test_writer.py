"""Written shards are read back bit for bit, by Penstock and by the safetensors library."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from penstock.checkpoint.errors import CheckpointWriteError
from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.safetensors_header import DTYPES, parse_header
from penstock.checkpoint.writer import ShardWriter, TensorOut
from penstock.storage import direct_file
from tests.support.safetensors_files import random_tensor, read, same_bits, tensor_out

NAMES = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda s: s != "__metadata__")
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@given(
    specs=st.dictionaries(
        NAMES, st.tuples(st.sampled_from(list(DTYPES.values())), SHAPES), max_size=8
    ),
    part=st.integers(1, 300),
    limit=st.integers(1, 2000),
    at=st.floats(0, 1),
)
@settings(max_examples=150, deadline=None)
def test_tensors_are_read_back_bit_for_bit(
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]], part: int, limit: int, at: float
) -> None:
    tensors = {n: random_tensor(d, s, seed) for seed, (n, (d, s)) in enumerate(specs.items())}
    writer = ShardWriter(
        [tensor_out(name, t, part) for name, t in tensors.items()], max_shard_nbytes=limit
    )
    with tempfile.TemporaryDirectory() as folder:
        writer.write(folder)

        assert sum(entry.stat().st_size for entry in os.scandir(folder)) == writer.nbytes
        assert sorted(os.listdir(folder)) == sorted(writer.names)
        with ShardReader(folder) as reader:
            assert set(reader.names) == set(tensors)
            for name, tensor in tensors.items():
                assert reader.spec(name) == (tensor.dtype, tuple(tensor.shape))
                assert same_bits(read(reader, name), tensor)
                start = int(at * tensor.numel())
                rest = torch.empty(tensor.numel() - start, dtype=tensor.dtype)
                reader.read_into(name, rest, start)
                assert same_bits(rest, tensor.reshape(-1)[start:])


@given(
    dtypes=st.lists(st.sampled_from(list(DTYPES.values())), min_size=1, max_size=6),
    limit=st.integers(1, 200),
)
@settings(max_examples=50, deadline=None)
def test_the_safetensors_library_reads_the_files(dtypes: list[torch.dtype], limit: int) -> None:
    tensors = {f"t{i}": random_tensor(d, (3, i), i) for i, d in enumerate(dtypes)}
    writer = ShardWriter([tensor_out(n, t) for n, t in tensors.items()], max_shard_nbytes=limit)
    with tempfile.TemporaryDirectory() as folder:
        writer.write(folder)

        seen = {}
        for name in writer.names:
            if name.endswith(".safetensors"):
                with safe_open(Path(folder, name), "pt") as file:
                    assert file.metadata() == {"format": "pt"}
                    seen.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    assert set(seen) == set(tensors)
    for name, tensor in tensors.items():
        assert same_bits(seen[name], tensor)


def four(**more: object) -> ShardWriter:
    tensors = [tensor_out(f"t{i}", torch.full((10,), i, dtype=torch.float32)) for i in range(4)]
    return ShardWriter(tensors, **more)  # type: ignore[arg-type]


def test_one_shard_has_a_plain_name_and_no_index(tmp_path: Path) -> None:
    four().write(tmp_path)
    four(stem="optimizer").write(tmp_path)

    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "optimizer.safetensors"]


def test_several_shards_have_the_names_and_index_of_transformers(tmp_path: Path) -> None:
    four(max_shard_nbytes=80).write(tmp_path)

    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(os.listdir(tmp_path)) == [*shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 160}
    assert index["weight_map"] == {f"t{i}": shards[i // 2] for i in range(4)}


def test_a_tensor_above_the_limit_gets_its_own_shard() -> None:
    assert len(four(max_shard_nbytes=1).names) == 5


def test_private_shards_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        four().write(tmp_path)
        four(stem="optimizer", private=True, max_shard_nbytes=80).write(tmp_path)
    finally:
        os.umask(before)

    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(tmp_path)}
    assert modes.pop("model.safetensors") == 0o640
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    writer = four(max_shard_nbytes=80)
    writer.write(tmp_path, progress=lambda *now: seen.append(now))

    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][:2] == (writer.nbytes, writer.nbytes)
    assert {what for _, _, what in seen} == {"", "t0", "t1", "t2", "t3"}


@pytest.mark.parametrize("size", [8, 3_000_001, direct_file.BUFFER_NBYTES])
def test_all_parts_may_share_one_buffer(tmp_path: Path, size: int) -> None:
    """Each part is copied before the next one is requested."""
    part = torch.empty(size, dtype=torch.uint8)

    def parts() -> Iterator[torch.Tensor]:
        for i in range(7):
            yield part.fill_(i)

    shape = (7, size)
    ShardWriter([TensorOut(name="t", dtype=torch.uint8, shape=shape, parts=parts)]).write(tmp_path)

    with ShardReader(tmp_path) as reader:
        assert torch.equal(read(reader, "t"), torch.arange(7).expand(size, 7).T.to(torch.uint8))


@pytest.mark.parametrize("had", [0, 39, 41, 80])
def test_parts_of_the_wrong_size_fail_an_assertion_and_leave_no_file(
    tmp_path: Path, had: int
) -> None:
    good = tensor_out("good", torch.zeros(10))
    bad = TensorOut(
        name="layers.3.up",
        dtype=torch.float32,
        shape=(10,),
        parts=lambda: iter(torch.zeros(had, dtype=torch.uint8).split(16)),
    )
    with pytest.raises(AssertionError, match=r"^layers\.3\.up: parts have"):
        ShardWriter([good, bad], max_shard_nbytes=40).write(tmp_path)

    assert os.listdir(tmp_path) == []


def test_parts_must_be_contiguous_cpu_tensors(tmp_path: Path) -> None:
    for part, problem in (
        (torch.zeros(4, 4).t()[:2], "not contiguous"),
        (torch.zeros(8, device="meta"), "on meta"),
    ):
        out = TensorOut(name="t", dtype=torch.float32, shape=(8,), parts=lambda p=part: iter([p]))  # type: ignore[misc]
        with pytest.raises(AssertionError, match=problem):
            ShardWriter([out]).write(tmp_path)


def test_duplicate_and_reserved_names_fail_an_assertion() -> None:
    tensor = tensor_out("t", torch.zeros(1))
    with pytest.raises(AssertionError, match="two tensors"):
        ShardWriter([tensor, tensor])
    with pytest.raises(AssertionError, match="__metadata__"):
        ShardWriter([tensor_out("__metadata__", torch.zeros(1))])


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    old = tmp_path / "model-00002-of-00002.safetensors"
    old.write_text("precious")
    with pytest.raises(CheckpointWriteError, match="File exists") as caught:
        four(max_shard_nbytes=80).write(tmp_path)

    assert caught.value.path == str(old)
    assert old.read_text() == "precious"
    assert os.listdir(tmp_path) == [old.name]


def test_every_tensor_starts_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    outs = [tensor_out(f"t{i}", random_tensor(d, (3,))) for i, d in enumerate(DTYPES.values())]
    outs.reverse()  # bytes before words
    ShardWriter(outs).write(tmp_path)

    block = (tmp_path / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(block[:8], "little")
    assert start % 8 == 0
    for name, entry in parse_header(block[8:start], len(block) - start, "f").items():
        assert entry.start % entry.dtype.itemsize == 0, name


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:7], at))
    four().write(tmp_path)

    with ShardReader(tmp_path) as reader:
        for i in range(4):
            assert same_bits(read(reader, f"t{i}"), torch.full((10,), i, dtype=torch.float32))


def test_a_refused_direct_write_falls_back_to_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, refused = os.pwrite, threading.Barrier(3, timeout=5)

    def refusing(fd: int, data: memoryview, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            with contextlib.suppress(threading.BrokenBarrierError):
                refused.wait()  # several threads find out at the same time
            raise OSError(22, "Invalid argument")
        return whole(fd, data, at)

    monkeypatch.setattr(os, "pwrite", refusing)
    tensor = torch.arange(direct_file.BUFFER_NBYTES, dtype=torch.int32)  # fills four buffers
    ShardWriter([tensor_out("t", tensor)]).write(tmp_path)

    with ShardReader(tmp_path) as reader:
        assert torch.equal(read(reader, "t"), tensor)


def test_requests_may_finish_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, rng = os.pwrite, random.Random(5)

    def late(fd: int, data: memoryview, at: int) -> int:
        time.sleep(rng.random() / 50)
        return whole(fd, data, at)

    monkeypatch.setattr(os, "pwrite", late)
    size = 3 * direct_file.REQUESTS * direct_file.BUFFER_NBYTES // 4 + 1001
    tensor = torch.arange(size, dtype=torch.int32)
    ShardWriter([tensor_out("t", tensor)]).write(tmp_path)

    with ShardReader(tmp_path) as reader:
        assert torch.equal(read(reader, "t"), tensor)


def test_preallocated_space_that_is_not_needed_is_released(tmp_path: Path) -> None:
    size = direct_file.BUFFER_NBYTES // 4 * 3
    ShardWriter([tensor_out("t", torch.zeros(size, dtype=torch.int32))]).write(tmp_path)

    found = os.stat(tmp_path / "model.safetensors")
    assert 4 * size < found.st_size < 4 * size + 4096
    assert found.st_blocks * 512 <= direct_file.BUFFER_NBYTES * 4


def test_a_failed_request_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite

    def failing(fd: int, data: memoryview, at: int) -> int:
        if at == 2 * direct_file.BUFFER_NBYTES:
            raise OSError(5, "Input/output error")
        return whole(fd, data, at)

    monkeypatch.setattr(os, "pwrite", failing)
    monkeypatch.setattr("penstock.io_retries.sleep", lambda seconds: None)
    tensor = torch.zeros(
        4 * direct_file.REQUESTS * direct_file.BUFFER_NBYTES // 4, dtype=torch.int32
    )
    with pytest.raises(CheckpointWriteError, match="Input/output error"):
        ShardWriter([tensor_out("t", tensor)]).write(tmp_path)

    assert os.listdir(tmp_path) == []


def test_ranks_write_their_shards_at_the_same_time(tmp_path: Path) -> None:
    """They request parts of one shard each in turn, and give the bytes of one rank."""
    sizes = {"a": 10, "b": 15, "c": 15}
    tensors = {name: random_tensor(torch.float32, (n,), n) for name, n in sizes.items()}

    def written(rank: int, world: int, requested: list[str]) -> dict[str, bytes]:
        def noted(name: str) -> TensorOut:
            whole = tensor_out(name, tensors[name], 20)

            def parts() -> Iterator[torch.Tensor]:
                for part in whole.parts():
                    requested.append(name)
                    yield part

            return TensorOut(name=name, dtype=whole.dtype, shape=whole.shape, parts=parts)

        folder = tmp_path / f"{rank} of {world}"
        folder.mkdir()
        writer = ShardWriter([noted(name) for name in tensors], max_shard_nbytes=1)
        records = writer.write(folder, rank=rank, world=world)
        assert sorted(records) == sorted(os.listdir(folder))
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    orders: list[list[str]] = [[], [], []]
    one = written(0, 1, orders[0])
    both = written(0, 2, orders[1]) | written(1, 2, orders[2])

    assert both == one
    assert "".join(orders[0]) == "aabbbccc"
    assert "".join(orders[1]) == "".join(orders[2]) == "ababbccc"
