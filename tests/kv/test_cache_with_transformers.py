"""transformers' `generate` gives the same tokens with this cache as with its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from penstock.kv import VirtualCache
from tests.kv.small_models import KINDS, model, prompts

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=KINDS)
def some_model(request: pytest.FixtureRequest) -> Any:
    return model(request.param)


def make(model: Any, **changes: Any) -> VirtualCache:
    wanted: dict[str, Any] = {
        "max_batch": 9,
        "max_context": 160,
        "budget": "2MiB",
        "page_nbytes": 4096,
    }
    return VirtualCache(model.config, device="cpu", dtype=torch.float32, **(wanted | changes))


@pytest.fixture
def cache(some_model: Any) -> Iterator[VirtualCache]:
    with make(some_model) as opened:
        yield opened


def generate(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, **how: Any) -> Any:
    wanted = {"max_new_tokens": 14, "do_sample": False}
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **(wanted | how))


def test_greedy_tokens_are_equal_over_several_turns(some_model: Any, cache: VirtualCache) -> None:
    ids, mask = prompts()
    plain = DynamicCache(config=some_model.config)
    for _ in range(2):
        want = generate(some_model, plain, ids, mask)
        got = generate(some_model, cache, ids, mask)

        assert torch.equal(got, want)
        said = torch.randint(3, 128, (3, 5), generator=torch.Generator().manual_seed(2))
        ids = torch.cat([got, said], dim=1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    assert cache.stats.waste < 3 * 4096


def test_beams_share_pages_and_give_equal_tokens(some_model: Any, cache: VirtualCache) -> None:
    ids, mask = prompts()

    want = generate(some_model, None, ids, mask, num_beams=3)
    got = generate(some_model, cache, ids, mask, num_beams=3)

    assert torch.equal(got, want)
    assert cache.stats.shared > 0


def test_update_returns_views_of_the_cache() -> None:
    llama = model("Llama")
    with make(llama) as cache:
        ids, mask = prompts()
        llama(ids, attention_mask=mask, past_key_values=cache)
        new = torch.randn(3, 2, 1, 8)

        keys, values = cache.update(new, 2 * new, 1)

        assert keys.shape == values.shape == (3, 2, 21, 8)
        assert torch.equal(keys[:, :, 20:], new)
        row, token = cache.views.rows[0][0].stride(0), 3 * 2 * 2 * 8
        assert keys.stride() == values.stride() == (row, 8, token, 1)
        assert (
            keys.untyped_storage().data_ptr() == cache.views.flat[0][0].untyped_storage().data_ptr()
        )


def test_a_reset_cache_reuses_its_pages() -> None:
    mistral = model("Mistral")
    ids, mask = prompts()
    want = generate(mistral, None, ids[:2], mask[:2])
    with make(mistral) as cache:
        generate(mistral, cache, ids, mask)
        inline = cache.stats.grown_inline

        cache.reset()
        got = generate(mistral, cache, ids[:2], mask[:2])

        assert torch.equal(got, want)
        assert cache.stats.grown_inline == inline


def test_cropped_tokens_can_be_written_again() -> None:
    llama = model("Llama")
    ids, mask = prompts()
    with make(llama) as cache:
        llama(ids, attention_mask=mask, past_key_values=cache)
        cache.crop(-6)
        assert cache.get_seq_length() == 14
        got = llama(ids[:, 14:], attention_mask=mask, past_key_values=cache).logits
    want = llama(ids, attention_mask=mask).logits[:, 14:]

    torch.testing.assert_close(got, want)


def test_rows_can_be_repeated_and_selected() -> None:
    llama = model("Llama")
    ids, mask = prompts()
    with make(llama) as cache:
        llama(ids, attention_mask=mask, past_key_values=cache)
        cache.batch_repeat_interleave(3)
        assert cache.batch_size == 9
        assert cache.stats.shared == cache.stats.live
        cache.batch_select_indices(torch.tensor([8, 0]))
        token = torch.tensor([[5], [6]])
        whole = torch.cat([ids[[2, 0]], token], dim=1)
        wide = torch.nn.functional.pad(mask[[2, 0]], (0, 1), value=1)

        got = llama(token, attention_mask=wide, past_key_values=cache).logits

    want = llama(whole, attention_mask=wide).logits[:, -1:]
    torch.testing.assert_close(got, want)


def ragged(model: Any, cache: VirtualCache, rows: list[Any], ids: torch.Tensor) -> Any:
    """Call the model on rows of different lengths with a manual mask; return the last logits."""
    new = ids.shape[1]
    with cache.rows(rows) as batch:
        past = batch.lengths.long()[:, None]
        positions = past + torch.arange(new)
        seen = torch.arange(batch.length_after(new))[None, None] <= positions[:, :, None]
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        out = model(
            ids, position_ids=positions, attention_mask=mask[:, None], past_key_values=cache
        )
    return out.logits[:, -1]


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_rows_of_different_lengths_give_the_logits_of_each_row_alone(kind: str) -> None:
    """Prefill one by one and decode together; one row shares a prefix, one is preempted."""
    some_model = model(kind)
    texts = [torch.randint(3, 128, (n,)) for n in (31, 4, 90)]
    texts.append(torch.cat([texts[2][:50], texts[1]]))
    with make(some_model, max_batch=4) as cache, torch.no_grad():
        rows: list[Any] = []
        for i, text in enumerate(texts):
            rows.append(cache.admit(prefix=(rows[2], 50) if i == 3 else None))
            rest = text[rows[i].length :][None]
            cache.prepare([(rows[i], rest.shape[1])])
            ragged(some_model, cache, [rows[i]], rest)
            cache.advance([(rows[i], rest.shape[1])])
        assert cache.stats.shared > 0
        for step in range(12):
            if step == 6:
                cache.preempt(rows[1])
                cache.restore(rows[1])
            order = [2, 0, 3, 1] if step % 2 else [0, 1, 2, 3]
            new = torch.randint(3, 128, (4, 1))
            texts = [torch.cat([text, new[i]]) for i, text in enumerate(texts)]
            batch = [rows[i] for i in order]
            cache.prepare([(row, 1) for row in batch])
            got = ragged(some_model, cache, batch, new[order])
            cache.advance([(row, 1) for row in batch])
            for logits, i in zip(got, order, strict=True):
                want = some_model(texts[i][None]).logits[0, -1]
                torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
