"""Errors of the cache, and that it works afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kv import CacheFull, ContextError, KvError, NoSlot, VirtualCache
from penstock.kv.address_space import Space
from penstock.kv.errors import BatchError, BudgetError, ModelError, SequenceError
from tests.kv.caches import (
    LAYERS,
    close,
    config,
    grow,
    make_cache,
    open_page_files,
    random_tokens,
    write,
)
from tests.kv.fake_cuda_driver import DriverSpace


def test_errors_say_what_was_needed_and_what_was_available() -> None:
    cache = make_cache(DriverSpace(), slots=2, pages=4)
    first, second = cache.admit(), cache.admit()
    grow(cache, first, random_tokens(60))

    with pytest.raises(NoSlot, match=r"all 2 slots hold a live sequence\. Finish or preempt one"):
        cache.admit()
    with pytest.raises(CacheFull, match=r"needs 3 more pages of 4\.00 KiB") as full:
        cache.prepare([(second, 60)])
    assert (full.value.wanted, full.value.free, full.value.budget) == (3, 1, 4)
    with pytest.raises(ContextError, match="of 60 tokens cannot grow by 61, because"):
        cache.prepare([(second, 1), (first, 61)])
    with pytest.raises(SequenceError, match=r"cannot keep 2 new tokens of .* prepared for 0"):
        cache.advance([(first, 2)])
    with pytest.raises(SequenceError, match="cannot share a prefix of 61 tokens"):
        cache.admit(prefix=(first, 61))
    grow(cache, second, random_tokens(5))  # the others continue
    cache.finish(first)
    with pytest.raises(SequenceError, match="is finished"):
        cache.prepare([(first, 1)])
    cache.preempt(second)
    with pytest.raises(SequenceError, match="is in host memory; restore it first"):
        cache.prepare([(second, 1)])
    close(cache)


def test_a_closed_cache_refuses_every_operation() -> None:
    cache = make_cache(DriverSpace())
    sequence = cache.admit()
    close(cache)

    with pytest.raises(KvError, match="the cache is closed"):
        cache.prepare([(sequence, 1)])
    with pytest.raises(KvError, match="the cache is closed"), cache.rows([sequence]):
        pass
    part = torch.zeros(1, 1, 3, 24, dtype=torch.bfloat16)
    with pytest.raises(KvError, match="the cache is closed"):
        cache.update(part, part, 0)


def test_a_budget_below_one_page_per_sequence_is_refused() -> None:
    with pytest.raises(BudgetError, match="lower max_batch to 15") as caught:
        VirtualCache(config(), max_batch=16, max_context=64, budget="1000KiB", device="cpu")

    assert caught.value.wanted == 16 * 64 * 1024
    assert "penstock-kv" not in Path("/proc/self/maps").read_text()
    assert open_page_files() == []


def test_a_batch_that_was_not_prepared_is_refused() -> None:
    cache = make_cache(DriverSpace())
    first, second = cache.admit(), cache.admit()
    cache.prepare([(first, 2), (second, 2)])

    with pytest.raises(BatchError, match="at least one"), cache.rows([]):
        pass
    with pytest.raises(BatchError, match="twice"), cache.rows([first, first]):
        pass
    with pytest.raises(BatchError, match="3 tokens per row, but the batch is prepared for 2"):
        write(cache, [first, second], random_tokens(6).view(2, 3, LAYERS, 2, 1, 24))
    with pytest.raises(BatchError, match="keys of 1 rows"), cache.rows([first, second]):
        cache.update(*(torch.zeros(1, 1, 1, 24, dtype=torch.bfloat16),) * 2, 0)
    with cache.rows([first]), pytest.raises(SequenceError, match="leave the block first"):
        cache.finish(first)
    close(cache)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (torch.zeros(1, 1, 3, 24), "in torch.float32 on cpu, but the cache holds torch.bfloat16"),
        (torch.zeros(1, 2, 3, 24, dtype=torch.bfloat16), "of 2 heads of size 24"),
    ],
)
def test_keys_of_another_model_are_refused(keys: torch.Tensor, message: str) -> None:
    cache = make_cache(DriverSpace())

    with pytest.raises(ModelError, match=message):
        cache.update(keys, keys, 0)
    close(cache)


def test_a_model_with_another_kind_of_cache_is_refused() -> None:
    from transformers import Qwen3NextConfig

    with pytest.raises(ModelError, match="use transformers' DynamicCache"):
        VirtualCache(Qwen3NextConfig(), max_batch=1, max_context=8, budget="1MiB", device="cpu")


def test_a_new_batch_size_needs_a_reset(space: Space) -> None:
    cache = make_cache(space)
    part: Any = torch.zeros(2, 1, 3, 24, dtype=torch.bfloat16, device=cache.views.flat[0][0].device)
    cache.update(part, part, 0)

    with pytest.raises(BatchError, match="passed 3 rows to a cache that holds 2"):
        cache.update(part[[0, 0, 0]], part[[0, 0, 0]], 1)
    cache.reset()
    cache.update(part[[0, 0, 0]], part[[0, 0, 0]], 0)
    assert issubclass(BatchError, KvError)
    close(cache)
