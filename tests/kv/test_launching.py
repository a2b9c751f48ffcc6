"""A kernel is compiled once for each kind of arguments, and then launched without being asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.kv import decode_attention
from penstock.kv.decode_attention import launch


class FakeKernel:
    """As Triton's: a launch compiles, and gives what it compiled; the interpreter gives nothing."""

    def __init__(self, compiles: bool = True) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.at_once: list[tuple[Any, ...]] = []
        self.compiles = compiles

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*given: Any, num_warps: int) -> FakeCompiled | None:
            self.asked.append((grid, num_warps, *given))
            return FakeCompiled(self) if self.compiles else None

        return run


class FakeCompiled:
    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *given: self.kernel.at_once.append((grid, *given))


GRID = (2, 3, 4)


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a version that is known, also where none is installed."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    decode_attention.compiled_kernels_take_constants.cache_clear()
    yield
    decode_attention.compiled_kernels_take_constants.cache_clear()


def test_the_second_launch_of_a_kind_is_made_at_once_with_its_own_arguments_and_grid() -> None:
    kernel, first, second = FakeKernel(), torch.zeros(8), torch.zeros(64)

    launch(kernel, GRID, (first, 7, 0.5), (16, True), warps=4)
    launch(kernel, (1, 1, 1), (second, 7, 0.5), (16, True), warps=4)

    assert kernel.asked == [(GRID, 4, first, 7, 0.5, 16, True)]
    ((grid, given, *others),) = kernel.at_once
    assert grid == (1, 1, 1)
    assert given is second
    assert others == [7, 0.5, 16, True]


WHOLE = torch.zeros(64)


@pytest.mark.parametrize(
    "other",
    [
        (WHOLE.half(), 7, 0.5, (16, True), 4),
        (WHOLE[1:], 7, 0.5, (16, True), 4),  # 4 bytes off: no multiple of 16
        (WHOLE, 16, 0.5, (16, True), 4),
        (WHOLE, 1, 0.5, (16, True), 4),
        (WHOLE, 7, 0.25, (16, True), 4),
        (WHOLE, 7, 0.5, (32, True), 4),
        (WHOLE, 7, 0.5, (16, False), 4),
        (WHOLE, 7, 0.5, (16, True), 8),
        (WHOLE.to("meta"), 7, 0.5, (16, True), 4),
    ],
    ids=["type", "alignment", "number", "one", "float", "constant", "flag", "warps", "device"],
)
def test_whatever_triton_may_specialise_for_is_another_kind(other: tuple[Any, ...]) -> None:
    kernel = FakeKernel()
    tensor, number, real, constants, warps = other

    launch(kernel, GRID, (WHOLE, 7, 0.5), (16, True), warps=4)
    launch(kernel, GRID, (tensor, number, real), constants, warps=warps)

    assert len(kernel.asked) == 2
    assert not kernel.at_once


def test_kernels_do_not_take_each_others_place() -> None:
    one, other = FakeKernel(), FakeKernel()
    for kernel in (one, other):
        launch(kernel, GRID, (WHOLE,), (), warps=4)
    assert len(one.asked) == len(other.asked) == 1


def test_the_interpreter_is_asked_each_time() -> None:
    kernel = FakeKernel(compiles=False)
    for _ in range(3):
        launch(kernel, GRID, (WHOLE,), (), warps=4)
    assert len(kernel.asked) == 3
    assert not kernel.at_once


@pytest.mark.parametrize(
    ("version", "known"), [("3.2.0", False), ("3.3.0", True), ("3.10.1", True), ("4.0.0+x", True)]
)
def test_old_versions_of_triton_are_asked_each_time(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    decode_attention.compiled_kernels_take_constants.cache_clear()
    kernel = FakeKernel()
    for _ in range(2):
        launch(kernel, GRID, (WHOLE,), (16,), warps=4)
    assert (len(kernel.asked), len(kernel.at_once)) == ((1, 1) if known else (2, 0))
