"""Tokens are drawn as they are said to be; text comes as soon as it is certain."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from penstock.generate.sampling import Sampler, sample_tokens
from penstock.generate.text_stream import TextStream
from tests.support.small_tokenizers import small_tokenizer

SCORES = torch.tensor([2.0, 0.5, 1.0, -1.0, 0.0])


def drawn(count: int, **how: float) -> Counter[int | None]:
    """So many tokens, each of a request of its own."""
    given: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | how
    draws = [Sampler(**given, seed=number) for number in range(count)]
    return Counter(sample_tokens(SCORES.expand(count, -1), draws))


def test_no_temperature_takes_the_likeliest() -> None:
    assert drawn(5, temperature=0.0) == {0: 5}


def test_tokens_are_drawn_by_their_chances() -> None:
    """A count of n draws strays by less than five standard deviations, sqrt(n p (1 - p)) each; the
    seed is fixed, so it does so always."""
    count = 2000
    found = drawn(count, temperature=0.7)
    chances = torch.softmax(SCORES / 0.7, dim=0).tolist()
    for token, chance in enumerate(chances):
        deviation = (count * chance * (1 - chance)) ** 0.5
        assert abs(found[token] - count * chance) < 5 * deviation


@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"top_p": 0.55}, {0}),  # the likeliest has 0.563
        ({"top_p": 0.57}, {0, 2}),
        ({"top_k": 3, "top_p": 0.9}, {0, 2, 1}),
    ],
)
def test_only_the_likeliest_are_drawn_among(how: dict[str, float], allowed: set[int]) -> None:
    assert set(drawn(400, **how)) == allowed


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))

    def draws(row: int) -> Sampler:
        return Sampler(0.9, 10, 0.95, row) if row != 2 else Sampler(0.0, 0, 1.0, row)

    together = sample_tokens(rows, [draws(row) for row in range(4)])
    assert together == [sample_tokens(rows[row : row + 1], [draws(row)])[0] for row in range(4)]


def test_scores_that_are_not_finite_give_no_token() -> None:
    rows = torch.stack([SCORES, SCORES, SCORES.clone()])
    rows[1, 3] = float("nan")
    rows[2, 0] = float("-inf")  # a token that is ruled out is fine

    assert sample_tokens(rows, [Sampler(0.0, 0, 1.0, 0)] * 3) == [0, None, 2]


@pytest.mark.parametrize("text", ["Water runs", "naïve café ☃ 水", "a\n\nb", "  spaces  "])
def test_pieces_of_text_add_up(text: str) -> None:
    tokenizer = small_tokenizer()
    stream, told = TextStream(tokenizer, ()), []
    for token in tokenizer(text)["input_ids"]:
        told.append(stream.push(token))
    told.append(stream.finish())

    assert "".join(told) == text
    assert not any("\ufffd" in piece for piece in told)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("one two three", ["twofold", "e t"], "on"),
        ("one two three", ["four"], "one two three"),
        ("one two th", ["three"], "one two th"),  # began like a stop, and was none
    ],
)
def test_a_stop_ends_the_text_before_it(text: str, stops: list[str], shown: str) -> None:
    tokenizer = small_tokenizer()
    stream, told = TextStream(tokenizer, stops), ""
    for token in tokenizer(text)["input_ids"]:
        told += stream.push(token)
        assert shown.startswith(told)  # nothing is taken back
        if stream.stopped:
            break
    told += stream.finish()

    assert told == shown
    assert stream.stopped == (shown != text)
