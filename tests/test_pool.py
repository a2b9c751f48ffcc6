"""The staging pool: a slot is never had by two, and who keeps it from you has a name."""

from __future__ import annotations

import threading

import pytest

from penstock.memory.arena import Arena
from penstock.memory.pool import SlotError, SlotHeldError, StagingPool
from penstock.packing import Lifetime, pack
from penstock.units import KiB


class Work:
    """A transfer that finishes when told."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self.asked = 0

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    def settle(self, timeout: float | None = None) -> bool:
        self.asked += 1
        return self._finished.wait(timeout)

    def finish(self) -> None:
        self._finished.set()

    def __repr__(self) -> str:
        return "<write of layers.0>"


def row_of(count: int, nbytes: int = 8 * KiB, live: int = 1) -> StagingPool:
    """Tensors that follow each other, `live` of them at once."""
    items = [
        Lifetime(name=f"layers.{i}", nbytes=nbytes, start=i, end=i + live) for i in range(count)
    ]
    return StagingPool(pack(items))


def test_the_pool_takes_what_lives_at_once_and_no_more() -> None:
    arena = Arena(16 * KiB)
    items = [Lifetime(name=str(i), nbytes=8 * KiB, start=i, end=i + 2) for i in range(50)]

    pool = StagingPool(pack(items), arena)

    assert pool.nbytes == arena.stats.used == 16 * KiB


def test_a_step_allocates_nothing() -> None:
    arena = Arena(64 * KiB)
    items = [Lifetime(name=str(i), nbytes=8 * KiB, start=i, end=i + 2) for i in range(50)]
    pool = StagingPool(pack(items), arena)
    before = arena.stats
    addresses = set()

    for _ in range(3):
        for number in range(50):
            slot = pool.take(str(number))
            addresses.add(slot.offset)
            pool.give(slot)

    assert arena.stats == before
    assert len(addresses) == 2


def test_a_slot_is_the_tensors_own_bytes() -> None:
    pool = row_of(3, live=3)
    slots = [pool.take(f"layers.{i}") for i in range(3)]
    for number, slot in enumerate(slots):
        slot.view[:] = bytes([number + 1]) * slot.view.nbytes

    assert [set(slot.view) for slot in slots] == [{1}, {2}, {3}]


def test_waiting_for_a_slot_names_who_holds_it() -> None:
    pool = row_of(2)
    pool.take("layers.0")

    with pytest.raises(SlotHeldError, match=r"slot of layers\.1 .* held by layers\.0 \(in use\)"):
        pool.take("layers.1", timeout=0)
    assert pool.holders("layers.1") == {"layers.0": "in use"}


def test_a_slot_given_back_is_free_only_when_its_work_is_done() -> None:
    pool = row_of(2)
    work = Work()
    pool.give(pool.take("layers.0"), after=work)

    with pytest.raises(SlotHeldError, match=r"layers\.0 \(given back, but <write of layers\.0>"):
        pool.take("layers.1", timeout=0)
    work.finish()

    assert pool.take("layers.1", timeout=0).name == "layers.1"


def test_a_waiting_take_gets_the_slot_when_the_work_ends() -> None:
    pool = row_of(2)
    work = Work()
    pool.give(pool.take("layers.0"), after=work)
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(pool.take("layers.1").name))
    waiting.start()
    while work.asked == 0:  # until it waits
        pass
    assert taken == []
    work.finish()
    waiting.join()

    assert taken == ["layers.1"]


def test_a_waiting_take_gets_the_slot_when_it_is_given_back() -> None:
    pool = row_of(2)
    slot = pool.take("layers.0")
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(pool.take("layers.1").name))
    waiting.start()
    pool.give(slot)
    waiting.join()

    assert taken == ["layers.1"]


def test_two_threads_never_hold_the_same_bytes() -> None:
    pool = row_of(8)  # eight tensors, one place
    inside = 0
    most = 0
    count = threading.Lock()

    def work(number: int) -> None:
        nonlocal inside, most
        for _ in range(20):
            slot = pool.take(f"layers.{number}")
            with count:
                inside += 1
                most = max(most, inside)
            with count:
                inside -= 1
            pool.give(slot)

    team = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()

    assert most == 1


def test_mistakes_are_named() -> None:
    pool = row_of(2)
    slot = pool.take("layers.0")

    with pytest.raises(SlotError, match=r"layers\.0 is taken already"):
        pool.take("layers.0")
    pool.give(slot)
    with pytest.raises(SlotError, match=r"layers\.0 is not taken"):
        pool.give(slot)
    with pytest.raises(SlotError, match=r"no slot was planned for layers\.9"):
        pool.take("layers.9")


def test_a_pool_says_how_full_it_is() -> None:
    pool = row_of(2, live=2)
    pool.take("layers.0")

    assert repr(pool) == "StagingPool(8.00 KiB of 16.0 KiB in use)"
