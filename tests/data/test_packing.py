"""Packing loses and duplicates nothing, and batches resume exactly."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import Packed, TokenDataset
from penstock.data.encode import Encoded
from penstock.data.errors import CacheError, DataError, EmptyDataError, PositionError
from penstock.data.packing import WINDOW, best_fit
from penstock.data.shuffle import hash_values, shuffled_indices
from penstock.data.token_cache import Cache, Writer, empty_state
from penstock.data.tokenizer import Tokens
from tests.data.helpers import chat, dataset_of
from tests.support.small_tokenizers import small_tokenizer

VOCABULARY = 1000


def make_dataset(directory: Path, lengths: list[int], *, prompt: int = 0) -> TokenDataset:
    """Return documents of these lengths: number n counts up from 7 n after an untrained prompt."""
    writer = Writer(directory / "part", empty_state("key", VOCABULARY))
    documents = []
    for number, length in enumerate(lengths):
        ids = (np.arange(length) + 7 * number) % VOCABULARY
        trained = (np.arange(length) >= prompt).astype(np.uint8)
        documents.append(Encoded(ids.astype(np.int64), trained, True))
    writer.append(documents)
    state = writer.finish(directory / "whole")
    cache = Cache(directory / "whole", state, VOCABULARY)
    return TokenDataset(cache, Tokens(small_tokenizer()), np.arange(len(lengths)), part="all")


def documents_in(packed: Packed, **options: Any) -> list[tuple[list[int], list[int]]]:
    """Return every document of one epoch with its labels, separated by the position ids."""
    found = []
    for batch in packed.batches(3, **options):
        assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
        for ids, labels, positions in zip(*(rows.tolist() for rows in batch.values()), strict=True):
            starts = [at for at, position in enumerate(positions) if position == 0]
            assert starts[0] == 0
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                assert positions[start:end] == list(range(end - start))
                found.append((ids[start:end], labels[start:end]))
    return found


LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, context=st.integers(2, 40), seed=st.integers(0, 3), overlong=st.data())
def test_every_token_is_packed_once(
    lengths: list[int], context: int, seed: int, overlong: st.DataObject, tmp_path_factory: Any
) -> None:
    way = overlong.draw(st.sampled_from(["truncate", "drop", "split"]))
    dataset = make_dataset(tmp_path_factory.mktemp("packing"), lengths)
    expected = []
    for number in range(len(lengths)):
        ids = dataset[number].ids.tolist()
        pieces = [ids[at : at + context] for at in range(0, len(ids), context)]
        if way == "truncate" or (way == "drop" and len(ids) <= context):
            expected.append(pieces[0])
        elif way == "split":
            expected += [piece for piece in pieces if len(piece) > 1]
    if not expected:
        with pytest.raises(EmptyDataError):
            dataset.pack(context, overlong=way, seed=seed)
        return

    packed = dataset.pack(context, overlong=way, seed=seed)
    found = documents_in(packed, seed=seed)

    pad = Tokens(small_tokenizer()).pad
    padding = [ids for ids, labels in found if set(labels) == {-100}]
    real = [(ids, labels) for ids, labels in found if set(labels) != {-100}]
    assert sorted(ids for ids, _ in real) == sorted(expected)
    assert all(labels == [-100, *ids[1:]] for ids, labels in real)
    assert all(set(ids) == {pad} for ids in padding)
    counts = packed.counts
    assert counts.tokens == sum(map(len, expected))
    assert counts.targets == sum(len(piece) - 1 for piece in expected)
    assert counts.padding == sum(map(len, padding)) == counts.rows * context - counts.tokens
    long = sum(length > context for length in lengths)
    by_option = {"truncate": counts.truncated, "drop": counts.dropped, "split": counts.split}
    assert by_option == {kind: long if kind == way else 0 for kind in by_option}


@given(st.lists(st.integers(1, 100), max_size=200).map(lambda some: sorted(some, reverse=True)))
def test_best_fit_overfills_no_row_and_opens_no_unnecessary_row(lengths: list[int]) -> None:
    rows = best_fit(lengths, 100)

    filled = np.bincount(rows, lengths).tolist() if rows else []
    assert max(filled, default=0) <= 100
    assert all(a + b > 100 for a, b in pairwise(filled))
    assert set(rows) == set(range(len(filled)))


def test_short_documents_leave_little_padding(tmp_path: Path) -> None:
    lengths = (2 + shuffled_indices(400, 5) % 60).tolist()

    assert make_dataset(tmp_path, lengths).pack(128).counts.padding_share < 0.02


def test_documents_of_several_windows_are_all_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert WINDOW > 1000
    monkeypatch.setattr("penstock.data.packing.WINDOW", 7)
    packed = make_dataset(tmp_path, [5] * 50).pack(10)

    assert (packed.counts.rows, packed.counts.tokens) == (
        29,
        250,
    )  # 4 rows of 7 windows each, and 1
    assert len([labels for _, labels in documents_in(packed) if set(labels) != {-100}]) == 50


def test_truncated_documents_without_a_target_are_skipped(tmp_path: Path) -> None:
    packed = make_dataset(tmp_path, [30, 8], prompt=6).pack(6 + 1)
    assert (packed.counts.truncated, packed.counts.untrained, packed.counts.rows) == (2, 0, 2)

    with pytest.raises(EmptyDataError, match=r"2 are longer than the context of 5.*--overlong"):
        make_dataset(tmp_path / "again", [30, 8], prompt=6).pack(5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 1}, "leaves nothing to predict"),
        ({"overlong": "cut"}, "overlong must be one of"),
    ],
)
def test_invalid_packing_options_are_rejected(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        make_dataset(tmp_path, [5]).pack(**{"context": 8, **options})


@pytest.fixture
def packed(tmp_path: Path) -> Packed:
    return make_dataset(tmp_path, [5, 9, 3, 7, 8, 2, 6] * 9).pack(16, seed=3)


def rows_of(batches: Any) -> list[list[list[int]]]:
    return [batch["input_ids"].tolist() for batch in batches]


def test_an_epoch_contains_every_row_once(packed: Packed) -> None:
    rows = len(packed)
    batches = packed.batches(4, epochs=2)
    assert rows % 4
    assert len(batches) == batches.steps == 2 * packed.steps_per_epoch(4) == 2 * -(-rows // 4)

    seen = rows_of(batches)

    sizes = [len(batch) for batch in seen]
    assert sizes == [*[4] * (rows // 4), rows % 4] * 2
    flat = [row for batch in seen for row in batch]
    first, second = flat[:rows], flat[rows:]
    assert sorted(first) == sorted(second)
    assert first != second
    assert len(batches) == 0
    assert batches.epoch == 2


def test_the_order_depends_only_on_the_seed(packed: Packed) -> None:
    assert rows_of(packed.batches(4, seed=1)) == rows_of(packed.batches(4, seed=1))
    assert rows_of(packed.batches(4, seed=1)) != rows_of(packed.batches(4, seed=2))
    straight = [row for batch in rows_of(packed.batches(4, shuffle=False)) for row in batch]
    again = [row for batch in rows_of(packed.batches(3, shuffle=False)) for row in batch]
    assert straight == again


def test_a_resumed_run_gets_the_same_batches(packed: Packed) -> None:
    options: dict[str, Any] = {"steps": 17, "seed": 5}
    whole = rows_of(packed.batches(4, **options))
    for stop in range(18):
        batches = packed.batches(4, **options)
        before = [next(batches)["input_ids"].tolist() for _ in range(stop)]
        position = json.loads(json.dumps(batches.position))

        rest = packed.batches(4, position=position, **options)

        assert len(rest) == 17 - stop
        assert before + rows_of(rest) == whole


def test_a_position_of_other_data_is_rejected(packed: Packed, tmp_path: Path) -> None:
    position = packed.batches(4).position
    other = make_dataset(tmp_path / "other", [5, 9]).pack(16, seed=3)

    with pytest.raises(PositionError, match="saved data position is for data") as caught:
        other.batches(4, position=position)
    assert caught.value.field == "data"
    with pytest.raises(PositionError, match="for seed 0, but this run has 1"):
        packed.batches(4, seed=1, position=position)
    with pytest.raises(PositionError, match="for row -1"):
        packed.batches(4, position={**position, "row": -1})


def test_the_same_text_in_another_file_is_the_same_data(tmp_path: Path) -> None:
    records = [chat(f"What is {n}?", f"It is {n}.") for n in range(20)]
    positions = []
    for position in ("here", "there"):
        (tmp_path / position).mkdir()
        batches = dataset_of(tmp_path / position, records).pack(64).batches(2)
        next(batches)
        positions.append(batches.position)

    assert positions[0] == positions[1]


@pytest.mark.parametrize("options", [{"batch": 0}, {"steps": 0}, {"epochs": 1, "steps": 1}])
def test_invalid_batch_options_are_rejected(options: dict[str, Any], packed: Packed) -> None:
    with pytest.raises(DataError):
        packed.batches(**{"batch": 2, **options})


@pytest.mark.parametrize("token", [1000, 65535])
def test_a_token_beyond_the_vocabulary_means_a_damaged_cache(token: int, tmp_path: Path) -> None:
    packed = make_dataset(tmp_path, [5, 6]).pack(16)
    with (tmp_path / "whole" / "tokens.bin").open("r+b") as file:
        file.write(token.to_bytes(2, "little"))

    with pytest.raises(CacheError, match=f"token {token}, beyond the vocabulary of 1000"):
        next(packed.batches(2))


def test_a_split_keeps_equal_documents_together(tmp_path: Path) -> None:
    texts = [f"text {n % 150}" for n in range(300)]  # each text twice
    dataset = dataset_of(tmp_path, [{"text": text} for text in texts])

    train, held = dataset.split(0.1, seed=1)

    sides = [{bytes(side[n].ids) for n in range(len(side))} for side in (train, held)]
    assert len(held) == 30
    assert len(train) == 270
    assert not sides[0] & sides[1]
    assert train.tokens + held.tokens == dataset.tokens
    assert train.targets + held.targets == dataset.targets
    _, again = dataset.split(0.1, seed=1)
    _, other = dataset.split(0.1, seed=2)
    assert {bytes(again[n].ids) for n in range(len(again))} == sides[1]
    assert {bytes(other[n].ids) for n in range(len(other))} != sides[1]


def test_a_split_holds_out_at_least_one_document_but_never_all(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [{"text": "a b"}, {"text": "c d"}])
    assert [len(side) for side in dataset.split(0.001)] == [1, 1]

    with pytest.raises(EmptyDataError, match=r"too few .*\(2 in all\).* form feeds .*--eval-data"):
        dataset.split(0.9)
    with pytest.raises(DataError, match="between 0 and 1"):
        dataset.split(1.5)


def test_the_random_order_never_changes() -> None:
    """A saved position depends on this order. numpy's may change, but this one must not."""
    assert hash_values(np.array([0], np.uint64)).tolist() == [
        0xE220A8397B1DCDAF
    ]  # first value of splitmix64
    assert shuffled_indices(8, 0, 0).tolist() == [4, 0, 1, 7, 6, 2, 5, 3]
    assert sorted(shuffled_indices(1000, 7).tolist()) == list(range(1000))


