"""`penstock.observe` in a PyTorch program: phases are detected, and nothing is left behind."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import penstock
from penstock.observe.run_files import read_run
from tests.observe.training_loops import STEP, Loop, expected, phases_and_steps


def test_phases_are_detected(tmp_path: Path) -> None:
    loop = Loop()
    with penstock.observe(tmp_path):
        for _ in range(3):
            loop.step()
        with torch.no_grad():
            loop.model(torch.randn(2, 8))

    run = read_run(tmp_path)
    assert phases_and_steps(run) == [*expected(3), ("evaluate", 3)]
    assert run.observation.ended_by == "exit"
    assert run.notes == ()


def test_data_loading_accumulation_and_saving_are_detected(tmp_path: Path) -> None:
    loop = Loop()
    rows: Any = [torch.zeros(8)] * 4
    data: DataLoader[Any] = DataLoader(rows, batch_size=2)
    with penstock.observe(tmp_path / "run"):
        for _ in data:
            loop.step(micro_batches=2)
        torch.save(loop.model.state_dict(), tmp_path / "weights.pt")

    phases = ["data", "forward", "backward", "forward", "backward", "update"]
    assert phases_and_steps(read_run(tmp_path / "run")) == [*expected(2, phases), ("save", 2)]


def test_models_created_while_observing_are_detected(tmp_path: Path) -> None:
    """Their first forward has ended before they have hooks."""
    with penstock.observe(tmp_path):
        loop = Loop()
        for _ in range(3):
            loop.step()
            other = Loop()
            other.step()

    run = read_run(tmp_path)
    assert phases_and_steps(run)[-3:] == [(name, 6) for name in STEP]
    assert [name for name, _ in phases_and_steps(run)].count("update") == 6


def test_observing_does_not_recompile_a_compiled_model(tmp_path: Path) -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    loop = Loop(lambda model: torch.compile(model, backend=backend))
    loop.step()
    before = len(compiled)
    with warnings.catch_warnings(), penstock.observe(tmp_path):
        warnings.simplefilter("error")
        for _ in range(2):
            loop.step()

    assert len(compiled) == before
    assert phases_and_steps(read_run(tmp_path)) == expected(2)


def test_two_models_and_two_optimizers_are_one_step(tmp_path: Path) -> None:
    first, second = Loop(), Loop()
    with penstock.observe(tmp_path):
        for _ in range(2):
            out = first.model(torch.randn(2, 8)).sum() + second.model(torch.randn(2, 8)).sum()
            out.backward()
            first.optimizer.step()
            second.optimizer.step()

    assert phases_and_steps(read_run(tmp_path)) == expected(2)


def test_recomputation_in_backward_belongs_to_backward(tmp_path: Path) -> None:
    loop = Loop()
    with penstock.observe(tmp_path):
        for _ in range(2):
            source = torch.randn(2, 8, requires_grad=True)
            out: Any = torch.utils.checkpoint.checkpoint(loop.model, source, use_reentrant=False)
            out.sum().backward()
            loop.optimizer.step()

    assert phases_and_steps(read_run(tmp_path)) == expected(2)


def test_an_exception_of_the_program_propagates_and_is_recorded(tmp_path: Path) -> None:
    loop = Loop()

    def program() -> None:
        with penstock.observe(tmp_path):
            loop.step()
            loop.model(torch.randn(2, 3))

    with pytest.raises(RuntimeError, match="shapes"):
        program()

    run = read_run(tmp_path)
    assert run.observation.ended_by == "RuntimeError"
    assert phases_and_steps(run) == [*expected(1), ("forward", 2)]


def test_all_hooks_and_threads_are_removed(tmp_path: Path) -> None:
    loop = Loop()

    def patched() -> list[Any]:
        return [torch.autograd.backward, torch.autograd.grad, torch.save,
                _BaseDataLoaderIter.__next__, dict(optimizers._global_optimizer_pre_hooks),
                dict(optimizers._global_optimizer_post_hooks), dict(loop.model._forward_hooks),
                dict(loop.model._forward_pre_hooks),
                {thread.name for thread in threading.enumerate()}]  # fmt: skip

    before = patched()
    with penstock.observe(tmp_path):
        loop.step()
        assert patched() != before

    assert patched() == before


def test_a_wrapper_that_was_added_later_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "save", torch.save)  # so that it is restored afterwards
    with penstock.observe(tmp_path):
        our_wrapper = torch.save

        def later_wrapper(*args: Any, **kwargs: Any) -> Any:
            return our_wrapper(*args, **kwargs)

        torch.save = later_wrapper
    torch.save({}, tmp_path / "x.pt")

    assert torch.save is later_wrapper
    assert (tmp_path / "x.pt").exists()


def test_named_phases_and_steps_are_recorded(tmp_path: Path) -> None:
    loop = Loop()
    with penstock.observe(tmp_path) as obs:
        for _ in range(2):
            with obs.phase("rollout"):
                loop.step()
            obs.step()

    assert phases_and_steps(read_run(tmp_path)) == [("rollout", 1), ("rollout", 2)]


def test_phases_last_as_long_as_the_sleeps_inside(tmp_path: Path) -> None:
    """This does not depend on the speed of the machine: a sleep is never shorter than requested."""
    with penstock.observe(tmp_path) as obs:
        began = time.perf_counter()
        for name in ("forward", "backward", "update"):
            with obs.phase(name):
                inside = time.perf_counter()
                time.sleep(0.05)
                inside = time.perf_counter() - inside
        whole = time.perf_counter() - began

    phases = read_run(tmp_path).phases
    assert all(phase.seconds >= 0.05 for phase in phases)
    assert sum(phase.seconds for phase in phases) <= whole
    assert phases[-1].seconds >= inside


def test_an_exact_step_on_a_cpu_records_no_copies(tmp_path: Path) -> None:
    loop = Loop()
    with penstock.observe(tmp_path, exact=(2,)):
        for _ in range(3):
            loop.step()

    run = read_run(tmp_path)
    assert run.observation.mode == "exact"
    assert run.notes == ()
    assert run.events == ()
    assert not list(tmp_path.glob(".*"))
