"""The length that a trainer's memory is planned for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.errors import SettingsError
from penstock.integrations.sequence_length import sequence_length


def data(*lengths: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": [1] * length} for length in lengths]


def find(*datasets: Any, limit: int | None = None, **arguments: Any) -> tuple[int, str]:
    return sequence_length(None, SimpleNamespace(**arguments), datasets, limit=limit)


def test_the_users_choice_comes_first() -> None:
    chosen = sequence_length(7, SimpleNamespace(max_length=20), [data(30)], limit=5)
    assert chosen == (7, "PenstockConfig.context")


def test_max_length_is_bounded_by_the_model() -> None:
    assert find(data(3), max_length=20) == (20, "max_length")
    assert find(data(3), max_length=20, limit=16) == (16, "max_length")
    assert find(data(3), max_length=20, limit=32) == (20, "max_length")


def test_max_length_says_nothing_about_data_that_is_used_as_it_is() -> None:
    unchanged = {"max_length": 20, "dataset_kwargs": {"skip_prepare_dataset": True}}
    assert find(data(70), **unchanged)[0] == 128
    assert find(data(70), max_length=20, dataset_kwargs={"x": 1})[0] == 20


def test_the_longest_sequence_is_rounded_up_but_not_beyond_the_model() -> None:
    length, why = find(data(3, 65, 5), data(40))
    assert (length, why) == (128, "the longest sequence of the data, 65 tokens")
    assert find(data(64))[0] == 64
    assert find(data(65), limit=100)[0] == 100
    assert find(data(65), limit=50)[0] == 65, "the batch itself is refused later, by its length"
    assert find(data(2))[0] == 64
    assert find([{"input_ids": torch.zeros(1, 9)}])[0] == 64


@pytest.mark.parametrize(
    ("datasets", "problem"),
    [
        ((data(1),), "cannot be found in the data"),
        ((), "cannot be found in the data"),
        ((iter(data(5)),), "which is read only once"),
        (([{"text": "a"}],), "examples have no input_ids"),
    ],
)
def test_data_without_a_length_asks_for_one(datasets: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        find(*datasets)


def test_only_the_tokens_of_a_table_are_read() -> None:
    class Table(list[Any]):
        column_names = ("input_ids", "image")

        def select_columns(self, names: list[str]) -> list[Any]:
            assert names == ["input_ids"]
            return data(70)

    table = Table([{"image": None}])
    table.column_names = list(table.column_names)  # type: ignore[assignment]
    assert find(table)[0] == 128
