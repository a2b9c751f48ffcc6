"""Sweeps that were started and not waited for: whatever ends the run, they have ended with it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import _native
from penstock.engine import tier_memory, transfer
from penstock.engine.runner import Runner
from penstock.errors import NonFiniteMasterError
from penstock.memory.arena import Arena
from penstock.model.split import SplitModel
from penstock.optim import sweep
from tests.equivalence.runs import DRAM, OPTIMIZER
from tests.faults.engine_runs import small_setup


def test_every_tensor_with_a_refused_element_is_named(tmp_path: Path) -> None:
    setup = small_setup()
    with setup.engine(DRAM, tmp_path, optimizer=OPTIMIZER | {"lr": 1e39}) as engine:
        engine.step(setup.batches(1)[0])
        with pytest.raises(NonFiniteMasterError) as told:
            engine.finish()

        blocks = [block for block in engine.inventory.blocks if block.parameters(True)]
        named = [str(told.value), *told.value.__notes__]
        for block in blocks:
            assert any(tensor.name in words for tensor in block.tensors for words in named)
        assert len(named) == len(set(named)) == len(blocks)
        assert engine._pending is None


def test_memory_goes_with_the_engine_also_while_a_failure_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a notebook remembers the last one."""
    made: list[Arena] = []

    def arena(*given: Any, **how: Any) -> Arena:
        made.append(Arena(*given, **how))
        return made[-1]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no layer")

    monkeypatch.setattr(tier_memory, "Arena", arena)
    setup = small_setup()
    first, second = setup.batches(2)
    engine = setup.engine(DRAM, tmp_path)
    engine.step(first)
    monkeypatch.setattr(SplitModel, "layer", fail)
    with pytest.raises(RuntimeError, match="no layer") as kept:
        engine.step(second)
    engine.close()
    gc.collect()

    assert kept.value.__traceback__ is not None
    assert [each.stats.live for each in made] == [0] * len(made)


def test_a_second_ctrl_c_ends_all_waiting_but_that_for_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = small_setup()
    started: list[sweep.SweepTicket] = []
    busy = torch.ones(1 << 23)

    def start(rule: Any, segments: Any, *, pool: Any, **how: Any) -> sweep.SweepTicket:
        for _ in range(10):  # which come before it
            pool.native.stats([sweep._grad_only(busy)], _native.GradType.fp32)
        started.append(sweep_start(rule, segments, pool=pool, **how))
        return started[-1]

    def interrupted(*_: object) -> None:
        assert not all(ticket.done() for ticket in started)
        raise KeyboardInterrupt

    with setup.engine(DRAM, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        sweep_start = sweep.start
        monkeypatch.setattr(transfer.sweep, "start", start)
        monkeypatch.setattr(Runner, "_settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.finish()

        assert len(started) > 2
        assert all(ticket.done() for ticket in started)
        assert engine._pending is None
