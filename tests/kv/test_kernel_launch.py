"""A kernel is compiled once per kind of arguments, and then launched directly."""

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
    """Like a Triton kernel: a launch returns the compiled kernel, or None if interpreted."""

    def __init__(self, compiles: bool = True) -> None:
        self.compiled_launches: list[tuple[Any, ...]] = []
        self.direct_launches: list[tuple[Any, ...]] = []
        self.compiles = compiles

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*arguments: Any, num_warps: int, enable_fp_fusion: bool) -> FakeCompiled | None:
            self.compiled_launches.append((grid, num_warps, *arguments))
            return FakeCompiled(self) if self.compiles else None

        return run


class FakeCompiled:
    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.kernel.direct_launches.append((grid, *arguments))


GRID = (2, 3, 4)


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that Triton 3.6.0 is installed."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    decode_attention.compiled_kernels_take_constants.cache_clear()
    yield
    decode_attention.compiled_kernels_take_constants.cache_clear()


def test_a_second_launch_of_a_kind_is_direct_with_its_own_arguments_and_grid() -> None:
    kernel, first, second = FakeKernel(), torch.zeros(8), torch.zeros(64)

    launch(kernel, GRID, (first, 7, 0.5), (16, True), warps=4)
    launch(kernel, (1, 1, 1), (second, 7, 0.5), (16, True), warps=4)

    assert kernel.compiled_launches == [(GRID, 4, first, 7, 0.5, 16, True)]
    ((grid, tensor, *others),) = kernel.direct_launches
    assert grid == (1, 1, 1)
    assert tensor is second
    assert others == [7, 0.5, 16, True]


WHOLE = torch.zeros(64)


@pytest.mark.parametrize(
    "other",
    [
        (WHOLE.half(), 7, 0.5, (16, True), 4),
        (WHOLE[1:], 7, 0.5, (16, True), 4),  # 4 bytes off: not a multiple of 16
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
def test_everything_that_triton_may_specialize_for_is_another_kind(other: tuple[Any, ...]) -> None:
    kernel = FakeKernel()
    tensor, number, real, constants, warps = other

    launch(kernel, GRID, (WHOLE, 7, 0.5), (16, True), warps=4)
    launch(kernel, GRID, (tensor, number, real), constants, warps=warps)

    assert len(kernel.compiled_launches) == 2
    assert not kernel.direct_launches


def test_kernels_are_kept_apart() -> None:
    one, other = FakeKernel(), FakeKernel()
    for kernel in (one, other):
        launch(kernel, GRID, (WHOLE,), (), warps=4)
    assert len(one.compiled_launches) == len(other.compiled_launches) == 1


def test_interpreted_kernels_are_never_launched_directly() -> None:
    kernel = FakeKernel(compiles=False)
    for _ in range(3):
        launch(kernel, GRID, (WHOLE,), (), warps=4)
    assert len(kernel.compiled_launches) == 3
    assert not kernel.direct_launches


@pytest.mark.parametrize(
    ("version", "direct"), [("3.2.0", False), ("3.3.0", True), ("3.10.1", True), ("4.0.0+x", True)]
)
def test_old_versions_of_triton_are_never_launched_directly(
    version: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    decode_attention.compiled_kernels_take_constants.cache_clear()
    kernel = FakeKernel()
    for _ in range(2):
        launch(kernel, GRID, (WHOLE,), (16,), warps=4)
    assert (len(kernel.compiled_launches), len(kernel.direct_launches)) == (
        (1, 1) if direct else (2, 0)
    )
