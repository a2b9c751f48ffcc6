"""Generated tokens are those of transformers, whatever shares the batch and the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.generate.generator import Generator
from penstock.generate.requests import Request, TokenChunk
from tests.kv.generating import (
    FAMILIES,
    alone,
    gathered,
    model_of,
    prompts_of,
    run,
    small_generator,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 17, 30, 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_a_dynamic_cache_alone(family: str) -> None:
    model, prompts = model_of(family), prompts_of(LENGTHS)
    expected = [alone(model, prompt, 20) for prompt in prompts]

    with Generator(model, budget="64MiB", max_batch=3, prefill_chunk=16) as generator:
        assert run(generator, prompts, 20) == expected

    assert len({tuple(answer) for answer in expected}) > 1
    assert all(len(set(answer)) > 1 for answer in expected)


@pytest.mark.parametrize(("max_batch", "chunk"), [(1, 512), (2, 3), (6, 1), (6, 7)])
def test_batch_and_chunk_do_not_matter(max_batch: int, chunk: int) -> None:
    model, prompts = model_of("mistral"), prompts_of(LENGTHS)
    expected = [alone(model, prompt, 12) for prompt in prompts]

    with Generator(model, budget="64MiB", max_batch=max_batch, prefill_chunk=chunk) as generator:
        assert run(generator, prompts, 12) == expected


def test_prompts_are_read_in_larger_chunks_while_nobody_decodes() -> None:
    model, prompts = model_of("llama"), prompts_of((30, 30))
    seen: list[list[int]] = []
    with Generator(model, budget="64MiB", max_batch=2) as generator:
        generator._scheduler.chunks = (4, 16)
        carried_out = generator.forward.forward

        def forward(cache: Any, passes: Any) -> Any:
            seen.append([each.new for each in passes])
            return carried_out(cache, passes)

        generator.forward.forward = forward  # type: ignore[method-assign]
        generator.submit(Request(prompt=prompts[0], max_new=30))
        for _ in range(3):
            generator.step()
        generator.submit(Request(prompt=prompts[1], max_new=1))
        for _ in range(8):
            generator.step()

    assert seen[:5] == [[16], [14], [1], [1, 4], [1, 4]]


def test_requests_may_come_one_after_the_other() -> None:
    model, prompts = model_of("llama"), prompts_of(LENGTHS)
    expected = [alone(model, prompt, 12) for prompt in prompts]

    def over_time() -> Any:
        for prompt in prompts:
            yield Request(prompt=prompt, max_new=12)
            yield from [None] * 3  # three steps without news

    with Generator(model, budget="64MiB", max_batch=3, prefill_chunk=16) as generator:
        found = gathered(list(generator.run(over_time())))

    assert [found[at] for at in range(len(prompts))] == expected


def test_pieces_come_as_tokens_are_made() -> None:
    model = model_of("llama")
    with Generator(model, budget="64MiB", max_batch=2) as generator:
        generator.submit(Request(prompt=[5, 6, 7], max_new=3, id="a"))
        generator.submit(Request(prompt=[8, 9], max_new=2, id="b"))
        steps = [generator.step() for _ in range(3)]

        assert generator.idle

    def shape(piece: TokenChunk) -> tuple[object, int, object]:
        return piece.request, len(piece.tokens), piece.finished

    assert [sorted(map(shape, pieces)) for pieces in steps] == [
        [("a", 1, None), ("b", 1, None)],
        [("a", 1, None), ("b", 1, "length")],
        [("a", 1, "length")],
    ]


def test_a_common_beginning_is_computed_once() -> None:
    model = model_of("gemma3")
    beginning, *ends = prompts_of((70, 3, 9, 1, 20))
    prompts = [beginning + end for end in ends]
    expected = [alone(model, prompt, 10) for prompt in prompts]

    with Generator(model, budget="64MiB", max_batch=4, prefill_chunk=24) as generator:
        assert run(generator, prompts, 10) == expected

        assert generator.counts.shared_tokens == sum(
            _common(prompts[0], prompt) for prompt in prompts[1:]
        )


def _common(one: list[int], other: list[int]) -> int:
    """One token is always computed: it gives the scores."""
    same = 0
    while same < min(len(one), len(other) - 1) and one[same] == other[same]:
        same += 1
    return same


def test_a_dry_pool_preempts_and_tokens_stay_the_same() -> None:
    model, prompts = model_of("gemma2"), prompts_of((20, 31, 8, 25))
    expected = [alone(model, prompt, 24) for prompt in prompts]

    with small_generator(model, tokens=110, max_batch=4) as generator:
        assert run(generator, prompts, 24) == expected

        assert generator.counts.preemptions > 0


def test_sequences_that_share_pages_can_be_preempted() -> None:
    model = model_of("qwen2")
    beginning, *ends = prompts_of((40, 3, 9, 6))
    prompts = [beginning + end for end in ends]
    expected = [alone(model, prompt, 24) for prompt in prompts]

    with small_generator(model, tokens=100, max_batch=3) as generator:
        assert run(generator, prompts, 24) == expected

        assert generator.counts.preemptions > 0
        assert generator.counts.shared_tokens > 0


def test_the_oldest_is_never_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = model_of("llama"), prompts_of((30, 30, 30))
    with small_generator(model, tokens=100, max_batch=3) as generator:
        sent: list[object] = []
        preempt = generator.cache.preempt

        def watched(sequence: Any) -> Any:
            live = [each.sequence for each in generator._scheduler.running]
            sent.append(live.index(sequence))
            return preempt(sequence)

        monkeypatch.setattr(generator.cache, "preempt", watched)
        run(generator, prompts, 20)

    assert sent
    assert 0 not in sent


def test_a_model_in_training_is_left_in_training() -> None:
    model = model_of("llama")
    model.train()
    try:
        with Generator(model, budget="64MiB") as generator:
            run(generator, [[5, 6]], 2)
        assert model.training
        assert model.config._attn_implementation == "sdpa"
        assert model(torch.tensor([[5, 6]])).logits.requires_grad
    finally:
        model.eval()


def test_draws_do_not_depend_on_company() -> None:
    model, prompts = model_of("qwen3"), prompts_of((5, 9, 13))

    def asked(at: int, **more: Any) -> Request:
        return Request(prompt=prompts[at], max_new=12, temperature=0.8, top_k=40, top_p=0.95,
                       seed=at, id=at, **more)  # fmt: skip

    with Generator(model, budget="64MiB", max_batch=3) as generator:
        together = gathered(list(generator.run([asked(0), asked(1), asked(2)])))
        single = gathered(list(generator.run([asked(1)])))
        other = gathered(list(generator.run([Request(**_with_seed(asked(1), 99))])))

    assert single[1] == together[1]
    assert other[1] != together[1]


def _with_seed(request: Request, seed: int) -> dict[str, Any]:
    names = ("prompt", "max_new", "temperature", "top_k", "top_p", "id")
    return {name: getattr(request, name) for name in names} | {"seed": seed}
