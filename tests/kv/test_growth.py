"""Mapping pages ahead of need: races, failures that reach the caller, and shutdown."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from penstock.kv.cache import VirtualCache
from penstock.kv.errors import BrokenCacheError, GrowthError, SpaceError
from tests.kv.caches import close, grow, make_cache, random_tokens, read
from tests.kv.fake_cuda_driver import DriverSpace

THREAD = "penstock-kv-growth"


def in_thread() -> bool:
    return threading.current_thread().name == THREAD


def wait_until_idle(cache: VirtualCache) -> None:
    """Wait until the thread has nothing left to do."""
    table = cache._table
    with table.lock:
        while table.grower._requests or any(s.growing for s in table.page_table.slots):
            table.lock.wait()


def test_pages_are_mapped_before_they_are_needed() -> None:
    cache = make_cache(DriverSpace())
    sequence = cache.admit()
    grow(cache, sequence, random_tokens(10))
    inline = cache.stats.grown_inline
    for _ in range(30):
        wait_until_idle(cache)
        grow(cache, sequence, random_tokens(1))

    assert cache.stats.grown_inline == inline == 1
    assert cache.stats.grown_ahead == cache.stats.live + cache.stats.ahead - 1 > 1
    close(cache)


def test_pages_ahead_of_need_are_reclaimed_for_others() -> None:
    cache = make_cache(DriverSpace(), slots=2, pages=4)
    first, second = cache.admit(), cache.admit()
    grow(cache, first, random_tokens(20))
    wait_until_idle(cache)
    assert cache.stats.ahead == 1

    grow(cache, second, random_tokens(60))

    assert (cache.stats.live, cache.stats.ahead, cache.stats.free) == (4, 0, 0)
    close(cache)


def test_an_exception_in_the_thread_reaches_the_next_prepare_once() -> None:
    cache = make_cache(space := DriverSpace())
    sequence = cache.admit()
    space.driver.fail = lambda call: call == "cuMemSetAccess" and in_thread()
    kept = random_tokens(20)
    grow(cache, sequence, kept)
    wait_until_idle(cache)

    with pytest.raises(GrowthError, match="cuMemSetAccess: error 1") as caught:
        cache.prepare([(sequence, 30)])

    assert isinstance(caught.value.__cause__, SpaceError)
    space.driver.fail = lambda call: False
    cache.prepare([(sequence, 30)])
    assert sequence.room == 30
    assert (read(cache, sequence) == kept).all()
    close(cache)
    assert not space.driver.alive


def test_a_failed_prepare_leaves_everything_as_it_was() -> None:
    cache = make_cache(space := DriverSpace())
    rows = [cache.admit() for _ in range(3)]
    texts = [random_tokens(20), random_tokens(30), random_tokens(5)]
    for row, text in zip(rows, texts, strict=True):
        grow(cache, row, text)
    wait_until_idle(cache)
    before, calls = cache.stats, iter([False] * 3 + [True] + [False] * 1000)
    space.driver.fail = lambda call: call == "cuMemMap" and not in_thread() and next(calls)

    with pytest.raises(SpaceError, match="cuMemMap"):
        cache.prepare([(row, 80) for row in rows])

    assert cache.stats == before
    assert [row.room for row in rows] == [0, 0, 0]
    assert all((read(cache, r) == t).all() for r, t in zip(rows, texts, strict=True))
    close(cache)


def test_a_row_left_without_its_pages_breaks_the_cache() -> None:
    cache = make_cache(space := DriverSpace())
    rows = [cache.admit() for _ in range(3)]
    for row in rows:
        grow(cache, row, random_tokens(20))
    wait_until_idle(cache)
    space.driver.fail = lambda call: call == "cuMemMap"

    with pytest.raises(BrokenCacheError, match="close the cache"), cache.rows([rows[2], rows[0]]):
        pass
    with pytest.raises(BrokenCacheError):
        cache.prepare([(rows[1], 1)])
    space.driver.fail = lambda call: False
    cache.close()
    cache._table.pool.close(lost=True)
    assert not space.driver.mapped
    assert not space.driver.alive
    assert not space.driver.ranges


@pytest.mark.parametrize("seed", range(3))
def test_races_lose_no_token(seed: int) -> None:
    """The thread sleeps at bad moments: between its claim, its driver calls and its publication."""
    dice, chance = random.Random(seed), random.Random(seed + 100)
    cache = make_cache(space := DriverSpace(), slots=4, pages=16)

    def late(call: str) -> None:
        if in_thread() and chance.random() < 0.3:
            time.sleep(0.001)

    space.driver.before = late
    truth = {cache.admit(): random_tokens(0) for _ in range(3)}
    for _ in range(120):
        sequence = dice.choice(list(truth))
        if dice.random() < 0.1:
            cache.finish(sequence)
            del truth[sequence]
            truth[cache.admit()] = random_tokens(0)
        elif len(truth[sequence]) < 90:
            new = random_tokens(dice.randrange(1, 12))
            grow(cache, sequence, new)
            truth[sequence] = torch.cat([truth[sequence], new])
        if dice.random() < 0.2:
            with cache.rows(dice.sample(list(truth), len(truth))):
                pass
        for sequence, tokens in truth.items():
            assert (read(cache, sequence) == tokens).all()
    close(cache)
    assert not space.driver.mapped


def test_the_thread_ends_with_the_cache() -> None:
    cache = make_cache(DriverSpace())
    assert any(t.name == THREAD for t in threading.enumerate())

    close(cache)

    assert not any(t is cache._table.grower._thread for t in threading.enumerate())
    cache.close()  # closing again does nothing


def test_a_slow_page_does_not_delay_other_sequences() -> None:
    """While the thread maps for one slot, another sequence can be prepared."""
    cache = make_cache(space := DriverSpace())
    first, second = cache.admit(), cache.admit()
    gate, entered = threading.Event(), threading.Event()

    def wait(call: str) -> None:
        if in_thread() and call == "cuMemMap":
            entered.set()
            gate.wait()

    space.driver.before = wait
    grow(cache, first, random_tokens(20))
    entered.wait()

    cache.prepare([(second, 50)])

    assert second.room == 50
    gate.set()
    close(cache)
