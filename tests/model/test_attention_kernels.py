"""The attention kernels compute attention as it is defined, for everything that they support.

These tests run in Triton's interpreter, which `test_attention_launch.py` starts.
`test_attention_gpu.py` has similar ones on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from penstock.model.attention_launch import Tiles
from tests.kv.decode_cases import fixed_interpreter
from tests.model.attention_cases import Case, relative_errors
from tests.support.device_sweeps import INTERPRETED, quiet

__all__ = ["fixed_interpreter"]

pytestmark = [
    *quiet,
    pytest.mark.skipif(not INTERPRETED, reason="run by test_attention_launch.py, interpreted"),
    pytest.mark.usefixtures("fixed_interpreter"),
]

CPU = torch.device("cpu")
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}
"""Relative errors. Weights and results are rounded to 11 bits, to 8 or to 24."""
RAGGED = (1, 2, 15, 17, 5, 5, 20)
"""Lengths around the tiles' 16 and 32 rows, several documents per tile, and a last tile that is not
full."""


def check(case: Case, tiles: Tiles | None, *, apart: bool = False) -> None:
    inputs = case.inputs(CPU)
    found, wanted = case.attend(inputs, tiles, apart=apart), case.exact(inputs)

    for error in relative_errors(found, wanted):
        assert error < TOLERANCE[case.dtype]


@pytest.mark.parametrize("window", [0, 1, 7, 40])
@pytest.mark.parametrize(
    ("queries", "keys", "copy_engine", "apart"),
    [(16, 16, False, False), (16, 32, True, False), (32, 16, True, True), (32, 16, False, True)],
)
def test_windows_and_documents_of_any_length(
    queries: int, keys: int, copy_engine: bool, apart: bool, window: int
) -> None:
    check(Case(RAGGED, window=window), Tiles(queries, keys, 4, 2, copy_engine), apart=apart)


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 1), (6, 2)])
def test_query_heads_that_share_keys(heads: tuple[int, int]) -> None:
    check(Case((20, 9), *heads), Tiles(16, 16, 4, 2))


@pytest.mark.parametrize("size", [8, 24, 64, 72, 80, 96, 112, 128, 160, 256])
def test_head_sizes(size: int) -> None:
    check(Case((20, 9), 1, size=size), Tiles(16, 16, 4, 2))


@pytest.mark.parametrize(("window", "cap", "apart"), [(0, 2.0, True), (7, 50.0, False)])
def test_capped_scores(window: int, cap: float, apart: bool) -> None:
    check(Case(RAGGED, window=window, cap=cap), Tiles(16, 32, 4, 2), apart=apart)


@pytest.mark.parametrize("length", [127, 128, 129])
def test_documents_around_the_padding(length: int) -> None:
    check(Case((length, 3), 1), Tiles(64, 32, 4, 2, True))


@pytest.mark.parametrize("apart", [False, True])
def test_the_order_of_programs_changes_no_bit(apart: bool) -> None:
    """The first block is last, and tiles without a token are anywhere."""
    case, tiles = Case((150, 200, 3)), Tiles(32, 64, 4, 2)
    inputs = case.inputs(CPU)
    layout = case.layout(CPU)
    spans = layout.spans.clone()
    spans[:, 384:] = torch.tensor([[1, 2, 0], [2, 1, 0]])

    found = case.attend(inputs, tiles, apart=apart, layout=layout._replace(spans=spans))

    assert (spans != layout.spans).any()
    for a, b in zip(found, case.attend(inputs, tiles, apart=apart), strict=True):
        assert torch.equal(a, b)


def test_queries_in_registers() -> None:
    check(Case(RAGGED), Tiles(16, 32, 4, 2, False, True))


def test_bf16() -> None:
    check(Case(RAGGED, dtype=torch.bfloat16), Tiles(16, 32, 4, 2))


@pytest.mark.parametrize("size", [24, 128, 256])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (7, 50.0)])
def test_fp32_with_its_own_tiles(size: int, window: int, cap: float) -> None:
    check(Case(RAGGED, 4, 2, size, window, cap, torch.float32), None)


def test_neighbours_do_not_leak() -> None:
    """Infinities in one document do not reach another one in the same tile."""
    case = Case((5, 6, 9))
    inputs = case.inputs(CPU)
    wanted = case.attend(inputs, Tiles(16, 16, 4, 2))
    for tensor in inputs:
        tensor[5:11] = 6e4
    found = case.attend(inputs, Tiles(16, 16, 4, 2))

    for a, b in zip(found, wanted, strict=True):
        by_token = (a.transpose(0, 1), b.transpose(0, 1)) if a.dim() == 2 else (a, b)
        for rows in (slice(0, 5), slice(11, 20)):
            assert torch.equal(by_token[0][rows], by_token[1][rows])
