"""Invalid files are refused with their name, the reason and advice; valid ones are read."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.checkpoint.errors import (
    CheckpointError,
    CheckpointReadError,
    CorruptIndexError,
    CorruptShardError,
    MissingShardError,
    NoWeightsError,
    PickledWeightsError,
    TensorMismatchError,
    TensorNotFoundError,
    TruncatedShardError,
)
from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.safetensors_header import MAX_HEADER_NBYTES
from penstock.checkpoint.writer import ShardWriter
from tests.support.safetensors_files import file_of, read, same_bits, tensor, tensor_out, write_file

FOUR = bytes(4)
TWICE = b'{"a": %s, "a": %s}' % ((json.dumps(tensor()).encode(),) * 2)


def sharded(folder: Path, count: int = 3) -> dict[str, torch.Tensor]:
    tensors = {f"t{i}": torch.arange(i, i + 100, dtype=torch.int32) for i in range(count)}
    ShardWriter([tensor_out(n, t) for n, t in tensors.items()], max_shard_nbytes=400).write(folder)
    return tensors


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (b"", "should have 8 B .* and has 0 B"),
        (b"\x08\0\0\0\0\0\0", "should have 8 B .* and has 7 B"),
        (struct.pack("<Q", 50) + b"{}", "should have 58 B .* and has 10 B"),
        (struct.pack("<Q", MAX_HEADER_NBYTES + 1) + b"{}", "not a safetensors file: its header"),
        (b"\xff" * 16, "not a safetensors file: its header would have 18446744073709551615 B"),
        (file_of(b""), "must start with {, but starts with b''"),
        (file_of(b" {}"), "must start with {"),
        (file_of(b"[]"), "must start with {"),
        (file_of(b'{"a": '), "line 1, column 7: is not JSON"),
        (file_of(b'{"\xff": 1}'), "its header is not JSON: .*utf-8"),
        (file_of(b"{" + b'"a":{' * 100_000), "nested too deeply"),
        (file_of({"a": tensor(shape=[[[]]] * 2)}, FOUR), "shape must be a list of non-neg"),
        (file_of(TWICE, FOUR), "a: is given twice"),
        (file_of({"__metadata__": {"format": 1}}), "__metadata__ must be an object of strings"),
        (file_of({"__metadata__": "pt"}), "__metadata__ must be an object of strings"),
        (file_of({"a": 1}), "tensor a: must have dtype, shape and data_offsets"),
        (file_of({"": 1}), r"tensor \(unnamed\): must have dtype"),
        (file_of({"a": {}}), "tensor a: its dtype must be one of F64, .*, got None"),
        (file_of({"a": tensor("F4", [8])}, FOUR), "got 'F4'"),
        (file_of({"a": tensor(shape=None)}, FOUR), "shape must be .*, got None"),
        (file_of({"a": tensor(shape=[-4])}, FOUR), r"got \[-4\]"),
        (file_of({"a": tensor(shape=[4.0])}, FOUR), r"got \[4.0\]"),
        (file_of({"a": tensor(shape=[True, 4])}, FOUR), r"got \[True, 4\]"),
        (file_of({"a": tensor(offsets=[0])}, FOUR), r"must be \[start, stop\], got \[0\]"),
        (file_of({"a": tensor(offsets=[-4, 0])}, FOUR), r"got \[-4, 0\]"),
        (file_of({"a": tensor(offsets=[4, 0])}, FOUR), r"got \[4, 0\]"),
        (file_of({"a": tensor(shape=[5])}, FOUR), r"U8 of shape \[5\] needs 5 B, .* span 4 B"),
        (file_of({"a": tensor(shape=[2**62, 4])}, FOUR), "is too large"),
        (file_of({"a": tensor(shape=[0, 2**63], offsets=[0, 0])}), "is too large"),
        (file_of({"a": tensor(), "b": tensor()}, FOUR), "tensor b: starts at 0, which overlaps"),
        (file_of({"a": tensor(offsets=[4, 8])}, bytes(8)), "leaves a gap"),
        (file_of({"a": tensor()}, bytes(3)), r"tensor a: the file should have \d+ B"),
        (file_of({"a": tensor()}, bytes(5)), "1 B after the last tensor belong to no tensor"),
        (file_of(b'{"\\ud800": 1}'), "the name '.ud800' is not valid Unicode"),
    ],
)
def test_an_invalid_file_is_refused_with_its_name_and_the_reason(
    tmp_path: Path, block: bytes, message: str
) -> None:
    path = write_file(tmp_path / "model.safetensors", block)
    with pytest.raises(CorruptShardError, match=message) as caught:
        ShardReader(tmp_path)

    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)
    assert "download or copy the file again" in str(caught.value)


def test_a_truncated_shard_is_found_before_anything_is_read(tmp_path: Path) -> None:
    sharded(tmp_path)
    last = tmp_path / "model-00003-of-00003.safetensors"
    whole = last.stat().st_size
    os.truncate(last, whole - 1)
    with pytest.raises(TruncatedShardError, match=r"tensor t2: .* interrupted") as caught:
        ShardReader(tmp_path)

    assert (caught.value.wanted, caught.value.had) == (whole, whole - 1)


def test_a_shard_that_shrinks_while_it_is_read_raises_an_error(tmp_path: Path) -> None:
    sharded(tmp_path)
    with ShardReader(tmp_path) as reader:
        os.truncate(tmp_path / "model-00001-of-00003.safetensors", 200)
        with pytest.raises(TruncatedShardError, match="t0"):
            read(reader, "t0")


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    for number in (1, 3):
        os.unlink(tmp_path / f"model-0000{number}-of-00003.safetensors")
    with pytest.raises(MissingShardError, match="3 files, and 2 of them are missing") as caught:
        ShardReader(tmp_path)

    assert caught.value.missing == tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 3))


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    os.unlink(tmp_path / "model.safetensors.index.json")
    with pytest.raises(NoWeightsError, match=r"but no model\.safetensors\.index\.json"):
        ShardReader(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[]", "must have a weight_map"),
        ('{"weight_map": []}', "must have a weight_map"),
        ('{"weight_map": {}}', "must have a weight_map"),
        ('{"weight_map": {"a": 1}}', "must name files in the same directory, got '1'"),
        ('{"weight_map": {"a": ""}}', "must name files in the same directory"),
        ('{"weight_map": {"a": ".."}}', "must name files in the same directory"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "must name files in the same directory"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "must name files in the same directory"),
        ('{"weight_map": {"a": "x\\u0000"}}', "must name files in the same directory"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "is given twice"),
    ],
)
def test_an_invalid_index_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptIndexError, match=message):
        ShardReader(tmp_path)


def test_a_file_name_that_is_too_long_counts_as_missing(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "x" * 5000}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MissingShardError):
        ShardReader(tmp_path)


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = index["weight_map"]["t1"]
    path.write_text(json.dumps(index))
    with pytest.raises(CorruptShardError, match="tensor ghost: the index says that it is") as found:
        ShardReader(tmp_path)

    assert found.value.path.endswith("model-00002-of-00003.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "w.pth"])
def test_pickled_weights_are_refused_with_a_command_that_converts_them(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(PickledWeightsError, match=r"only safetensors.*save_pretrained"):
            ShardReader(path)


def test_a_directory_without_weights_is_refused_with_the_expected_names(tmp_path: Path) -> None:
    with pytest.raises(NoWeightsError, match=r"neither model\.safetensors nor model\.safetensors"):
        ShardReader(tmp_path)
    with pytest.raises(NoWeightsError, match="no such file"):
        ShardReader(tmp_path / "nowhere")


def test_a_pipe_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CorruptShardError, match="is not a regular file"):
        ShardReader(tmp_path)


def test_a_missing_tensor_error_suggests_the_closest_name(tmp_path: Path) -> None:
    sharded(tmp_path)
    with ShardReader(tmp_path) as reader:
        with pytest.raises(TensorNotFoundError, match=r"no tensor t10; .* closest name is t1"):
            reader.spec("t10")
        with pytest.raises(TensorNotFoundError, match=r"it has 3 tensors\. "):
            reader.read_into("something else", torch.empty(1))


def test_reading_into_a_mismatched_tensor_changes_nothing(tmp_path: Path) -> None:
    sharded(tmp_path)
    out = torch.full((60,), 7, dtype=torch.int32)
    with ShardReader(tmp_path) as reader:
        with pytest.raises(TensorMismatchError, match="t0: expected F32, but the file has I32"):
            reader.read_into("t0", torch.zeros(100))
        for start in (-1, 41, 1 << 70):
            with pytest.raises(TensorMismatchError, match=r"elements .*, but the file has 100"):
                reader.read_into("t0", out, start)
        with pytest.raises(AssertionError, match="not contiguous"):
            reader.read_into("t0", torch.zeros(10, 10, dtype=torch.int32).t())

    assert bool((out == 7).all())


def test_every_error_is_a_checkpoint_error() -> None:
    for kind in (CorruptShardError, CorruptIndexError, NoWeightsError, MissingShardError,
                 PickledWeightsError, TensorNotFoundError, TensorMismatchError,
                 CheckpointReadError):  # fmt: skip
        assert issubclass(kind, CheckpointError)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = sharded(tmp_path)
    whole = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, at, *how: whole(fd, [views[0][:7]], at, *how)
    )
    with ShardReader(tmp_path) as reader:
        for name, tensor in tensors.items():
            assert same_bits(read(reader, name), tensor)


def test_a_read_error_names_the_file_and_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded(tmp_path)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with ShardReader(tmp_path) as reader:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(CheckpointReadError, match=r"tensor t1: .*Input/output error") as caught:
            read(reader, "t1")
    assert caught.value.errno == 5


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5), "a": torch.arange(7, dtype=torch.int8), "c": torch.ones(())}
    save_file(tensors, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        with ShardReader(path) as reader:
            assert set(reader.names) == {"a", "b", "c"}
            for name, tensor in tensors.items():
                assert same_bits(read(reader, name), tensor)


def test_a_single_file_is_preferred_to_an_index_unless_the_index_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with ShardReader(tmp_path) as reader:
        assert reader.names == ("other",)
    with ShardReader(tmp_path / "model.safetensors.index.json") as reader:
        assert reader.names == ("t0", "t1", "t2")


def test_closing_closes_every_file(tmp_path: Path) -> None:
    sharded(tmp_path)
    before = os.listdir("/proc/self/fd")
    with ShardReader(tmp_path) as reader:
        # Each file is open twice if it can also be read with O_DIRECT.
        assert len(os.listdir("/proc/self/fd")) - len(before) in (3, 6)
    os.truncate(tmp_path / "model-00003-of-00003.safetensors", 9)
    with pytest.raises(CorruptShardError):
        ShardReader(tmp_path)

    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(TensorNotFoundError):
        reader.spec("t0")
