"""Pages ahead of need: races with delays, failures that reach the caller, an end that is one."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from penstock.kv.cache import VirtualCache
from penstock.kv.errors import BrokenCacheError, GrowthError, SpaceError
from tests.kv.caches import cache, close, grow, read, some
from tests.kv.driver import DriverSpace

THREAD = "penstock-kv-growth"


def in_thread() -> bool:
    return threading.current_thread().name == THREAD


def settled(made: VirtualCache) -> None:
    """Wait until the thread has nothing left to do."""
    table = made._table
    with table.lock:
        while table.grower._requests or any(s.growing for s in table.page_table.slots):
            table.lock.wait()


def test_pages_are_there_before_they_are_asked_for() -> None:
    made = cache(DriverSpace())
    sequence = made.admit()
    grow(made, sequence, some(10))
    inline = made.stats.grown_inline
    for _ in range(30):
        settled(made)
        grow(made, sequence, some(1))

    assert made.stats.grown_inline == inline == 1
    assert made.stats.grown_ahead == made.stats.live + made.stats.ahead - 1 > 1
    close(made)


def test_what_is_ahead_goes_to_whoever_needs_it() -> None:
    made = cache(DriverSpace(), slots=2, pages=4)
    first, second = made.admit(), made.admit()
    grow(made, first, some(20))
    settled(made)
    assert made.stats.ahead == 1

    grow(made, second, some(60))

    assert (made.stats.live, made.stats.ahead, made.stats.free) == (4, 0, 0)
    close(made)


def test_an_exception_in_the_thread_reaches_the_next_prepare_once() -> None:
    made = cache(space := DriverSpace())
    sequence = made.admit()
    space.driver.fail = lambda call: call == "cuMemSetAccess" and in_thread()
    kept = some(20)
    grow(made, sequence, kept)
    settled(made)

    with pytest.raises(GrowthError, match="cuMemSetAccess: error 1") as caught:
        made.prepare([(sequence, 30)])

    assert isinstance(caught.value.__cause__, SpaceError)
    space.driver.fail = lambda call: False
    made.prepare([(sequence, 30)])
    assert sequence.room == 30
    assert (read(made, sequence) == kept).all()
    close(made)
    assert not space.driver.alive


def test_a_failed_prepare_leaves_everything_as_it_was() -> None:
    made = cache(space := DriverSpace())
    rows = [made.admit() for _ in range(3)]
    texts = [some(20), some(30), some(5)]
    for row, text in zip(rows, texts, strict=True):
        grow(made, row, text)
    settled(made)
    before, calls = made.stats, iter([False] * 3 + [True] + [False] * 1000)
    space.driver.fail = lambda call: call == "cuMemMap" and not in_thread() and next(calls)

    with pytest.raises(SpaceError, match="cuMemMap"):
        made.prepare([(row, 80) for row in rows])

    assert made.stats == before
    assert [row.room for row in rows] == [0, 0, 0]
    assert all((read(made, r) == t).all() for r, t in zip(rows, texts, strict=True))
    close(made)


def test_a_row_left_without_its_pages_is_said_and_not_read() -> None:
    made = cache(space := DriverSpace())
    rows = [made.admit() for _ in range(3)]
    for row in rows:
        grow(made, row, some(20))
    settled(made)
    space.driver.fail = lambda call: call == "cuMemMap"

    with pytest.raises(BrokenCacheError, match="close the cache"), made.rows([rows[2], rows[0]]):
        pass
    with pytest.raises(BrokenCacheError):
        made.prepare([(rows[1], 1)])
    space.driver.fail = lambda call: False
    made.close()
    made._table.pool.close(lost=True)
    assert not space.driver.mapped
    assert not space.driver.alive
    assert not space.driver.ranges


@pytest.mark.parametrize("seed", range(3))
def test_races_lose_no_token(seed: int) -> None:
    """The thread sleeps where it hurts: between its claim, its calls and its publishing."""
    dice, chance = random.Random(seed), random.Random(seed + 100)
    made = cache(space := DriverSpace(), slots=4, pages=16)

    def late(call: str) -> None:
        if in_thread() and chance.random() < 0.3:
            time.sleep(0.001)

    space.driver.before = late
    truth = {made.admit(): some(0) for _ in range(3)}
    for _ in range(120):
        sequence = dice.choice(list(truth))
        if dice.random() < 0.1:
            made.finish(sequence)
            del truth[sequence]
            truth[made.admit()] = some(0)
        elif len(truth[sequence]) < 90:
            new = some(dice.randrange(1, 12))
            grow(made, sequence, new)
            truth[sequence] = torch.cat([truth[sequence], new])
        if dice.random() < 0.2:
            with made.rows(dice.sample(list(truth), len(truth))):
                pass
        for sequence, tokens in truth.items():
            assert (read(made, sequence) == tokens).all()
    close(made)
    assert not space.driver.mapped


def test_the_thread_ends_with_the_cache() -> None:
    made = cache(DriverSpace())
    assert any(t.name == THREAD for t in threading.enumerate())

    close(made)

    assert not any(t is made._table.grower._thread for t in threading.enumerate())
    made.close()  # a second time is nothing


def test_a_slow_page_does_not_hold_up_the_others() -> None:
    """While the thread maps for one slot, another sequence can be prepared."""
    made = cache(space := DriverSpace())
    first, second = made.admit(), made.admit()
    gate, entered = threading.Event(), threading.Event()

    def wait(call: str) -> None:
        if in_thread() and call == "cuMemMap":
            entered.set()
            gate.wait()

    space.driver.before = wait
    grow(made, first, some(20))
    entered.wait()

    made.prepare([(second, 50)])

    assert second.room == 50
    gate.set()
    close(made)
