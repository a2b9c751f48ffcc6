"""Every rank uses the paths and CPUs of its seat, and the result stays that of one rank."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from penstock.distributed.thread_ranks import ThreadRanks
from penstock.engine.engine import Engine
from penstock.engine.sweep_pool import sweep_pool
from penstock.machine.sysfs import System
from penstock.plan.plan import Plan
from penstock.plan.seats import Seat
from tests.equivalence.runs import DISK, OPTIMIZER, Setup, follow
from tests.support import engines
from tests.support.ranks import on_each_rank


def seated_plan(setup: Setup, first: Path, second: Path) -> Plan:
    """Return a plan for two ranks, each with a directory and CPUs of its own."""
    first.mkdir()
    second.mkdir()
    shared = replace(setup, work=replace(setup.work, world=2))
    cpus = sorted(os.sched_getaffinity(0))
    seats = tuple(
        Seat(nodes=(0,), cpus=tuple(cpus[rank::2]), paths=(str(path),))
        for rank, path in enumerate((first, second))
    )
    return replace(shared.plan(DISK, first), seats=seats)


def test_each_rank_has_its_store_and_its_threads_where_its_seat_is(tmp_path: Path) -> None:
    setup = Setup.of("llama", batch=4)
    plan = seated_plan(setup, tmp_path / "first", tmp_path / "second")
    group = ThreadRanks(2)
    ranks: list[Engine] = [
        engines.make_engine(
            setup.config, plan, setup.model, setup.source, optimizer=OPTIMIZER, ranks=each
        )
        for each in group.transports
    ]
    try:
        for rank, name in enumerate(("first", "second")):
            store = ranks[rank]._memory.store
            assert [volume.path for volume in store._files.volumes] == [str(tmp_path / name)]
            assert ranks[rank]._memory.sweep_pool.cpus == plan.seats[rank].cpus
        batches = setup.batches(2)
        losses = on_each_rank(group, lambda each: follow(ranks[each.rank], batches))
    finally:
        for engine in ranks:
            engine.close()

    alone = setup.engine(DISK, tmp_path)
    try:
        assert losses == [follow(alone, batches)] * 2
    finally:
        alone.close()


def test_cpus_that_the_process_may_not_use_are_left_out(tmp_path: Path, monkeypatch) -> None:
    plan = seated_plan(Setup.of("llama", batch=4), tmp_path / "a", tmp_path / "b")
    usable = min(os.sched_getaffinity(0))
    monkeypatch.setattr(System, "text", lambda self, path: None)  # no quota of CPU time

    def pool_of(*cpus: int) -> tuple[tuple[int, ...], int]:
        changed = replace(plan, seats=tuple(replace(seat, cpus=cpus) for seat in plan.seats))
        pool = sweep_pool(changed, 1, None)
        return pool.cpus, pool.threads

    everything = tuple(sorted(os.sched_getaffinity(0)))
    assert pool_of(usable, 10_000) == ((usable,), 1)
    assert pool_of(10_000)[0] == everything
    assert pool_of()[0] == everything
    assert sweep_pool(replace(plan, seats=()), 1, 1).cpus == everything


def test_ranks_share_a_quota_of_cpu_time(tmp_path: Path, monkeypatch) -> None:
    plan = seated_plan(Setup.of("llama", batch=4), tmp_path / "a", tmp_path / "b")
    everything = tuple(sorted(os.sched_getaffinity(0)))
    seats = tuple(replace(seat, cpus=everything) for seat in plan.seats)
    for quota, threads in ((2.0, 1), (2.0 * len(everything), len(everything))):
        monkeypatch.setattr("penstock.engine.sweep_pool.cpu_quota", lambda _, quota=quota: quota)
        assert sweep_pool(replace(plan, seats=seats), 0, None).threads == threads
    assert sweep_pool(replace(plan, seats=seats), 0, 3).threads == 3
