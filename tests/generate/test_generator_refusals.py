"""What a generator refuses, and that one bad request hurts no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.generate.generator import Generator
from penstock.generate.requests import (
    NonFiniteLogitsError,
    NoRoomError,
    PromptTooLongError,
    QueueFullError,
    Request,
    RequestError,
    UnfitModelError,
)
from penstock.kv.errors import CacheFull, NoSlot
from tests.kv.generating import PAGE, alone, gathered, model_of, prompts_of, small_generator
from tests.support.engines import plain_model, tiny_config
from tests.support.small_tokenizers import small_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


def errors_of(pieces: list[Any]) -> dict[object, Exception]:
    return {piece.request: piece.error for piece in pieces if piece.error is not None}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prompt": []}, "request bad: prompt must not be empty"),
        ({"prompt": [5, 260]}, "must contain tokens from 0 to 259, got 260"),
        ({"prompt": [5, -1]}, "must contain tokens from 0 to 259, got -1"),
        ({"prompt": "text"}, "prompt is text, which needs a tokenizer="),
        ({"prompt": [5], "max_new": 0}, "max_new must be 1 or more, got 0"),
        ({"prompt": [5], "temperature": -1.0}, "temperature must be 0 or more, got -1.0"),
        ({"prompt": [5], "temperature": float("nan")}, "temperature must be 0 or more"),
        ({"prompt": [5], "top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"prompt": [5], "top_k": -3}, "top_k must be 0 or more, got -3"),
        ({"prompt": [5], "stop": ["x"]}, "stop needs a tokenizer="),
        ({"prompt": [5], "stop": [""]}, "stop must not contain an empty text"),
    ],
)
def test_a_bad_request_is_told_and_others_go_on(asked: dict[str, Any], words: str) -> None:
    model = model_of("llama")
    with Generator(model, budget="64MiB") as generator:
        good = Request(prompt=[5, 6, 7], max_new=4, id="good")
        pieces = list(generator.run([Request(id="bad", **asked), good]))

        with pytest.raises(RequestError):
            generator.submit(Request(id="bad", **asked))

    assert words in str(errors_of(pieces)["bad"])
    assert gathered(pieces)["good"] == alone(model, [5, 6, 7], 4)


def test_a_prompt_beyond_the_context_is_refused() -> None:
    model = model_of("llama")
    with Generator(model, budget="64MiB", max_context=40) as generator:
        with pytest.raises(
            PromptTooLongError, match="40 tokens, but the cache supports 40"
        ) as told:
            generator.submit(Request(prompt=[5] * 40))
        assert (told.value.wanted, told.value.limit) == (40, 40)

        pieces = list(generator.run([Request(prompt=[5] * 39, max_new=9)]))
        assert [piece.finished for piece in pieces] == ["context"]
    with (
        Generator(model, budget="64MiB", max_context=4096) as generator,
        pytest.raises(PromptTooLongError, match="but the model supports 128"),
    ):
        generator.submit(Request(prompt=[5] * 128))


def test_more_requests_than_the_queue_are_refused() -> None:
    with Generator(model_of("llama"), budget="64MiB", max_batch=1, queue=2) as generator:
        generator.submit(Request(prompt=[5], max_new=2))
        generator.submit(Request(prompt=[6], max_new=2))
        with pytest.raises(QueueFullError, match="2 requests are waiting already") as told:
            generator.submit(Request(prompt=[7], id="third"))
        assert told.value.limit == 2

        generator.step()  # the first has begun
        generator.submit(Request(prompt=[7], max_new=2))
        pieces = []
        while not generator.idle:
            pieces += generator.step()

    assert sum(piece.finished == "length" for piece in pieces) == 3


def test_run_keeps_to_the_queue() -> None:
    with Generator(model_of("llama"), budget="64MiB", max_batch=1, queue=1) as generator:
        pieces = list(generator.run(Request(prompt=[5 + n], max_new=2) for n in range(4)))

    assert errors_of(pieces) == {}
    assert sum(piece.finished == "length" for piece in pieces) == 4


def test_a_sequence_that_the_whole_cache_cannot_hold_fails_alone() -> None:
    model = model_of("llama")
    short, long = prompts_of((10, 100))
    with small_generator(model, tokens=64, max_batch=2) as generator:
        asked = [Request(prompt=long, id="long", max_new=5), Request(prompt=short, id="short",
                                                                     max_new=5)]  # fmt: skip
        pieces = list(generator.run(asked))

    failed = errors_of(pieces)
    assert list(failed) == ["long"]
    assert isinstance(failed["long"], NoRoomError)
    assert failed["long"].wanted > 0
    assert "raise --hbm" in str(failed["long"])
    assert gathered(pieces)["short"] == alone(model, short, 5)


def test_rows_that_somebody_else_holds_are_no_reason_to_wait_for_ever() -> None:
    model = model_of("llama")
    with small_generator(model, tokens=100, max_batch=1) as generator:
        taken = generator.cache.admit()
        pieces = list(generator.run([Request(prompt=[5, 6], id="first")]))
        assert isinstance(errors_of(pieces)["first"], NoSlot)

        generator.cache.finish(taken)
        pieces = list(generator.run([Request(prompt=[5, 6], max_new=2, id="second")]))
        assert gathered(pieces)["second"] == alone(model, [5, 6], 2)


def test_a_budget_that_shrinks_ends_what_it_cannot_bring_back() -> None:
    model, (one, two) = model_of("llama"), prompts_of((30, 30))
    with small_generator(model, tokens=100, max_batch=2) as generator:
        for name, prompt in (("one", one), ("two", two)):
            generator.submit(Request(prompt=prompt, max_new=40, id=name))
        pieces = []
        while not generator._scheduler.preempted:
            pieces += generator.step()
        generator._scheduler.retire(generator._scheduler.running[0])
        generator.cache.resize(2 * PAGE)
        while not generator.idle:
            pieces += generator.step()

    assert isinstance(errors_of(pieces)["two"], CacheFull)


def test_scores_that_are_no_numbers_end_one_request() -> None:
    model = plain_model(tiny_config("llama", eos_token_id=None), dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[99] = float("nan")
    with Generator(model, budget="64MiB", max_batch=2) as generator:
        asked = [Request(prompt=[5, 99], id="bad"), Request(prompt=[5, 6], id="good", max_new=6)]
        pieces = list(generator.run(asked))

    assert isinstance(errors_of(pieces)["bad"], NonFiniteLogitsError)
    assert len(gathered(pieces)["good"]) == 6


def test_whoever_stops_listening_leaves_nothing_behind() -> None:
    with Generator(model_of("llama"), budget="64MiB", max_batch=2) as generator:
        pieces = generator.run([Request(prompt=[5]), Request(prompt=[6]), Request(prompt=[7])])
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]

        assert generator.idle
        assert gathered(list(generator.run([Request(prompt=[5], max_new=3, id="x")])))["x"]


def test_attention_that_cannot_be_replaced_is_refused() -> None:
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    with pytest.raises(UnfitModelError, match="attention sinks"):
        Generator(plain_model(config), budget="64MiB")


@pytest.mark.parametrize("name", ["max_batch", "prefill_chunk"])
def test_sizes_are_checked(name: str) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(RequestError, match=f"{name} must be 1 or more, got 0"):
        Generator(model_of("llama"), budget="64MiB", **options)


def test_stop_tokens_and_texts_end_an_answer() -> None:
    model, tokenizer = model_of("llama"), small_tokenizer(vocabulary=260)
    whole = alone(model, [40, 41, 42], 20)
    with Generator(model, budget="64MiB", tokenizer=tokenizer) as generator:
        stop = whole[6]
        (first, *_), = [list(generator.run([Request(prompt=[40, 41, 42], max_new=20,
                                                    stop_tokens=[stop])]))]  # fmt: skip
        assert first.finished is None
        pieces = list(generator.run([Request(prompt=[40, 41, 42], max_new=20)]))
        text = "".join(piece.text for piece in pieces)
        cut = text[5:8]
        stopped = list(generator.run([Request(prompt=[40, 41, 42], max_new=20, stop=[cut])]))

    assert text == tokenizer.decode(whole, skip_special_tokens=True)
    assert stopped[-1].finished == "stop"
    assert "".join(piece.text for piece in stopped) == text[: text.index(cut)]
