"""Errors of a generator, and that a failed request does not affect the others."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from transformers import DogeConfig

from penstock.errors import UnsupportedModelError
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
from tests.kv.tiny_generators import (
    PAGE,
    random_prompts,
    reference_tokens,
    small_generator,
    tiny_model,
    tokens_by_request,
)
from tests.support.engines import plain_model, tiny_config
from tests.support.small_tokenizers import small_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


def errors_of(chunks: list[Any]) -> dict[object, Exception]:
    return {chunk.request: chunk.error for chunk in chunks if chunk.error is not None}


@pytest.mark.parametrize(
    ("options", "message"),
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
def test_an_invalid_request_fails_and_others_continue(
    options: dict[str, Any], message: str
) -> None:
    model = tiny_model("llama")
    with Generator(model, budget="64MiB") as generator:
        good = Request(prompt=[5, 6, 7], max_new=4, id="good")
        chunks = list(generator.run([Request(id="bad", **options), good]))

        with pytest.raises(RequestError):
            generator.submit(Request(id="bad", **options))

    assert message in str(errors_of(chunks)["bad"])
    assert tokens_by_request(chunks)["good"] == reference_tokens(model, [5, 6, 7], 4)


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    model = tiny_model("llama")
    with Generator(model, budget="64MiB", max_context=40) as generator:
        with pytest.raises(
            PromptTooLongError, match="40 tokens, but the cache supports 40"
        ) as error:
            generator.submit(Request(prompt=[5] * 40))
        assert (error.value.wanted, error.value.limit) == (40, 40)

        chunks = list(generator.run([Request(prompt=[5] * 39, max_new=9)]))
        assert [chunk.finished for chunk in chunks] == ["context"]
    with (
        Generator(model, budget="64MiB", max_context=4096) as generator,
        pytest.raises(PromptTooLongError, match="but the model supports 128"),
    ):
        generator.submit(Request(prompt=[5] * 128))


def test_a_prompt_that_is_rotated_with_other_frequencies_is_refused() -> None:
    """transformers computes the whole prompt with the frequencies of long ones."""
    longrope = {"rope_type": "longrope", "rope_theta": 500.0, "factor": 2.0,
                "original_max_position_embeddings": 24, "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 2.3, 2.6, 2.9]}  # fmt: skip
    model = plain_model(tiny_config("llama", rope_parameters=longrope), torch.float32).eval()
    model.generation_config.eos_token_id = None
    with Generator(model, budget="64MiB", prefill_chunk=8) as generator:
        with pytest.raises(PromptTooLongError, match="longrope"):
            generator.submit(Request(prompt=[5] * 24))
        chunks = list(generator.run([Request(prompt=[5] * 20, max_new=9)]))
    assert tokens_by_request(chunks)[0] == reference_tokens(model, [5] * 20, 4)
    assert chunks[-1].finished == "context"


def test_attention_that_was_replaced_in_the_model_is_refused() -> None:
    def forward(self: Any, hidden_states: torch.Tensor, **_: Any) -> Any:
        return self.o_proj(hidden_states), None

    model = copy.deepcopy(tiny_model("llama"))  # other tests use the same
    attention = model.model.layers[1].self_attn
    attention.forward = types.MethodType(forward, attention)
    with pytest.raises(UnfitModelError, match="has a LlamaAttention whose forward does not call"):
        Generator(model, budget="64MiB")


def test_a_model_that_makes_masks_of_its_own_is_refused() -> None:
    config = DogeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    model = plain_model(config, torch.float32).eval()
    with (
        Generator(model, budget="64MiB") as generator,
        pytest.raises(UnsupportedModelError, match="DogeAttention makes an attention mask"),
    ):
        list(generator.run([Request(prompt=[5, 6], max_new=2)]))


def test_a_request_is_refused_when_the_queue_is_full() -> None:
    with Generator(tiny_model("llama"), budget="64MiB", max_batch=1, queue=2) as generator:
        generator.submit(Request(prompt=[5], max_new=2))
        generator.submit(Request(prompt=[6], max_new=2))
        with pytest.raises(QueueFullError, match="2 requests are waiting already") as error:
            generator.submit(Request(prompt=[7], id="third"))
        assert error.value.limit == 2

        generator.step()  # starts the first request
        generator.submit(Request(prompt=[7], max_new=2))
        chunks = []
        while not generator.idle:
            chunks += generator.step()

    assert sum(chunk.finished == "length" for chunk in chunks) == 3


def test_run_does_not_overfill_the_queue() -> None:
    with Generator(tiny_model("llama"), budget="64MiB", max_batch=1, queue=1) as generator:
        chunks = list(generator.run(Request(prompt=[5 + n], max_new=2) for n in range(4)))

    assert errors_of(chunks) == {}
    assert sum(chunk.finished == "length" for chunk in chunks) == 4


def test_a_sequence_larger_than_the_cache_fails_alone() -> None:
    model = tiny_model("llama")
    short, long = random_prompts((10, 100))
    with small_generator(model, tokens=64, max_batch=2) as generator:
        requests = [Request(prompt=long, id="long", max_new=5), Request(prompt=short, id="short",
                                                                     max_new=5)]  # fmt: skip
        chunks = list(generator.run(requests))

    failed = errors_of(chunks)
    assert list(failed) == ["long"]
    assert isinstance(failed["long"], NoRoomError)
    assert failed["long"].wanted > 0
    assert "raise --hbm" in str(failed["long"])
    assert tokens_by_request(chunks)["short"] == reference_tokens(model, short, 5)


def test_a_request_fails_if_no_row_can_become_free() -> None:
    model = tiny_model("llama")
    with small_generator(model, tokens=100, max_batch=1) as generator:
        held = generator.cache.admit()
        chunks = list(generator.run([Request(prompt=[5, 6], id="first")]))
        assert isinstance(errors_of(chunks)["first"], NoSlot)

        generator.cache.finish(held)
        chunks = list(generator.run([Request(prompt=[5, 6], max_new=2, id="second")]))
        assert tokens_by_request(chunks)["second"] == reference_tokens(model, [5, 6], 2)


def test_a_preempted_request_fails_if_the_budget_became_too_small() -> None:
    model, (one, two) = tiny_model("llama"), random_prompts((30, 30))
    with small_generator(model, tokens=100, max_batch=2) as generator:
        for name, prompt in (("one", one), ("two", two)):
            generator.submit(Request(prompt=prompt, max_new=40, id=name))
        chunks = []
        while not generator._scheduler.preempted:
            chunks += generator.step()
        generator._scheduler.retire(generator._scheduler.running[0])
        generator.cache.resize(2 * PAGE)
        while not generator.idle:
            chunks += generator.step()

    assert isinstance(errors_of(chunks)["two"], CacheFull)


def test_scores_that_are_not_finite_fail_one_request() -> None:
    model = plain_model(tiny_config("llama", eos_token_id=None), dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[99] = float("nan")
    with Generator(model, budget="64MiB", max_batch=2) as generator:
        requests = [Request(prompt=[5, 99], id="bad"), Request(prompt=[5, 6], id="good", max_new=6)]
        chunks = list(generator.run(requests))

    assert isinstance(errors_of(chunks)["bad"], NonFiniteLogitsError)
    assert len(tokens_by_request(chunks)["good"]) == 6


def test_closing_the_iterator_drops_all_requests() -> None:
    with Generator(tiny_model("llama"), budget="64MiB", max_batch=2) as generator:
        chunks = generator.run([Request(prompt=[5]), Request(prompt=[6]), Request(prompt=[7])])
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]

        assert generator.idle
        assert tokens_by_request(list(generator.run([Request(prompt=[5], max_new=3, id="x")])))["x"]


def test_a_model_with_attention_sinks_is_refused() -> None:
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    with pytest.raises(UnfitModelError, match="attention sinks"):
        Generator(plain_model(config), budget="64MiB")


@pytest.mark.parametrize("name", ["max_batch", "prefill_chunk"])
def test_sizes_below_one_are_refused(name: str) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(RequestError, match=f"{name} must be 1 or more, got 0"):
        Generator(tiny_model("llama"), budget="64MiB", **options)


def test_stop_tokens_and_stop_texts_end_an_answer() -> None:
    model, tokenizer = tiny_model("llama"), small_tokenizer(vocabulary=260)
    whole = reference_tokens(model, [40, 41, 42], 20)
    with Generator(model, budget="64MiB", tokenizer=tokenizer) as generator:
        stop = whole[6]
        (first, *_), = [list(generator.run([Request(prompt=[40, 41, 42], max_new=20,
                                                    stop_tokens=[stop])]))]  # fmt: skip
        assert first.finished is None
        chunks = list(generator.run([Request(prompt=[40, 41, 42], max_new=20)]))
        text = "".join(chunk.text for chunk in chunks)
        cut = text[5:8]
        stopped = list(generator.run([Request(prompt=[40, 41, 42], max_new=20, stop=[cut])]))

    assert text == tokenizer.decode(whole, skip_special_tokens=True)
    assert stopped[-1].finished == "stop"
    assert "".join(chunk.text for chunk in stopped) == text[: text.index(cut)]