def test_one_document_per_row(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [5, 9, 3, 30])

    packed = dataset.pack(16, overlong="truncate", one_per_row=True)
    rows = next(packed.batches(4))["position_ids"].tolist()

    assert packed.counts.rows == 4
    # Where padding begins: a row has its document, and padding as the second one.
    assert sorted(row.index(0, 1) if 0 in row[1:] else 16 for row in rows) == [3, 5, 9, 16]
    with pytest.raises(PositionError):
        packed.batches(4, position=dataset.pack(16).batches(4).position)


def test_the_rows_of_a_seed_never_change(tmp_path: Path) -> None:
    """A resumed run of an earlier version continues with the same batches and the same split."""
    dataset = make_dataset(tmp_path, [2, 3, 4, 5, 6, 7, 8, 9])

    def firsts(packed: Packed, **options: Any) -> list[int]:
        return [row[0] // 7 for batch in rows_of(packed.batches(2, **options)) for row in batch]

    packed = dataset.pack(10, one_per_row=True)
    assert firsts(packed, shuffle=False) == shuffled_indices(8, 0).tolist()
    straight = firsts(packed, shuffle=False)
    for epoch in (0, 1):
        expected = [straight[n] for n in shuffled_indices(8, 5, epoch, 2)]
        assert firsts(packed, seed=5, steps=8)[8 * epoch : 8 * epoch + 8] == expected
    assert firsts(packed) == firsts(packed, seed=0, epochs=1, shuffle=True)


def test_a_split_and_weights_of_a_seed_never_change(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [{"text": f"text {n}"} for n in range(20)])
    texts = [dataset.decode(dataset[n].ids) for n in range(20)]

    def numbers(part: Any) -> list[int]:
        return [texts.index(part.decode(part[n].ids)) for n in range(len(part))]

    hashes = dataset._cache.documents[:, 2].astype(np.uint64)
    order = np.argsort(hash_values(hashes, 4, 1)).tolist()
    train, held = dataset.split(0.25, seed=4)
    assert numbers(held) == sorted(order[:5])
    assert numbers(train) == sorted(order[5:])
    assert numbers(dataset.split(0.25)[1]) == numbers(dataset.split(0.25, seed=0)[1])
    half = shuffled_indices(20, 9, 3).tolist()[:10]
    assert numbers(dataset.weighted([2.5], seed=9)) == [*range(20), *range(20), *half]
    assert numbers(dataset.weighted([0.5])) == numbers(dataset.weighted([0.5], seed=0))
    for bad in ([float("inf")], [-0.5], [1.0, 1.0], []):
        with pytest.raises(DataError, match="must be 1 numbers from 0 to"):
            dataset.weighted(bad)


@pytest.mark.parametrize("prompt", [0, 3])
def test_documents_without_a_prompt_are_split_by_default_and_others_truncated(
    prompt: int, tmp_path: Path
) -> None:
    dataset = make_dataset(tmp_path, [5, 30, 11], prompt=prompt)
    counts = dataset.pack(10).counts
    targets = [4 + 9 + 9 + 9 + 9, 2 + 7 + 7][prompt > 0]
    assert (counts.split, counts.truncated) == ((2, 0) if prompt == 0 else (0, 2))
    assert (counts.documents, counts.dropped) == (3, 0)
    assert counts.targets == targets
    # Of the prompt's documents, 27 and 8 tokens are trained, and 7 each remain.
    assert counts.cut == (0 if prompt == 0 else 20 + 1)
    assert counts.cut_share == counts.cut / (counts.cut + counts.targets)
    assert counts.padding_share == counts.padding / (10 * counts.rows)
    assert counts.untrained == (1 if prompt == 0 else 0), "a rest of one token"
    dropped = dataset.pack(10, overlong="drop").counts
    assert (dropped.dropped, dropped.cut) == (2, 29 + 10 if prompt == 0 else 27 + 8)


def test_a_document_as_long_as_the_context_is_kept_whole(tmp_path: Path) -> None:
    for way in ("truncate", "drop", "split"):
        counts = make_dataset(tmp_path / way, [10, 10]).pack(10, overlong=way).counts  # type: ignore[arg-type]
        assert (counts.truncated, counts.dropped, counts.split, counts.cut) == (0, 0, 0, 0)
        assert (counts.rows, counts.padding, counts.tokens) == (2, 0, 20)
    with pytest.raises(DataError, match="a context of 1 leaves nothing"):
        make_dataset(tmp_path / "one", [5]).pack(1)
    assert make_dataset(tmp_path / "two", [5]).pack(2, overlong="truncate").counts.targets == 1


@pytest.mark.parametrize("field", ["epoch", "row", "step"])
def test_a_position_outside_of_its_range_is_rejected(packed: Packed, field: str) -> None:
    position = packed.batches(4).position
    for value in (-1, 1 << 63, "1", None, 1.0):
        with pytest.raises(PositionError, match=field):
            packed.batches(4, position={**position, field: value})
    largest = packed.batches(4, position={**position, field: (1 << 63) - 1})
    assert largest.position[field] == (1 << 63) - 1
    with pytest.raises(PositionError, match="version"):
        packed.batches(4, position={**position, "version": 2})
    with pytest.raises(PositionError, match="position"):
        packed.batches(4, position=[position])  # type: ignore[arg-type]


def test_an_epoch_advances_with_every_row(packed: Packed) -> None:
    batches = packed.batches(4, epochs=1.5)
    assert batches.steps == -(-3 * packed.steps_per_epoch(4) // 2)
    seen = 0
    for batch in batches:
        seen += len(batch["input_ids"])
        assert batches.epoch == pytest.approx(seen / len(packed))
    assert len(batches) == 0
    assert batches.position["step"] == batches.steps
    with pytest.raises(StopIteration):
        next(batches)
