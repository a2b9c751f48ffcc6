"""One batch from the micro-batches of an optimizer step: rows, padding, documents and owners."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import BatchError
from penstock.integrations.window import Window, make_window

IGNORED = -100


def micro_batch(*rows: list[int], **more: Any) -> dict[str, Any]:
    """Return rows of tokens with padding on the right, as a collator makes them."""
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    labels = torch.where(mask == 1, ids, IGNORED)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask} | more


def rows_of(window: Window, name: str) -> list[list[int]]:
    found: list[list[int]] = window.batch[name].tolist()
    return found


def test_micro_batches_become_rows_padded_to_the_longest() -> None:
    window = make_window([micro_batch([5, 6, 7], [8, 9]), micro_batch([4])], context=8)
    assert rows_of(window, "input_ids") == [[5, 6, 7], [8, 9, 0], [4, 0, 0]]
    assert rows_of(window, "labels") == [
        [5, 6, 7], [8, 9, IGNORED], [4, IGNORED, IGNORED],
    ]  # fmt: skip
    # Padding continues the only document of a row.
    assert rows_of(window, "position_ids") == [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert window.owners.tolist() == [[0, 0, 0], [0, 0, -1], [1, -1, -1]]
    full = make_window([micro_batch([5, 6, 7])], context=5, full_rows=True)
    assert rows_of(full, "position_ids") == [[0, 1, 2, 3, 4]]
    assert make_window([micro_batch([5, 6, 7])], context=5).owners.shape == (1, 3)


def test_targets_are_tokens_whose_next_token_counts() -> None:
    window = make_window([micro_batch([5, 6, 7], [8, 9])], context=8, pack=True)
    assert rows_of(window, "position_ids") == [[0, 1, 2, 0, 1]]
    # The first token of a document is predicted by nothing.
    assert window.targets.tolist() == [[True, True, False, True, False]]


def test_packed_rows_are_filled_in_their_order_and_no_further_than_the_context() -> None:
    given = [micro_batch([1, 2, 3], [4, 5]), micro_batch([6, 7, 8], [9])]
    window = make_window(given, context=5, pack=True)
    assert rows_of(window, "input_ids") == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]
    assert window.owners.tolist() == [[0] * 5, [1, 1, 1, 1, -1]]
    # After several documents, padding is a document of its own.
    assert rows_of(window, "position_ids") == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 0]]


def test_packed_input_is_split_into_its_documents_without_those_of_one_token() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0]])
    given = micro_batch([1, 2, 3, 4, 5, 6, 7], position_ids=positions, seq_idx=positions)
    window = make_window([given], context=8)
    assert rows_of(window, "input_ids") == [[1, 2, 3, 4, 5]]
    assert rows_of(window, "position_ids") == [[0, 1, 2, 0, 1]]
    single = micro_batch([7], position_ids=torch.tensor([[0]]))
    assert rows_of(make_window([single], context=8), "input_ids") == [[7]]


def test_a_row_of_padding_alone_stays_a_row_that_counts_nothing() -> None:
    given = micro_batch([5, 6], [7, 8])
    given["attention_mask"][1], given["labels"][1] = 0, IGNORED
    window = make_window([given], context=4)
    assert window.owners.shape == (2, 2)
    assert window.targets.tolist() == [[True, False], [False, False]]


def test_a_window_is_split_into_parts_of_some_rows() -> None:
    window = make_window([micro_batch([1, 2], [3, 4], [5, 6])], context=2)
    parts = window.split(2)
    assert [part["input_ids"].tolist() for part in parts] == [[[1, 2], [3, 4]], [[5, 6]]]


def test_a_row_as_long_as_the_context_is_taken_and_a_longer_one_refused() -> None:
    assert make_window([micro_batch([1, 2, 3])], context=3).owners.shape == (1, 3)
    with pytest.raises(BatchError, match="has 3 tokens, but memory was planned for 2"):
        make_window([micro_batch([1, 2, 3])], context=2)


def test_micro_batches_need_labels_unless_they_are_only_evaluated() -> None:
    given = {"input_ids": torch.tensor([[1, 2]])}
    with pytest.raises(BatchError, match="the batch has no labels"):
        make_window([given], context=4)
    assert rows_of(make_window([given], context=4, needs_labels=False), "labels") == [[IGNORED] * 2]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"labels": torch.tensor([[1]])}, "has no input_ids; its keys are: labels"),
        (micro_batch([1, 2], pixel_values=torch.zeros(1)), "has pixel_values, which Penstock"),
        # Without positions, seq_idx would say where documents begin.
        (micro_batch([1, 2], seq_idx=torch.zeros(1)), "has seq_idx, which Penstock would ignore"),
        (micro_batch([1, 2], position_ids=torch.zeros(3, 2)), r"position_ids has shape \(3, 2\)"),
    ],
)
def test_what_would_be_ignored_or_does_not_fit_is_refused(
    given: dict[str, Any], problem: str
) -> None:
    with pytest.raises(BatchError, match=problem):
        make_window([given], context=4)


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        ([[1, 1, 1], [0, 1, 1]], "beginning of row 1, as padding on the left.*padding_side"),
        ([[0, 1, 0], [1, 1, 1]], "beginning of row 0"),
        ([[1, 1, 1], [1, 0, 1]], r"hides tokens between others in row 1 .*labels to -100"),
        ([[1.0, 1.0, 1.0], [1.0, 0.5, 0.0]], "values other than 0 and 1, such as 0.5"),
        (
            [[[[1] * 3] * 3]] * 2,
            r"has shape \(2, 1, 3, 3\), and input_ids has \(2, 3\).*position_ids",
        ),
    ],
)
def test_each_mask_that_hides_more_than_padding_has_its_own_message(
    mask: Any, problem: str
) -> None:
    given = micro_batch([1, 2, 3], [4, 5, 6], attention_mask=torch.tensor(mask))
    with pytest.raises(BatchError, match=problem):
        make_window([given], context=4)


def test_the_mask_of_a_window_hides_padding_and_nothing_else() -> None:
    given = micro_batch([5, 6, 7], [8, 9], [1])
    given["attention_mask"][2] = 0
    window = make_window([given], context=4, with_mask=True)
    assert rows_of(window, "attention_mask") == [[1, 1, 1], [1, 1, 0], [0, 0, 0]]
    packed = make_window([given], context=5, pack=True, with_mask=True)
    assert rows_of(packed, "attention_mask") == [[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert "attention_mask" not in make_window([given], context=4).batch


def test_with_a_mask_documents_of_one_token_count_as_transformers_counts_them() -> None:
    positions = torch.tensor([[0, 1, 0, 0]])
    given = micro_batch([1, 2, 3, 4], position_ids=positions)
    window = make_window([given], context=4, with_mask=True)
    assert rows_of(window, "input_ids") == [[1, 2, 3, 4]]
    assert rows_of(window, "attention_mask") == [[1, 1, 1, 1]]


def test_one_row_of_positions_is_that_of_all_rows() -> None:
    given = micro_batch([1, 2, 3], [4, 5, 6], position_ids=torch.tensor([[0, 1, 2]]))
    assert rows_of(make_window([given], context=4), "position_ids") == [[0, 1, 2]] * 2


def test_documents_in_a_row_with_a_mask_are_noted() -> None:
    positions = torch.tensor([[0, 1, 0, 1]])
    given = micro_batch([1, 2, 3, 4], position_ids=positions)
    assert make_window([given], context=4).masked_documents
    del given["attention_mask"]
    assert not make_window([given], context=4).masked_documents
    padded = micro_batch([1, 2, 3, 4], position_ids=torch.tensor([[0, 1, 2, 0]]))
    padded["attention_mask"][0, 3] = 0
    assert not make_window([padded], context=4).masked_documents
