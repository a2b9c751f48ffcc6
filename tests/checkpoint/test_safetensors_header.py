"""The header parser accepts and refuses the same files as the safetensors library."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.checkpoint.safetensors_header import DTYPES
from tests.support.safetensors_files import check_one, corpus, file_of, mutate

NUMBERS = st.integers(-2, 20) | st.integers() | st.floats(allow_nan=False) | st.booleans()
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "F4", "x", ""]),
        "shape": st.lists(NUMBERS, max_size=3) | NUMBERS,
        "data_offsets": st.lists(st.integers(0, 20), min_size=2, max_size=2)
        | st.lists(NUMBERS, max_size=3),
        "more": st.text(),
    },
)
HEADERS = st.dictionaries(
    st.text(max_size=3) | st.just("__metadata__"),
    TENSORS | st.dictionaries(st.text(max_size=2), st.text(max_size=2)) | NUMBERS | st.none(),
    max_size=4,
)


@given(header=HEADERS, data=st.binary(max_size=40))
@settings(max_examples=1000, deadline=None)
@example(header={"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, data=b"ab")
def test_any_header_is_accepted_or_refused_as_by_the_library(
    header: dict[str, object], data: bytes
) -> None:
    check_one(file_of(header, data))


@given(block=st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_accepted_or_refused_as_by_the_library(block: bytes) -> None:
    check_one(block)
    check_one(file_of(block))


def test_mutated_files_are_accepted_or_refused_as_by_the_library() -> None:
    valid = corpus()
    outcomes: Counter[str] = Counter()
    for seed in range(3000):
        outcomes[check_one(mutate(valid[seed % len(valid)], random.Random(seed)))] += 1

    # The fuzzer must reach every outcome to be meaningful.
    assert set(outcomes) == {"accepted", "empty", "refused", "truncated"}


def test_valid_files_are_accepted() -> None:
    assert [check_one(block) for block in corpus()] == ["accepted", "accepted", "empty"]
