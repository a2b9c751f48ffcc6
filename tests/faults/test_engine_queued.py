"""Queued CPU sweeps have always ended when a step ends, however it ends."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock import _native
from penstock.engine import host_arenas
from penstock.engine.runner import Runner
from penstock.engine.ticket_board import TicketBoard
from penstock.errors import NonFiniteMasterError
from penstock.memory.arena import Arena
from penstock.model.split import SplitModel
from penstock.optim import sweep
from tests.equivalence.runs import DRAM, OPTIMIZER
from tests.faults.engine_runs import small_setup


def test_the_error_names_every_tensor_with_a_refused_element(tmp_path: Path) -> None:
    setup = small_setup()
    with setup.engine(DRAM, tmp_path, optimizer=OPTIMIZER | {"lr": 1e39}) as engine:
        engine.step(setup.batches(1)[0])
        with pytest.raises(NonFiniteMasterError) as caught:
            engine.finish()

        blocks = [block for block in engine.inventory.blocks if block.parameters(True)]
        named = [str(caught.value), *caught.value.__notes__]
        for block in blocks:
            assert any(tensor.name in words for tensor in block.tensors for words in named)
        assert len(named) == len(set(named)) == len(blocks)
        assert engine._pending is None


def test_a_kept_exception_does_not_keep_the_engines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook keeps the last exception, and its traceback refers to the engine's frames."""
    arenas: list[Arena] = []

    def arena(*args: Any, **kwargs: Any) -> Arena:
        arenas.append(Arena(*args, **kwargs))
        return arenas[-1]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("layer failed")

    monkeypatch.setattr(host_arenas, "Arena", arena)
    setup = small_setup()
    first, second = setup.batches(2)
    engine = setup.engine(DRAM, tmp_path)
    engine.step(first)
    monkeypatch.setattr(SplitModel, "routed_layer", fail)
    with pytest.raises(RuntimeError, match="layer failed") as caught:
        engine.step(second)
    engine.close()
    gc.collect()

    assert caught.value.__traceback__ is not None
    assert [arena.stats.live for arena in arenas] == [0] * len(arenas)


def test_a_second_ctrl_c_ends_all_waiting_except_for_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = small_setup()
    started: list[sweep.SweepTicket] = []
    busy = torch.ones(1 << 23)

    def start(*args: Any, pool: Any, **kwargs: Any) -> sweep.SweepTicket:
        for _ in range(10):  # work that the pool does before the sweep
            pool.native.stats([sweep._grad_only(busy)], _native.GradType.fp32)
        started.append(sweep_start(*args, pool=pool, **kwargs))
        return started[-1]

    def interrupted(*_: object) -> None:
        assert not all(ticket.done() for ticket in started)
        raise KeyboardInterrupt

    with setup.engine(DRAM, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        sweep_start = sweep.PreparedSweep.start
        monkeypatch.setattr(sweep.PreparedSweep, "start", start)
        monkeypatch.setattr(Runner, "_settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.finish()

        assert len(started) > 2
        assert all(ticket.done() for ticket in started)
        assert engine._pending is None


@pytest.mark.parametrize("interrupts", [1, 2])
def test_waiting_goes_on_after_one_ctrl_c_and_ends_with_the_second(interrupts: int) -> None:
    step: Any = SimpleNamespace(tickets=TicketBoard())
    waits: list[int] = []

    def wait() -> None:
        waits.append(len(waits))
        if len(waits) <= interrupts:
            raise KeyboardInterrupt

    runner: Any = SimpleNamespace()
    runner._wait_despite_interrupt = partial(Runner._wait_despite_interrupt, runner)
    raised = False
    try:
        runner._wait_despite_interrupt(step, wait)
    except KeyboardInterrupt:  # which would end pytest
        raised = True
    assert (len(waits), raised) == (2, interrupts == 2)
    assert isinstance(step.tickets.failed, KeyboardInterrupt)
