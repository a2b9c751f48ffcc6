"""Sequences of the cache share pages, move between rows and release memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from penstock.kv import CacheFull, KvError, NoSlot, PagePool, VirtualCache
from penstock.kv.address_space import Space
from penstock.machine.limits import HostMemory
from penstock.units import GiB
from tests.kv.caches import (
    LAYERS,
    bytes_after,
    close,
    config,
    grow,
    make_cache,
    open_page_files,
    random_tokens,
    read,
)
from tests.kv.fake_cuda_driver import DriverSpace


def test_a_prefix_is_shared_until_a_sequence_writes(space: Space) -> None:
    cache = make_cache(space, pages=64)
    text = random_tokens(100)
    first = cache.admit()
    grow(cache, first, text)
    live_before = cache.stats.live

    second = cache.admit(prefix=(first, 90))

    assert cache.stats.live == live_before
    assert torch.equal(read(cache, second), text[:90])
    more = random_tokens(7)
    grow(cache, second, more)
    assert cache.stats.live == live_before + 1  # the page in which the prefix ends
    grow(cache, first, random_tokens(3))
    assert torch.equal(read(cache, second), torch.cat([text[:90], more]))
    assert torch.equal(read(cache, first)[:100], text)
    cache.finish(first)
    assert torch.equal(read(cache, second), torch.cat([text[:90], more]))
    close(cache)


def test_pages_shared_only_by_finished_sequences_are_reclaimed() -> None:
    """Two slots keep the pages for reuse, and no sequence needs them."""
    cache = make_cache(DriverSpace(), slots=3, pages=8)
    first = cache.admit()
    grow(cache, first, random_tokens(60))
    second = cache.admit(prefix=(first, 60))
    cache.finish(first)
    cache.finish(second)
    assert cache.stats.kept > 1

    cache.resize(3 * 4096)
    assert cache.stats.kept <= 3
    new = cache.admit()
    grow(cache, new, text := random_tokens(60))  # all three pages
    assert torch.equal(read(cache, new), text)
    close(cache)


def test_the_last_holder_of_a_page_writes_in_place() -> None:
    cache = make_cache(space := DriverSpace())
    first = cache.admit()
    grow(cache, first, random_tokens(30))
    second = cache.admit(prefix=(first, 30))
    shared = cache._table.slot_of(first).pages[1]
    live = cache.stats.live

    grow(cache, first, random_tokens(1))
    space.driver.calls.clear()
    grow(cache, second, random_tokens(1))

    assert cache.stats.live == live + 1
    assert cache._table.slot_of(first).pages[1] != shared
    assert cache._table.slot_of(second).pages[1] == shared
    assert "cuMemUnmap" not in space.driver.calls
    close(cache)


def test_rows_become_adjacent_in_any_order_without_a_copy(space: Space) -> None:
    cache = make_cache(space, slots=5, pages=64)
    rows = [cache.admit() for _ in range(5)]
    texts = [random_tokens(n) for n in (3, 40, 0, 70, 25)]
    for row, text in zip(rows, texts, strict=True):
        grow(cache, row, text)
    before = cache.stats

    for order in ([3, 1], [4, 0, 2], [0, 4, 1, 3, 2]):
        with cache.rows([rows[i] for i in order]) as batch:
            assert batch.lengths.tolist() == [len(texts[i]) for i in order]
            assert batch.longest == max(len(texts[i]) for i in order)
            slots = [rows[i].slot for i in order]
            assert slots == list(range(batch.first, batch.first + len(order)))

    assert cache.stats.live == before.live
    assert all(torch.equal(read(cache, r), t) for r, t in zip(rows, texts, strict=True))
    close(cache)


def test_adjacent_rows_are_not_moved() -> None:
    cache = make_cache(space := DriverSpace(), slots=5)
    rows = [cache.admit() for _ in range(5)]
    for row in rows:
        grow(cache, row, random_tokens(20))
    cache.finish(rows[1])
    space.driver.calls.clear()

    with cache.rows(cache.arrange([rows[4], rows[2], rows[3]])) as batch:
        assert batch.first == 2

    assert "cuMemUnmap" not in space.driver.calls
    close(cache)


def test_padding_reads_as_zeros_even_after_a_sequence_of_nans(space: Space) -> None:
    cache = make_cache(space, slots=3, pages=64)
    bad = cache.admit()
    nan = torch.full_like(random_tokens(100), 0x7FC0)
    grow(cache, bad, nan)
    cache.finish(bad)
    rows = [cache.admit(), cache.admit()]
    grow(cache, rows[0], random_tokens(2))
    grow(cache, rows[1], random_tokens(90))

    cache.prepare([(row, 1) for row in rows])
    with cache.rows(rows) as batch:
        for layer in range(LAYERS):
            keys, values = batch.padded(layer, 1)
            assert keys.shape[2] == 91
            assert not keys[0, :, 2:].any()
            assert not values[0, :, 2:].any()
    close(cache)


def test_admit_chooses_the_slot_whose_kept_pages_fit_best() -> None:
    cache = make_cache(DriverSpace(), slots=4, pages=64)
    rows = [cache.admit() for _ in range(4)]
    for row, length in zip(rows, (60, 10, 110, 5), strict=True):
        grow(cache, row, random_tokens(length))
    kept = {row: row.slot for row in rows}
    for row in rows:
        cache.finish(row)

    assert cache.admit(expect=50).slot == kept[rows[0]]
    assert cache.admit(expect=119).slot == kept[rows[2]]
    close(cache)


def test_kept_pages_are_reused_zeroed_and_without_mapping() -> None:
    cache = make_cache(space := DriverSpace(), pages=64)
    first = cache.admit()
    grow(cache, first, random_tokens(100))
    cache.finish(first)
    assert cache.stats.kept >= 5
    space.driver.calls.clear()

    second = cache.admit(expect=100)
    assert not bytes_after(cache, second).any()
    cache.prepare([(second, 90)])

    assert "cuMemMap" not in space.driver.calls
    close(cache)


def test_a_restored_sequence_has_the_tokens_it_had(space: Space) -> None:
    cache = make_cache(space, slots=1, pages=8)
    first, text = cache.admit(), random_tokens(100)
    grow(cache, first, text)

    moved = cache.preempt(first)

    assert moved == 100 * 192
    assert not first.resident
    second = cache.admit()
    grow(cache, second, random_tokens(100))
    with pytest.raises(NoSlot):
        cache.restore(first)
    cache.finish(second)
    cache.restore(first)
    assert torch.equal(read(cache, first), text)
    close(cache)


def test_a_smaller_budget_reclaims_pages_that_no_sequence_needs() -> None:
    cache = make_cache(space := DriverSpace(), pages=32)
    first, second = cache.admit(), cache.admit()
    grow(cache, first, random_tokens(60))
    grow(cache, second, random_tokens(60))
    cache.finish(second)

    cache.resize(3 * 4096)

    assert (cache.budget, len(space.driver.alive)) == (3 * 4096, 3)
    with pytest.raises(CacheFull, match="pages are available"):
        cache.resize(2 * 4096)
    with pytest.raises(CacheFull):
        cache.prepare([(first, 10)])
    cache.resize("1MiB")
    cache.prepare([(first, 10)])
    close(cache)


def test_two_caches_of_one_pool_share_its_budget() -> None:
    space = DriverSpace()
    pool = PagePool(space, 8 * 4096)
    one, two = (
        VirtualCache(
            config(),
            max_batch=1,
            max_context=300,
            budget="1MiB",
            dtype=torch.bfloat16,
            pool=pool,
        )
        for _ in range(2)
    )
    held = pool.allocate(3, what="training")
    first, second = one.admit(), two.admit()
    one.prepare([(first, 4096 * 3 // 192)])
    with pytest.raises(CacheFull) as caught:
        two.prepare([(second, 200)])
    assert caught.value.wanted == 10
    assert one.stats.others == pool.used - one.stats.live - one.stats.ahead

    pool.release(held)
    one.close()
    two.prepare([(second, 80)])
    two.close()
    pool.close()
    assert not space.driver.alive
    space.close()


def test_close_removes_all_mappings_and_files() -> None:
    cache = VirtualCache(config(), max_batch=2, max_context=64, budget="1MiB", device="cpu")
    sequence = cache.admit()
    cache.prepare([(sequence, 40)])
    assert "penstock-kv" in Path("/proc/self/maps").read_text()

    cache.close()

    assert "penstock-kv" not in Path("/proc/self/maps").read_text()
    assert open_page_files() == []


def test_a_garbage_collected_cache_is_closed() -> None:
    cache = VirtualCache(config(), max_batch=2, max_context=64, budget="1MiB", device="cpu")
    cache.prepare([(cache.admit(), 40)])
    del cache
    gc.collect()

    assert "penstock-kv" not in Path("/proc/self/maps").read_text()


def test_a_cache_without_a_budget_takes_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(total=8 * GiB, free=4 * GiB, limit=None)
    monkeypatch.setattr("penstock.kv.cache.host_memory", lambda _: memory)
    with VirtualCache(config(), max_batch=2, max_context=64, device="cpu") as cache:
        assert cache.stats.pages_total * cache.stats.page_nbytes <= 4 * GiB * 0.95 - GiB
        assert (cache.stats.pages_total + 1) * cache.stats.page_nbytes > 4 * GiB * 0.95 - GiB - 1
    memory = HostMemory(total=8 * GiB, free=GiB, limit=None)
    with pytest.raises(KvError, match="budget"):
        VirtualCache(config(), max_batch=2, max_context=64, device="cpu")
