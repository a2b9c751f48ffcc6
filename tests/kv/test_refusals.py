"""What the cache refuses, and that it goes on afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kv import CacheFull, ContextError, KvError, NoSlot, VirtualCache
from penstock.kv.address_space import Space
from penstock.kv.errors import BatchError, BudgetError, ModelError, SequenceError
from tests.kv.caches import LAYERS, cache, close, config, files, grow, some, write
from tests.kv.driver import DriverSpace


def test_errors_say_what_was_wanted_and_what_there_was() -> None:
    made = cache(DriverSpace(), slots=2, pages=4)
    first, second = made.admit(), made.admit()
    grow(made, first, some(60))

    with pytest.raises(NoSlot, match=r"all 2 slots hold a live sequence\. Finish or preempt one"):
        made.admit()
    with pytest.raises(CacheFull, match=r"needs 3 more pages of 4\.00 KiB") as full:
        made.prepare([(second, 60)])
    assert (full.value.wanted, full.value.free, full.value.budget) == (3, 1, 4)
    with pytest.raises(ContextError, match="of 60 tokens cannot grow by 61, because"):
        made.prepare([(second, 1), (first, 61)])
    with pytest.raises(SequenceError, match=r"cannot keep 2 new tokens of .* prepared for 0"):
        made.advance([(first, 2)])
    with pytest.raises(SequenceError, match="cannot share a prefix of 61 tokens"):
        made.admit(prefix=(first, 61))
    grow(made, second, some(5))  # and the others go on
    made.finish(first)
    with pytest.raises(SequenceError, match="is finished"):
        made.prepare([(first, 1)])
    made.preempt(second)
    with pytest.raises(SequenceError, match="is in host memory; restore it first"):
        made.prepare([(second, 1)])
    close(made)


def test_a_closed_cache_is_refused_and_not_read() -> None:
    made = cache(DriverSpace())
    sequence = made.admit()
    close(made)

    with pytest.raises(KvError, match="the cache is closed"):
        made.prepare([(sequence, 1)])
    with pytest.raises(KvError, match="the cache is closed"), made.rows([sequence]):
        pass
    part = torch.zeros(1, 1, 3, 24, dtype=torch.bfloat16)
    with pytest.raises(KvError, match="the cache is closed"):
        made.update(part, part, 0)


def test_a_budget_below_a_page_for_each_is_refused() -> None:
    with pytest.raises(BudgetError, match="lower max_batch to 15") as caught:
        VirtualCache(config(), max_batch=16, max_context=64, budget="1000KiB", device="cpu")

    assert caught.value.wanted == 16 * 64 * 1024
    assert "penstock-kv" not in Path("/proc/self/maps").read_text()
    assert files() == []


def test_a_batch_that_does_not_fit_is_refused() -> None:
    made = cache(DriverSpace())
    first, second = made.admit(), made.admit()
    made.prepare([(first, 2), (second, 2)])

    with pytest.raises(BatchError, match="at least one"), made.rows([]):
        pass
    with pytest.raises(BatchError, match="twice"), made.rows([first, first]):
        pass
    with pytest.raises(BatchError, match="3 tokens per row, but the batch is prepared for 2"):
        write(made, [first, second], some(6).view(2, 3, LAYERS, 2, 1, 24))
    with pytest.raises(BatchError, match="keys of 1 rows"), made.rows([first, second]):
        made.update(*(torch.zeros(1, 1, 1, 24, dtype=torch.bfloat16),) * 2, 0)
    with made.rows([first]), pytest.raises(SequenceError, match="leave the block first"):
        made.finish(first)
    close(made)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (torch.zeros(1, 1, 3, 24), "in torch.float32 on cpu, but the cache holds torch.bfloat16"),
        (torch.zeros(1, 2, 3, 24, dtype=torch.bfloat16), "of 2 heads of size 24"),
    ],
)
def test_another_model_than_the_config_says_is_refused(keys: torch.Tensor, said: str) -> None:
    made = cache(DriverSpace())

    with pytest.raises(ModelError, match=said):
        made.update(keys, keys, 0)
    close(made)


def test_a_model_with_another_kind_of_cache_is_refused() -> None:
    from transformers import Qwen3NextConfig

    with pytest.raises(ModelError, match="use transformers' DynamicCache"):
        VirtualCache(Qwen3NextConfig(), max_batch=1, max_context=8, budget="1MiB", device="cpu")


def test_another_batch_needs_a_reset(space: Space) -> None:
    made = cache(space)
    part: Any = torch.zeros(2, 1, 3, 24, dtype=torch.bfloat16, device=made.views.flat[0][0].device)
    made.update(part, part, 0)

    with pytest.raises(BatchError, match="passed 3 rows to a cache that holds 2"):
        made.update(part[[0, 0, 0]], part[[0, 0, 0]], 1)
    made.reset()
    made.update(part[[0, 0, 0]], part[[0, 0, 0]], 0)
    assert issubclass(BatchError, KvError)
    close(made)
