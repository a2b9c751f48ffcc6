"""Checksums of checkpoints: summed while writing, compared while reading."""

from __future__ import annotations

import itertools
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.checkpoint.checksums import RangeChecksums, checksum_file, combine, crc32c, to_hex
from penstock.checkpoint.errors import CheckpointError, ChecksumError, CorruptShardError
from penstock.checkpoint.manifest import check_small_files, find_manifest, read_checkpoint
from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.record_files import record_checkpoint
from penstock.checkpoint.writer import ShardWriter
from tests.checkpoint.saves import fill, save
from tests.support.safetensors_files import tensor_out

BYTES = random.Random(0).randbytes(5000)


def flip(path: Path, byte: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[byte] ^= 1 << bit
    path.write_bytes(raw)


def test_the_checksum_is_crc32c() -> None:
    assert to_hex(crc32c(b"123456789")) == "e3069283"  # the check value of its definition


@pytest.mark.parametrize("cut", [0, 1, 8, 4096, 4999, 5000])
def test_checksums_of_two_parts_are_combined(cut: int) -> None:
    first, second = crc32c(BYTES[:cut]), crc32c(BYTES[cut:])
    assert combine(first, second, len(BYTES) - cut) == crc32c(BYTES)


@pytest.mark.parametrize("seed", range(20))
def test_ranges_in_any_order_have_the_checksum_of_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    cuts = [0, *sorted(rng.sample(range(1, len(BYTES)), rng.randrange(7))), len(BYTES)]
    ranges = list(itertools.pairwise(cuts))
    rng.shuffle(ranges)
    sums = RangeChecksums(len(BYTES))
    results = [sums.add(low, high, crc32c(BYTES[low:high])) for low, high in ranges]

    assert results[-1] == crc32c(BYTES)
    assert set(results[:-1]) <= {None}


def test_ranges_that_overlap_are_never_taken_for_the_whole() -> None:
    sums = RangeChecksums(100)
    assert sums.add(0, 60, 1) is None
    assert sums.add(40, 100, 2) is None
    assert sums.add(0, 40, 3) is None  # would complete the last range if that was still known


def test_the_manifest_has_the_checksums_of_the_bytes_on_disk(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    outs = [tensor_out("a", torch.arange(1000), 64), tensor_out("b", torch.ones(3, 0), 64)]
    written = ShardWriter(outs, stem="other").write(tmp_path)
    names = [name for name in os.listdir(tmp_path) if name != "complete.json"]
    record_checkpoint(tmp_path, names, step=1, run_id="")
    manifest = find_manifest(tmp_path)

    assert manifest is not None
    assert set(manifest.files) == set(names)
    for name, record in manifest.files.items():
        assert record.crc32c == to_hex(checksum_file(tmp_path / name))
        assert record.nbytes == (tmp_path / name).stat().st_size
    assert manifest.files["other.safetensors"] == written["other.safetensors"]


def read_all(folder: Path, stem: str, order: list[int], step: int = 7) -> None:
    """Read every tensor in ranges of `step` elements."""
    with ShardReader(folder, stem) as reader, ThreadPoolExecutor(3) as pool:
        reads = []
        for name in reader.names:
            dtype, shape = reader.spec(name)
            for low in [order[i % len(order)] * step for i in range(len(order))]:
                count = max(0, min(step, shape[0] - low))
                out = torch.empty(count, dtype=dtype)
                reads.append(pool.submit(reader.read_into, name, out, min(low, shape[0])))
        for done in reads:
            done.result()


@pytest.mark.parametrize("stem", ["model", "optimizer"])
def test_any_flipped_bit_of_a_shard_is_found_and_named(tmp_path: Path, stem: str) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "checkpoint-000001"
    rng = random.Random(stem)
    read_all(folder, stem, list(range(10)))
    shards = sorted(folder.glob(f"{stem}-*.safetensors"))
    for _ in range(100):
        shard = rng.choice(shards)
        byte, bit = rng.randrange(shard.stat().st_size), rng.randrange(8)
        flip(shard, byte, bit)
        with pytest.raises((ChecksumError, CorruptShardError), match=shard.name):
            read_all(folder, stem, rng.sample(range(10), 10))
        flip(shard, byte, bit)
    read_all(folder, stem, list(range(10)))


def test_a_part_of_a_tensor_is_checked_when_the_reader_is_left(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "checkpoint-000001"
    shard = next(folder.glob("model-00001*"))
    flip(shard, shard.stat().st_size - 1)
    reader = ShardReader(folder)
    name = next(n for n in reversed(reader.names) if reader.file_of(n) == str(shard))
    out = torch.zeros(4)
    reader.read_into(name, out)
    reader.read_into(name, out, 2)  # overlaps what was read before
    with pytest.raises(ChecksumError) as caught, reader:
        pass

    assert caught.value.tensor == name
    assert caught.value.path == str(shard)


def test_an_error_in_the_block_is_not_replaced_by_a_damaged_tensor(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "checkpoint-000001"
    shard = next(folder.glob("model-00001*"))
    flip(shard, shard.stat().st_size - 1)
    reader = ShardReader(folder)
    reader.read_into(reader.names[-1], torch.zeros(4))
    own = KeyError("own")
    with pytest.raises(KeyError, match="own"), reader:
        raise own


def test_the_message_says_what_happened_and_names_the_older_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3, keep_resumable=2)
    folder = tmp_path / "checkpoint-000003"
    shard = next(folder.glob("optimizer-00001*"))
    flip(shard, shard.stat().st_size - 1)
    with pytest.raises(ChecksumError) as caught:
        read_all(folder, "optimizer", list(range(10)))

    text = str(caught.value)
    assert "tensor optimizer." in text
    assert "the disk returned different bytes than were written" in text
    assert f"the older {tmp_path / 'checkpoint-000002'}" in text
    assert f"penstock check {folder}" in text
    # Only the weights of step 1 are left, so that it is no replacement for optimizer states.
    flip(shard.parent.with_name("checkpoint-000002") / "complete.json", 20)
    with pytest.raises(ChecksumError, match="use another copy"):
        read_all(folder, "optimizer", list(range(10)))


def test_a_flipped_bit_of_a_small_file_is_found(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "checkpoint-000001"
    check_small_files(folder)
    small = [p for p in folder.iterdir() if p.suffix == ".json" and p.name != "complete.json"]
    assert len(small) == 4
    for path in small:
        flip(path, 0, 5)
        with pytest.raises(ChecksumError, match=path.name):
            check_small_files(folder)
        flip(path, 0, 5)
    check_small_files(folder)


def test_no_flipped_bit_of_the_manifest_goes_unnoticed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "checkpoint-000001"
    before = read_checkpoint(folder).manifest
    rng = random.Random(0)
    found = 0
    for _ in range(300):
        byte, bit = rng.randrange((folder / "complete.json").stat().st_size), rng.randrange(8)
        flip(folder / "complete.json", byte, bit)
        try:
            # White space may change without a change of the content.
            assert read_checkpoint(folder).manifest == before
        except CheckpointError:
            found += 1
        flip(folder / "complete.json", byte, bit)
    assert found > 290


def test_weights_that_the_manifest_does_not_list_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "checkpoint-000001"
    # A single file takes precedence over an index.
    ShardWriter([tensor_out("model.0", torch.ones(64), 64)]).write(folder)
    with pytest.raises(CorruptShardError, match="is not in the list of files"):
        ShardReader(folder)


def test_files_swapped_between_checkpoints_are_found(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, keep_resumable=2)
    one, two = (tmp_path / f"checkpoint-00000{step}" for step in (1, 2))
    name = next(one.glob("model-00001*")).name
    os.replace(one / name, two / name)
    with pytest.raises(ChecksumError, match=name):
        read_all(two, "model", list(range(10)))


def test_a_checkpoint_without_checksums_is_read_as_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "checkpoint-000001"
    sizes = dict(read_checkpoint(folder).files)
    old = {"version": 1, "step": 1, "files": sizes}
    (folder / "complete.json").write_text(json.dumps(old))

    assert read_checkpoint(folder).files == sizes
    check_small_files(folder)
    read_all(folder, "model", list(range(10)))
