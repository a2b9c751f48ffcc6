"""Torch's switch for deterministic algorithms is on while an engine computes, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine import determinism
from penstock.engine.determinism import deterministic_kernels
from penstock.errors import NotReproducibleError
from penstock.model.compile import CompiledLayers, deterministic_options
from tests.equivalence.runs import DRAM, Setup

ROOT = Path(__file__).parents[2]


def state() -> tuple[bool, bool, bool, object]:
    fills: Any = torch.utils.deterministic
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        fills.fill_uninitialized_memory,
        getattr(torch._inductor.config, "deterministic", None),
    )


def test_the_switch_is_on_inside_and_restored_afterwards() -> None:
    before = state()
    assert before[0] is False
    with deterministic_kernels(True):
        assert state()[:3] == (True, False, False)
        with deterministic_kernels(True):
            pass
        assert state()[:3] == (True, False, False), "another engine still computes"
    assert state() == before


def test_a_users_own_setting_is_kept() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = state()
        with deterministic_kernels(True):
            assert state()[:2] == (True, False)
        assert state() == before
        with deterministic_kernels(False):
            assert state() == before
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("users", [True, False])
def test_a_users_own_setting_of_the_compiler_is_kept(users: bool) -> None:
    config: Any = torch._inductor.config
    if not hasattr(config, "deterministic"):
        pytest.skip("this version of torch has no such option")
    before = config.deterministic
    config.deterministic = users
    try:
        with deterministic_kernels(True):
            pass
        assert config.deterministic is users
    finally:
        config.deterministic = before


def test_an_operation_without_a_deterministic_kernel_is_named() -> None:
    before = state()
    with (
        pytest.raises(NotReproducibleError, match=r"put_ .*--no-deterministic"),
        deterministic_kernels(True),
    ):
        # The message with which torch refuses an operation on a GPU.
        raise RuntimeError("put_ does not have a deterministic implementation, but you set ...")
    with pytest.raises(RuntimeError, match="another"), deterministic_kernels(True):
        raise RuntimeError("another error")
    assert state() == before


def test_torch_only_warns_where_it_would_refuse_every_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does so in a process that multiplied matrices before the workspace was configured."""

    def refuse(*_: object) -> None:
        raise RuntimeError(
            "Deterministic behavior was enabled, but ... set CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    monkeypatch.setattr(torch, "mm", refuse)
    monkeypatch.setattr(determinism, "_switch", determinism._Switch())
    before = state()
    with warnings.catch_warnings(), deterministic_kernels(True):
        assert state()[:3] == (True, True, False)
    assert state() == before


@pytest.mark.gpu
def test_an_engine_can_follow_matrix_products_of_the_user(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, torch\n"
        "torch.ones(8, 8, device='cuda') @ torch.ones(8, 8, device='cuda')\n"
        "from tests.equivalence.runs import DRAM, Setup\n"
        "setup = Setup.of('llama')\n"
        "with setup.engine(DRAM, pathlib.Path(sys.argv[1]), device='cuda') as engine:\n"
        "    print(float(engine.step(setup.batches(1)[0])))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    line = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(
        line, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert float(ended.stdout) > 0


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_engine_computes_with_the_switch_of_its_workload(
    deterministic: bool, tmp_path: Path
) -> None:
    seen = []

    def loss(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(state()[0])
        return -log_probs.sum()

    setup = Setup.of("llama", deterministic=deterministic)
    before = state()
    with setup.engine(DRAM, tmp_path, loss=loss) as engine:
        engine.step(setup.batches(1)[0])
        engine.evaluate(setup.batches(1))
    assert set(seen) == {deterministic}
    assert state() == before


@pytest.mark.parametrize("deterministic", [True, False])
def test_layers_are_compiled_without_timed_reductions(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: given.append(how) or function)
    CompiledLayers([torch.nn.Linear(2, 2)], deterministic=deterministic)
    assert given[0]["options"] == (deterministic_options() if deterministic else {})


def test_this_version_of_torch_has_the_options_that_rule_out_timed_reductions() -> None:
    options = deterministic_options()
    assert options["deterministic"] is True
    assert options["dynamic_scale_rblock"] is False
    # Raises an error for an option that the compiler does not know.
    torch.compile(torch.nn.Linear(2, 2), options=options)
