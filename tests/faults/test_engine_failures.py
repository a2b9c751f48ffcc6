"""A failure in the middle of a step is reported, leaves nothing behind and loses no update."""

from __future__ import annotations

import _thread
import functools
import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine import engine as engine_module
from penstock.engine.runner import Lane
from penstock.engine.transfer import Mover
from penstock.errors import EngineError
from penstock.optim.sweep import SweepTicket
from penstock.plan.schedule import Verb
from penstock.storage.errors import LostExtentError, TransferError, TruncatedStoreError
from penstock.storage.layout import Extent
from penstock.storage.store import Store
from penstock.storage.tickets import StoreTicket
from tests.equivalence.runs import DISK, DRAM, LATE, RESIDENT, Way, differing, state_of
from tests.faults.engine_runs import (
    PLACES,
    SMALL,
    BrokenTicket,
    engine_threads,
    layers,
    raising,
    reads,
    slow_writes,
    small_setup,
)
from tests.support.disks import direct_directory

pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def state_without_failure(steps: int) -> dict[str, torch.Tensor]:
    setup = small_setup()
    with setup.engine(RESIDENT, Path()) as engine:  # which uses no disk
        for batch in setup.batches(steps):
            engine.step(batch)
        return state_of(engine)


@pytest.mark.parametrize("after", [0, 3, 17, 40])
def test_a_failed_read_is_reported_and_leaves_nothing_behind(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, trap = small_setup(), reads(monkeypatch)
    first, second = setup.batches(2)
    engine = setup.engine(SMALL, tmp_path)
    try:
        engine.step(first)
        trap.set(after, BrokenTicket)

        with pytest.raises(TransferError, match="Input/output error") as caught:
            engine.step(second)

        assert re.search(r" of (model|lm_head)[^ ]*, (piece|micro-batch) \d+$", caught.value.extent)
        assert trap.fired
    finally:
        engine.close()
    assert engine_threads() == []
    assert os.listdir(tmp_path) == []


def test_a_truncated_store_file_is_reported(tmp_path: Path) -> None:
    setup = small_setup()
    direct_directory(tmp_path)
    first, second = setup.batches(2)
    engine = setup.engine(DISK, tmp_path)
    try:
        engine.step(first)
        store = engine._memory.store
        os.truncate(store.volumes[0].data_path, 1 << 20)

        with pytest.raises(TruncatedStoreError, match="Resume from the last checkpoint"):
            engine.step(second)
    finally:
        engine.close()
    assert engine_threads() == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("way", PLACES, ids=lambda way: way.name)
@pytest.mark.parametrize("after", [0, 4, 8, 12])
def test_pending_sweeps_finish_and_training_continues_after_a_failure(
    way: Way, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is in forward (the first nine layer calls) or in backward."""
    setup, trap = small_setup(), layers(monkeypatch)
    slow_writes(monkeypatch)
    first, second = setup.batches(2)
    with setup.engine(way, tmp_path) as engine:
        engine.step(first)
        trap.set(after, raising(RuntimeError("layer failed")))

        with pytest.raises(RuntimeError, match="layer failed"):
            engine.step(second)

        assert differing(state_of(engine), state_without_failure(1)) == []
        engine.step(second)
        assert differing(state_of(engine), state_without_failure(2)) == []


@pytest.mark.parametrize("after", [0, 7, 23])
def test_training_continues_after_a_read_that_failed_once(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batch is repeated, without finish() in between."""
    setup, trap = small_setup(), reads(monkeypatch)
    slow_writes(monkeypatch)
    first, second = setup.batches(2)
    with setup.engine(PLACES[-1], tmp_path) as engine:
        engine.step(first)
        trap.set(after, BrokenTicket)
        with pytest.raises(TransferError):
            engine.step(second)

        engine.step(second)

        assert differing(state_of(engine), state_without_failure(2)) == []


@pytest.mark.parametrize("way", [SMALL, LATE[7]], ids=["all at once", "moments in backward"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.95])
def test_a_write_that_cannot_be_started_loses_no_update(
    part: float, way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other roles of the same piece are being written by then, and a piece is written again."""
    setup = small_setup()
    first, second = setup.batches(2)
    plain, settle, done = Store.start_write, StoreTicket.settle, StoreTicket.done
    in_flight: set[StoreTicket] = set()
    calls: list[Extent] = []
    failed: list[Extent] = []
    failing = 1 << 30

    def note_end(self: StoreTicket, timeout: float | None = None) -> None:
        settle(self, timeout)
        in_flight.discard(self)

    def start_write(self: Store, extent: Extent, *args: Any, **options: Any) -> StoreTicket:
        if threading.current_thread().name != "penstock write":
            return plain(self, extent, *args, **options)
        calls.append(extent)
        piece = extent.name.partition(" of ")[2]
        if len(calls) > failing and not failed and calls[-2].name.endswith(f" of {piece}"):
            failed.append(extent)
            raise OSError("no disk")
        ticket = plain(self, extent, *args, **options)
        in_flight.add(ticket)
        return ticket

    monkeypatch.setattr(Store, "start_write", start_write)
    with setup.engine(way, tmp_path) as engine:
        engine.step(first)
        calls.clear()
        in_flight.clear()
        writes = [op for op in engine._programs["step"].operations if op.verb is Verb.WRITE]
        failing = 1 + int(part * sum(len(op.roles) for op in writes))
        # On a slow disk, a transfer that nobody has waited for has not ended.
        monkeypatch.setattr(StoreTicket, "settle", note_end)
        monkeypatch.setattr(StoreTicket, "done", lambda self: self not in in_flight and done(self))
        with pytest.raises(OSError, match="no disk"):
            engine.step(second)
        engine.step(second)

        assert differing(state_without_failure(2), state_of(engine)) == []
    assert failed


@pytest.mark.parametrize("way", [SMALL, LATE[7]], ids=["all at once", "moments in backward"])
@pytest.mark.parametrize("error", [OSError("no disk"), KeyboardInterrupt()], ids=["disk", "Ctrl-C"])
@pytest.mark.parametrize("part", [0.1, 0.9])
def test_nothing_continues_with_the_states_before_a_sweep_that_was_not_written(
    part: float, error: BaseException, way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the write of a piece nor the attempt after the failure starts."""
    setup = small_setup()
    first, second = setup.batches(2)
    plain = Mover._start_write
    failed: list[int] = []

    def start_write(self: Mover, step: Any, at: int, op: Any) -> Any:
        if not failed and at == failing:
            failed.append(at)
            raise OSError("no disk")
        if failed and at == failing and len(failed) < 2:
            failed.append(at)
            raise error
        return plain(self, step, at, op)

    with setup.engine(way, tmp_path) as engine:
        engine.step(first)
        operations = enumerate(engine._programs["step"].operations)
        writes = [at for at, op in operations if op.verb is Verb.WRITE]
        failing = writes[int(part * len(writes))]
        monkeypatch.setattr(Mover, "_start_write", start_write)
        with pytest.raises((OSError, KeyboardInterrupt)):
            engine.step(second)
        assert len(failed) == 2
        with pytest.raises(LostExtentError, match="were lost when their write failed"):
            step_and_finish(engine, second)
        with pytest.raises(LostExtentError):
            state_of(engine)


def step_and_finish(engine: Any, batch: Any) -> None:
    """Make a step and its sweeps. If a failed step has ended all others, only these read states."""
    engine.step(batch)
    engine.finish()


@pytest.mark.parametrize("way", [DRAM, SMALL], ids=lambda way: way.name)
def test_an_error_of_the_users_loss_is_raised_unchanged(way: Way, tmp_path: Path) -> None:
    setup, broken = small_setup(), [True]
    error = ZeroDivisionError("in the loss")

    def loss(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if broken[0]:
            raise error
        return -log_probs.sum()

    with setup.engine(way, tmp_path, loss=loss) as engine:
        batch = setup.batches(1)[0]
        with pytest.raises(ZeroDivisionError) as caught:
            engine.step(batch)
        assert caught.value is error

        broken[0] = False
        assert float(engine.step(batch)) > 0


@pytest.mark.parametrize("after", [0, 5, 30])
def test_ctrl_c_ends_the_step_and_loses_no_update(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives while a lane works; the computing thread handles it wherever it is."""
    setup, trap = small_setup(), reads(monkeypatch)
    slow_writes(monkeypatch)
    first, second = setup.batches(2)

    def interrupt(ticket: Any) -> Any:
        _thread.interrupt_main()
        return ticket

    with setup.engine(SMALL, tmp_path) as engine:
        engine.step(first)
        trap.set(after, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step(second)

        assert engine.waiting() == ""
        assert differing(state_of(engine), state_without_failure(1)) == []
    assert engine_threads() == []


def ctrl_c_after(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, call: int = 0) -> None:
    """Send SIGINT at the end of one call of a function by the main thread."""
    plain, calls = getattr(where, name), [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        if threading.current_thread() is threading.main_thread():
            calls[0] += 1
            if calls[0] == call + 1:
                os.kill(os.getpid(), signal.SIGINT)
        return out

    monkeypatch.setattr(where, name, interrupted)


@pytest.mark.parametrize("call", [0, 2])
def test_ctrl_c_while_a_resident_block_is_swept_does_not_sweep_it_twice(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = small_setup()
    first, second = setup.batches(2)
    with setup.engine(RESIDENT, tmp_path) as engine:
        engine.step(first)
        ctrl_c_after(monkeypatch, SweepTicket, "settle", call)
        with pytest.raises(KeyboardInterrupt):
            engine.step(second)
        engine.step(second)

        assert differing(state_of(engine), state_without_failure(2)) == []


def test_ctrl_c_while_an_update_is_decided_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = small_setup()
    first, second = setup.batches(2)
    with setup.engine(DRAM, tmp_path) as engine:
        engine.step(first)
        engine.forward_backward(second)
        ctrl_c_after(monkeypatch, engine_module, "draw_keys")
        with pytest.raises(KeyboardInterrupt):
            engine.apply()
        assert (engine.steps, engine.has_gradients) == (1, False)
        engine.step(second)

        assert differing(state_of(engine), state_without_failure(2)) == []


@pytest.mark.parametrize("call", [0, 3])
def test_ctrl_c_while_lanes_are_started_ends_them(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = small_setup()
    first, second = setup.batches(2)
    with setup.engine(DRAM, tmp_path) as engine:
        engine.step(first)
        ctrl_c_after(monkeypatch, Lane, "start", call)
        with pytest.raises(KeyboardInterrupt):
            engine.step(second)
        engine.step(second)

        assert differing(state_of(engine), state_without_failure(2)) == []


def test_half_summed_gradients_of_a_failed_batch_are_not_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = small_setup()
    setup = replace(setup, work=replace(setup.work, accumulate=True))
    trap = layers(monkeypatch)
    first, second = setup.batches(2)
    with setup.engine(DRAM, tmp_path) as engine:
        engine.forward_backward(first)
        trap.set(7, raising(RuntimeError("layer failed")))
        with pytest.raises(RuntimeError, match="layer failed"):
            engine.forward_backward(second)

        with pytest.raises(EngineError, match="no gradients"):
            engine.apply()
