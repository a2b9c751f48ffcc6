"""Sampling of tokens, and the text that is streamed from them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from penstock.generate.sampling import Sampler, sample_tokens
from penstock.generate.text_stream import TextStream
from tests.support.small_tokenizers import small_tokenizer

SCORES = torch.tensor([2.0, 0.5, 1.0, -1.0, 0.0])


def drawn(count: int, **options: float) -> Counter[int | None]:
    """Sample `count` tokens, each for a request of its own."""
    settings: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | options
    draws = [Sampler(**settings, seed=number) for number in range(count)]
    return Counter(sample_tokens(SCORES.expand(count, -1), draws))


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert drawn(5, temperature=0.0) == {0: 5}


def test_tokens_are_sampled_by_their_probabilities() -> None:
    """Each count is within five standard deviations, sqrt(n p (1 - p)), of its expectation.

    The seed is fixed, so the result is always the same.
    """
    count = 2000
    actual = drawn(count, temperature=0.7)
    chances = torch.softmax(SCORES / 0.7, dim=0).tolist()
    for token, chance in enumerate(chances):
        deviation = (count * chance * (1 - chance)) ** 0.5
        assert abs(actual[token] - count * chance) < 5 * deviation


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"top_p": 0.55}, {0}),  # the likeliest has a probability of 0.563
        ({"top_p": 0.57}, {0, 2}),
        ({"top_k": 3, "top_p": 0.9}, {0, 2, 1}),
    ],
)
def test_top_k_and_top_p_limit_the_candidates(options: dict[str, float], allowed: set[int]) -> None:
    assert set(drawn(400, **options)) == allowed


def test_a_row_samples_the_same_alone_and_in_a_batch() -> None:
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))

    def draws(row: int) -> Sampler:
        return Sampler(0.9, 10, 0.95, row) if row != 2 else Sampler(0.0, 0, 1.0, row)

    together = sample_tokens(rows, [draws(row) for row in range(4)])
    assert together == [sample_tokens(rows[row : row + 1], [draws(row)])[0] for row in range(4)]


def test_scores_that_are_not_finite_give_no_token() -> None:
    rows = torch.stack([SCORES, SCORES, SCORES.clone()])
    rows[1, 3] = float("nan")
    rows[2, 0] = float("-inf")  # a token that is ruled out is allowed

    assert sample_tokens(rows, [Sampler(0.0, 0, 1.0, 0)] * 3) == [0, None, 2]


@pytest.mark.parametrize("text", ["Water runs", "naïve café ☃ 水", "a\n\nb", "  spaces  "])
def test_streamed_parts_add_up_to_the_text(text: str) -> None:
    tokenizer = small_tokenizer()
    stream, parts = TextStream(tokenizer, ()), []
    for token in tokenizer(text)["input_ids"]:
        parts.append(stream.push(token))
    parts.append(stream.finish())

    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("one two three", ["twofold", "e t"], "on"),
        ("one two three", ["four"], "one two three"),
        ("one two th", ["three"], "one two th"),  # begins like a stop text, but is none
    ],
)
def test_a_stop_ends_the_text_before_it(text: str, stops: list[str], shown: str) -> None:
    tokenizer = small_tokenizer()
    stream, parts = TextStream(tokenizer, stops), ""
    for token in tokenizer(text)["input_ids"]:
        parts += stream.push(token)
        assert shown.startswith(parts)  # text is never retracted
        if stream.stopped:
            break
    parts += stream.finish()

    assert parts == shown
    assert stream.stopped == (shown != text)
