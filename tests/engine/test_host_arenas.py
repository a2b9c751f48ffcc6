"""Host memory is allocated and pinned in threads, all of it or nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock import _native
from penstock.engine import host_arenas, rehearsal
from penstock.engine.device import CpuDevice
from penstock.engine.host_arenas import ArenaSpec, HostArenas, arena_specs
from penstock.engine.prepare import prepare
from penstock.errors import EngineError, NodeFullError
from penstock.memory.arena import Arena
from penstock.memory.placement import Node
from penstock.plan.placement import Home, Share
from penstock.roles import Role
from penstock.tiers import Tier
from penstock.units import GiB, MiB
from tests.support.engines import plain_model, tiny_config

BUDGET = {"hbm": "900KiB", "dram": "64MiB"}  # not all of the model fits into HBM
SMALL: dict[str, Any] = {"context": 32, "batch": 2, "device": "cpu", "budget": BUDGET}
BATCH = {"input_ids": torch.arange(64).view(2, 32)}


def spec(nbytes: int, block: int = 0) -> ArenaSpec:
    home = Home(role=Role.FIRST, shares=(Share(tier=Tier.DRAM, nbytes=nbytes, node=0),))
    return ArenaSpec(Node(0), False, (((block, Role.FIRST), home),))


def pinned_device() -> Any:
    device = CpuDevice()
    device.pinned = True
    return device


def mapped(address: int) -> bool:
    return _native.Region.at(address) is not None


def test_arenas_that_were_started_are_taken() -> None:
    specs = [spec(2 * MiB), spec(3 * MiB, 1)]
    with HostArenas(CpuDevice()) as host:
        host.start(specs)
        arenas = host.take(specs)
        assert [arena.stats.capacity for arena in arenas] == [2 * MiB, 3 * MiB]
        assert host.take(specs) == arenas
    assert all(mapped(arena.address) for arena in arenas)


def test_the_main_thread_goes_before_those_that_touch_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int] = []

    def arena(*args: Any) -> Arena:
        thread = threading.Thread(target=lambda: found.append(os.getpriority(os.PRIO_PROCESS, 0)))
        thread.start()
        thread.join()
        return Arena(*args)

    monkeypatch.setattr(host_arenas, "Arena", arena)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with HostArenas(CpuDevice()) as host:
        host.start([spec(2 * MiB)])
        host.wait()
    assert found == [max(before, host_arenas.NICE)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_arenas_of_another_plan_are_released_before_those_that_are_needed_are_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[int] = []

    def arena(nbytes: int, *args: Any) -> Arena:
        alive.append(sum(mapped(address) for address in addresses))
        made = Arena(nbytes, *args)
        addresses.append(made.address)
        return made

    addresses: list[int] = []
    monkeypatch.setattr(host_arenas, "Arena", arena)
    with HostArenas(CpuDevice()) as host:
        host.start([spec(2 * MiB)])
        host._allocation.wait()
        (taken,) = host.take([spec(4 * MiB)])
        assert taken.stats.capacity == 4 * MiB
    assert alive == [0, 0]


def test_nothing_is_left_of_arenas_that_nobody_has_taken() -> None:
    with HostArenas(CpuDevice()) as host:
        host.start([spec(2 * MiB)])
        host._allocation.wait()
        address = host._arenas[0].address
        assert mapped(address)
    assert not mapped(address)


def test_an_error_of_the_thread_is_raised_by_take_and_leaves_nothing() -> None:
    specs = [spec(2 * MiB), spec(2**20 * GiB, 1)]
    with HostArenas(CpuDevice()) as host:
        host.start(specs)
        with pytest.raises(NodeFullError) as caught:
            host.take(specs)
        address = host._arenas[0].address
    del caught
    assert not mapped(address)


def test_release_waits_for_the_thread_through_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, leave = threading.Event(), threading.Event()
    made: list[int] = []

    def arena(nbytes: int, *args: Any) -> Arena:
        entered.set()
        assert leave.wait(30)
        made.append(nbytes)
        return Arena(nbytes, *args)

    monkeypatch.setattr(host_arenas, "Arena", arena)
    host = HostArenas(CpuDevice())
    host.start([spec(2 * MiB), spec(2 * MiB, 1)])
    assert entered.wait(30)
    thread: Any = host._allocation._thread
    join = thread.join

    def interrupted() -> None:
        thread.join = join
        leave.set()
        raise KeyboardInterrupt

    thread.join = interrupted
    with pytest.raises(KeyboardInterrupt):
        host.release()
    assert not thread.is_alive()
    assert made == [2 * MiB]  # the second one was not started any more
    assert host._arenas == []


def test_arenas_are_pinned_in_another_thread_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(Arena, "pin", lambda _: threads.append(threading.get_ident()))
    specs = [spec(2 * MiB), spec(2 * MiB, 1)]
    with HostArenas(pinned_device()) as host:
        host.take(specs)
        assert threads == []
        host.start_pinning()
        host.wait_until_pinned()
        host.start_pinning()
        host.wait_until_pinned()
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_a_device_without_pinned_memory_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "pin", lambda _: pytest.fail("pinned"))
    with HostArenas(CpuDevice()) as host:
        host.take([spec(2 * MiB)])
        host.start_pinning()
        host.wait_until_pinned()


def prepared(**changes: Any) -> Any:
    return prepare(plain_model(tiny_config("llama")), **SMALL | {"rehearse": True} | changes)


def losses(engine: Any) -> list[float]:
    return [float(engine.step(BATCH)) for _ in range(3)]


def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note when host memory is started, the rehearsal runs, and host memory is taken."""
    seen: list[str] = []

    def note(owner: Any, name: str, word: str) -> None:
        before: Callable[..., Any] = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.append(word)
            return before(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note(HostArenas, "start", "start")
    note(rehearsal, "rehearse", "rehearse")
    note(HostArenas, "take", "take")
    return seen


def test_host_memory_is_allocated_during_the_rehearsal_if_an_earlier_run_has_measured(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = spied(monkeypatch)
    with prepared() as engine:
        first = losses(engine)
    assert seen == ["rehearse", "take"]  # not known yet whether the plan fits
    seen.clear()
    with prepared() as engine:
        assert losses(engine) == first
    assert seen == ["start", "rehearse", "take"]
    seen.clear()
    with prepared(loss=lambda log_probs, _targets: -log_probs.sum()):
        assert seen == ["rehearse", "take"]  # a loss of the user may need any memory


def test_a_failed_rehearsal_leaves_no_host_memory(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    addresses: list[int] = []

    def arena(*args: Any, **kwargs: Any) -> Arena:
        made = Arena(*args, **kwargs)
        addresses.append(made.address)
        return made

    def fail(*_: Any, **__: Any) -> None:
        raise EngineError("no")

    with prepared():
        pass
    monkeypatch.setattr(host_arenas, "Arena", arena)
    monkeypatch.setattr(rehearsal, "rehearse", fail)
    with pytest.raises(EngineError, match="no"):
        prepared()
    assert addresses
    assert not any(mapped(address) for address in addresses)


def test_a_failed_pin_closes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Arena) -> None:
        raise EngineError("cannot pin")

    monkeypatch.setattr(Arena, "pin", fail)
    monkeypatch.setattr("penstock.engine.device.pick_device", lambda _: pinned_device())
    with pytest.raises(EngineError, match="cannot pin"):
        prepared(rehearse=False)


def test_specs_have_one_arena_per_node() -> None:
    with prepared(rehearse=False) as engine:
        specs = arena_specs(engine.plan)
        used = engine.tiers()["dram"]["used"]
    assert [each.place for each in specs] == [Node(0)]
    assert sum(each.nbytes for each in specs) == used
