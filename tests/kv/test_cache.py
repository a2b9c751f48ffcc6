"""What the cache promises a generator: sharing, moving, giving back; and what it refuses."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from penstock.kv import CacheFull, NoSlot, PagePool, VirtualCache
from penstock.kv.address_space import Space
from tests.kv.caches import LAYERS, cache, close, config, files, grow, read, some, tail
from tests.kv.driver import DriverSpace


def test_a_prefix_is_shared_until_someone_writes(space: Space) -> None:
    made = cache(space, pages=64)
    text = some(100)
    first = made.admit()
    grow(made, first, text)
    alone = made.stats.live

    second = made.admit(prefix=(first, 90))

    assert made.stats.live == alone
    assert torch.equal(read(made, second), text[:90])
    more = some(7)
    grow(made, second, more)
    assert made.stats.live == alone + 1  # the page in which the prefix ends
    grow(made, first, some(3))
    assert torch.equal(read(made, second), torch.cat([text[:90], more]))
    assert torch.equal(read(made, first)[:100], text)
    made.finish(first)
    assert torch.equal(read(made, second), torch.cat([text[:90], more]))
    close(made)


def test_pages_that_only_finished_sequences_share_can_be_had() -> None:
    """Two slots keep them for reuse, and nobody needs them."""
    made = cache(DriverSpace(), slots=3, pages=8)
    first = made.admit()
    grow(made, first, some(60))
    second = made.admit(prefix=(first, 60))
    made.finish(first)
    made.finish(second)
    assert made.stats.kept > 1

    made.resize(3 * 4096)
    assert made.stats.kept <= 3
    new = made.admit()
    grow(made, new, text := some(60))  # all three pages
    assert torch.equal(read(made, new), text)
    close(made)


def test_the_last_holder_of_a_page_writes_in_place() -> None:
    made = cache(space := DriverSpace())
    first = made.admit()
    grow(made, first, some(30))
    second = made.admit(prefix=(first, 30))
    shared = made._table.slot_of(first).pages[1]
    live = made.stats.live

    grow(made, first, some(1))
    space.driver.calls.clear()
    grow(made, second, some(1))

    assert made.stats.live == live + 1
    assert made._table.slot_of(first).pages[1] != shared
    assert made._table.slot_of(second).pages[1] == shared
    assert "cuMemUnmap" not in space.driver.calls
    close(made)


def test_rows_in_any_order_are_neighbours_and_nothing_is_copied(space: Space) -> None:
    made = cache(space, slots=5, pages=64)
    rows = [made.admit() for _ in range(5)]
    texts = [some(n) for n in (3, 40, 0, 70, 25)]
    for row, text in zip(rows, texts, strict=True):
        grow(made, row, text)
    before = made.stats

    for order in ([3, 1], [4, 0, 2], [0, 4, 1, 3, 2]):
        with made.rows([rows[i] for i in order]) as batch:
            assert batch.lengths.tolist() == [len(texts[i]) for i in order]
            assert batch.longest == max(len(texts[i]) for i in order)
            slots = [rows[i].slot for i in order]
            assert slots == list(range(batch.first, batch.first + len(order)))

    assert made.stats.live == before.live
    assert all(torch.equal(read(made, r), t) for r, t in zip(rows, texts, strict=True))
    close(made)


def test_neighbours_stay_where_they_are() -> None:
    made = cache(space := DriverSpace(), slots=5)
    rows = [made.admit() for _ in range(5)]
    for row in rows:
        grow(made, row, some(20))
    made.finish(rows[1])
    space.driver.calls.clear()

    with made.rows(made.arrange([rows[4], rows[2], rows[3]])) as batch:
        assert batch.first == 2

    assert "cuMemUnmap" not in space.driver.calls
    close(made)


def test_padding_is_read_as_zeros_also_where_another_left_nans(space: Space) -> None:
    made = cache(space, slots=3, pages=64)
    bad = made.admit()
    nan = torch.full_like(some(100), 0x7FC0)
    grow(made, bad, nan)
    made.finish(bad)
    rows = [made.admit(), made.admit()]
    grow(made, rows[0], some(2))
    grow(made, rows[1], some(90))

    made.prepare([(row, 1) for row in rows])
    with made.rows(rows) as batch:
        for layer in range(LAYERS):
            keys, values = batch.padded(layer, 1)
            assert keys.shape[2] == 91
            assert not keys[0, :, 2:].any()
            assert not values[0, :, 2:].any()
    close(made)


def test_a_slot_is_chosen_by_what_it_kept() -> None:
    made = cache(DriverSpace(), slots=4, pages=64)
    rows = [made.admit() for _ in range(4)]
    for row, length in zip(rows, (60, 10, 110, 5), strict=True):
        grow(made, row, some(length))
    kept = {row: row.slot for row in rows}
    for row in rows:
        made.finish(row)

    assert made.admit(expect=50).slot == kept[rows[0]]
    assert made.admit(expect=119).slot == kept[rows[2]]
    close(made)


def test_kept_pages_are_used_again_without_a_map_and_without_their_bytes() -> None:
    made = cache(space := DriverSpace(), pages=64)
    first = made.admit()
    grow(made, first, some(100))
    made.finish(first)
    assert made.stats.kept >= 5
    space.driver.calls.clear()

    second = made.admit(expect=100)
    assert not tail(made, second).any()
    made.prepare([(second, 90)])

    assert "cuMemMap" not in space.driver.calls
    close(made)


def test_a_preempted_sequence_comes_back_as_it_was(space: Space) -> None:
    made = cache(space, slots=1, pages=8)
    first, text = made.admit(), some(100)
    grow(made, first, text)

    moved = made.preempt(first)

    assert moved == 100 * 192
    assert not first.resident
    second = made.admit()
    grow(made, second, some(100))
    with pytest.raises(NoSlot):
        made.restore(first)
    made.finish(second)
    made.restore(first)
    assert torch.equal(read(made, first), text)
    close(made)


def test_a_smaller_budget_takes_what_nobody_needs() -> None:
    made = cache(space := DriverSpace(), pages=32)
    first, second = made.admit(), made.admit()
    grow(made, first, some(60))
    grow(made, second, some(60))
    made.finish(second)

    made.resize(3 * 4096)

    assert (made.budget, len(space.driver.alive)) == (3 * 4096, 3)
    with pytest.raises(CacheFull, match="pages are available"):
        made.resize(2 * 4096)
    with pytest.raises(CacheFull):
        made.prepare([(first, 10)])
    made.resize("1MiB")
    made.prepare([(first, 10)])
    close(made)


def test_two_users_of_one_pool_share_its_budget() -> None:
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


def test_after_close_the_process_has_nothing_of_it() -> None:
    made = VirtualCache(config(), max_batch=2, max_context=64, budget="1MiB", device="cpu")
    sequence = made.admit()
    made.prepare([(sequence, 40)])
    assert "penstock-kv" in Path("/proc/self/maps").read_text()

    made.close()

    assert "penstock-kv" not in Path("/proc/self/maps").read_text()
    assert files() == []


def test_a_forgotten_cache_closes_itself() -> None:
    made = VirtualCache(config(), max_batch=2, max_context=64, budget="1MiB", device="cpu")
    made.prepare([(made.admit(), 40)])
    del made
    gc.collect()

    assert "penstock-kv" not in Path("/proc/self/maps").read_text()
