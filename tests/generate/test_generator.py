"""A generator gives the tokens of transformers, independent of the batch and the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.generate.generator import Generator
from penstock.generate.requests import Request, TokenChunk
from tests.kv.tiny_generators import (
    FAMILIES,
    random_prompts,
    reference_tokens,
    run,
    small_generator,
    tiny_model,
    tokens_by_request,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 17, 30, 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_a_dynamic_cache(family: str) -> None:
    model, prompts = tiny_model(family), random_prompts(LENGTHS)
    expected = [reference_tokens(model, prompt, 20) for prompt in prompts]

    with Generator(model, budget="64MiB", max_batch=3, prefill_chunk=16) as generator:
        assert run(generator, prompts, 20) == expected

    assert len({tuple(answer) for answer in expected}) > 1
    assert all(len(set(answer)) > 1 for answer in expected)


@pytest.mark.parametrize(("max_batch", "chunk"), [(1, 512), (2, 3), (6, 1), (6, 7)])
def test_batch_and_chunk_sizes_do_not_change_tokens(max_batch: int, chunk: int) -> None:
    model, prompts = tiny_model("mistral"), random_prompts(LENGTHS)
    expected = [reference_tokens(model, prompt, 12) for prompt in prompts]

    with Generator(model, budget="64MiB", max_batch=max_batch, prefill_chunk=chunk) as generator:
        assert run(generator, prompts, 12) == expected


def test_prompts_are_read_in_larger_chunks_while_no_sequence_decodes() -> None:
    model, prompts = tiny_model("llama"), random_prompts((30, 30))
    seen: list[list[int]] = []
    with Generator(model, budget="64MiB", max_batch=2) as generator:
        generator._scheduler.chunks = (4, 16)
        original = generator.forward.forward

        def forward(cache: Any, passes: Any) -> Any:
            seen.append([each.new for each in passes])
            return original(cache, passes)

        generator.forward.forward = forward  # type: ignore[method-assign]
        generator.submit(Request(prompt=prompts[0], max_new=30))
        for _ in range(3):
            generator.step()
        generator.submit(Request(prompt=prompts[1], max_new=1))
        for _ in range(8):
            generator.step()

    assert seen[:5] == [[16], [14], [1], [1, 4], [1, 4]]


def test_requests_can_arrive_over_time() -> None:
    model, prompts = tiny_model("llama"), random_prompts(LENGTHS)
    expected = [reference_tokens(model, prompt, 12) for prompt in prompts]

    def arriving() -> Any:
        for prompt in prompts:
            yield Request(prompt=prompt, max_new=12)
            yield from [None] * 3  # three steps without a new request

    with Generator(model, budget="64MiB", max_batch=3, prefill_chunk=16) as generator:
        actual = tokens_by_request(list(generator.run(arriving())))

    assert [actual[at] for at in range(len(prompts))] == expected


def test_chunks_are_returned_as_tokens_are_generated() -> None:
    model = tiny_model("llama")
    with Generator(model, budget="64MiB", max_batch=2) as generator:
        generator.submit(Request(prompt=[5, 6, 7], max_new=3, id="a"))
        generator.submit(Request(prompt=[8, 9], max_new=2, id="b"))
        steps = [generator.step() for _ in range(3)]

        assert generator.idle

    def shape(chunk: TokenChunk) -> tuple[object, int, object]:
        return chunk.request, len(chunk.tokens), chunk.finished

    assert [sorted(map(shape, chunks)) for chunks in steps] == [
        [("a", 1, None), ("b", 1, None)],
        [("a", 1, None), ("b", 1, "length")],
        [("a", 1, "length")],
    ]


def test_a_common_beginning_is_computed_once() -> None:
    model = tiny_model("gemma3")
    beginning, *ends = random_prompts((70, 3, 9, 1, 20))
    prompts = [beginning + end for end in ends]
    expected = [reference_tokens(model, prompt, 10) for prompt in prompts]

    with Generator(model, budget="64MiB", max_batch=4, prefill_chunk=24) as generator:
        assert run(generator, prompts, 10) == expected

        assert generator.counts.shared_tokens == sum(
            _common(prompts[0], prompt) for prompt in prompts[1:]
        )


def _common(first: list[int], second: list[int]) -> int:
    """Count the tokens that can be shared: all but the last, which gives the scores."""
    same = 0
    while same < min(len(first), len(second) - 1) and first[same] == second[same]:
        same += 1
    return same


def test_preemption_does_not_change_tokens() -> None:
    model, prompts = tiny_model("gemma2"), random_prompts((20, 31, 8, 25))
    expected = [reference_tokens(model, prompt, 24) for prompt in prompts]

    with small_generator(model, tokens=110, max_batch=4) as generator:
        assert run(generator, prompts, 24) == expected

        assert generator.counts.preemptions > 0


def test_sequences_that_share_pages_can_be_preempted() -> None:
    model = tiny_model("qwen2")
    beginning, *ends = random_prompts((40, 3, 9, 6))
    prompts = [beginning + end for end in ends]
    expected = [reference_tokens(model, prompt, 24) for prompt in prompts]

    with small_generator(model, tokens=100, max_batch=3) as generator:
        assert run(generator, prompts, 24) == expected

        assert generator.counts.preemptions > 0
        assert generator.counts.shared_tokens > 0


def test_the_oldest_is_never_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = tiny_model("llama"), random_prompts((30, 30, 30))
    with small_generator(model, tokens=100, max_batch=3) as generator:
        preempted_ranks: list[object] = []
        preempt = generator.cache.preempt

        def record(sequence: Any) -> Any:
            running = [each.sequence for each in generator._scheduler.running]
            preempted_ranks.append(running.index(sequence))
            return preempt(sequence)

        monkeypatch.setattr(generator.cache, "preempt", record)
        run(generator, prompts, 20)

    assert preempted_ranks
    assert 0 not in preempted_ranks


def test_a_model_in_training_is_left_in_training() -> None:
    model = tiny_model("llama")
    model.train()
    try:
        with Generator(model, budget="64MiB") as generator:
            run(generator, [[5, 6]], 2)
        assert model.training
        assert model.config._attn_implementation == "sdpa"
        assert model(torch.tensor([[5, 6]])).logits.requires_grad
    finally:
        model.eval()


def test_samples_do_not_depend_on_the_batch() -> None:
    model, prompts = tiny_model("qwen3"), random_prompts((5, 9, 13))

    def request_for(at: int, **more: Any) -> Request:
        return Request(prompt=prompts[at], max_new=12, temperature=0.8, top_k=40, top_p=0.95,
                       seed=at, id=at, **more)  # fmt: skip

    with Generator(model, budget="64MiB", max_batch=3) as generator:
        together = tokens_by_request(
            list(generator.run([request_for(0), request_for(1), request_for(2)]))
        )
        single = tokens_by_request(list(generator.run([request_for(1)])))
        second = tokens_by_request(list(generator.run([Request(**_with_seed(request_for(1), 99))])))

    assert single[1] == together[1]
    assert second[1] != together[1]


def _with_seed(request: Request, seed: int) -> dict[str, Any]:
    names = ("prompt", "max_new", "temperature", "top_k", "top_p", "id")
    return {name: getattr(request, name) for name in names} | {"seed": seed}
