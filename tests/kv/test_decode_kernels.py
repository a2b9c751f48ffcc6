"""The decode kernel computes attention as it is defined, and reads nothing outside the rows.

These tests run in Triton's interpreter, which `test_decode_attention.py` starts.
`test_decode_gpu.py` has similar ones on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.generate import attention
from penstock.kv import decode_attention
from tests.kv.decode_cases import LAYER, Case, fixed_interpreter, make_case
from tests.kv.tiny_generators import (
    random_prompts,
    reference_tokens,
    run,
    small_generator,
    tiny_model,
)
from tests.support.device_sweeps import INTERPRETED, quiet

__all__ = ["fixed_interpreter"]

pytestmark = [
    *quiet,
    pytest.mark.skipif(not INTERPRETED, reason="run by test_decode_attention.py, interpreted"),
    pytest.mark.usefixtures("fixed_interpreter"),
]

TOLERANCES = {
    torch.float32: 2e-6,
    torch.float16: 2.5e-3,  # weights and results, up to 5, are rounded to 11 bits
    torch.bfloat16: 2e-2,  # rounded to 8 bits
}


def check(case: Case, **more: Any) -> None:
    actual = case.attend(**more)

    assert actual.shape == (len(case.lengths), 1, case.query.shape[1], case.query.shape[3])
    error = (actual.double() - case.exact(**more)).abs().max()
    assert float(error) < TOLERANCES[actual.dtype]


@pytest.mark.parametrize("head", [8, 64, 80, 96, 112, 128, 256])
def test_every_head_size_gives_exact_attention(head: int) -> None:
    check(make_case([1, 70], head=head, shared=1, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_dtype_gives_exact_attention(dtype: torch.dtype) -> None:
    check(make_case([33, 150], head=80, dtype=dtype))


@pytest.mark.parametrize(("heads", "shared"), [(2, 2), (4, 2), (3, 1), (8, 2), (6, 1), (8, 1)])
def test_grouped_queries_give_exact_attention(heads: int, shared: int) -> None:
    check(make_case([5, 40], heads=heads, shared=shared))


@pytest.mark.parametrize(
    ("window", "softcap"), [(1, None), (63, None), (64, 1.5), (65, None), (1000, 1.5), (None, 1.5)]
)
def test_windows_and_capped_scores_give_exact_attention(
    window: int | None, softcap: float | None
) -> None:
    check(make_case([1, 65, 150], heads=2, shared=1), window=window, softcap=softcap)


BLOCK = decode_attention.TILE_NBYTES // (64 * 4)


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK - 1])
@pytest.mark.parametrize("splits", [1, 3])
def test_lengths_at_the_edges_of_blocks_give_exact_attention(
    length: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "num_splits", lambda *_: splits)
    check(make_case([length, 0, 1], heads=2, shared=1))


@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_without_tokens_is_zero_and_reads_nothing(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "num_splits", lambda *_: splits)
    actual = make_case([0, 9, 0]).attend()

    assert not actual[0].any()
    assert not actual[2].any()
    assert actual[1].any()


@pytest.mark.parametrize(("head", "window"), [(64, None), (80, None), (64, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_reads_nothing_outside_the_rows(
    head: int, window: int | None, dtype: torch.dtype, fixed_interpreter: list[tuple[Any, Any]]
) -> None:
    """Check every byte. With head sizes of powers of two, no pointer leaves its row either."""
    case = make_case([0, 1, 64, 65, 200], head=head, dtype=dtype)
    base, each = case.data.data_ptr(), case.data[0].nbytes
    allowed = np.zeros(case.data.nbytes, dtype=bool)
    layer, half = case.data[0, 0].nbytes, case.data[0, 0, 0].nbytes
    for start, length in zip(case.starts, case.lengths, strict=True):
        first = 0 if window is None else max(0, length - window)
        for token in range(start + first, start + length):
            at = token * each + LAYER * layer
            allowed[at : at + 2 * half] = True
    fixed_interpreter.clear()

    case.attend(window=window)

    read, formed = 0, 0
    for pointers, mask in fixed_interpreter:
        at = pointers.astype(np.int64).ravel() - base
        inside = (at >= 0) & (at < case.data.nbytes)
        formed += int((inside & ~np.take(allowed, at, mode="clip")).sum())
        real = at[inside & mask.ravel()]
        read += len(real)
        assert allowed[real].all()
    assert read >= 2 * 2 * head * sum(min(n, window or n) for n in case.lengths)
    assert formed == 0 or head & (head - 1)


def test_rows_are_split_to_fill_the_gpu() -> None:
    h200 = 132
    assert decode_attention.num_splits(1, 8, 131072, h200, 64) == 49  # 392 programs of 396
    assert decode_attention.num_splits(1, 8, 262144, h200, 64) == 97  # 776 of 2 * 396
    assert decode_attention.num_splits(8, 8, 16384, h200, 64) == 6
    assert decode_attention.num_splits(32, 8, 4096, h200, 64) == 1
    assert decode_attention.num_splits(32, 8, 65536, h200, 64) == 17  # 4352 of 11 * 396
    # More rows than fit on the GPU are split into small parts.
    assert decode_attention.num_splits(64, 8, 4096, h200, 64) == 4
    assert decode_attention.num_splits(1, 8, 100, h200, 64) == 2  # no more than there are blocks
    assert decode_attention.num_splits(1, 1, 1 << 20, h200, 64) == 128


@pytest.mark.parametrize(("shared", "head"), [(2, 64), (3, 80), (1, 8)])
def test_new_keys_and_values_are_written_to_their_positions(shared: int, head: int) -> None:
    store = torch.full((40, 3, 2, shared, head), 7.0)
    projected = torch.randn(4, 1, 2 * shared, head).transpose(
        1, 2
    )  # strided like the output of a projection
    keys, values = projected[:, :shared], projected[:, shared:]
    positions = torch.tensor([5, 0, 39, 12])

    decode_attention.write(keys, values, store[:, 1, 0], store[:, 1, 1], positions)

    expected = torch.full_like(store, 7.0)
    expected[positions, 1, 0], expected[positions, 1, 1] = keys[:, :, 0], values[:, :, 0]
    assert torch.equal(store, expected)


@pytest.mark.parametrize(("new", "head"), [(1, 8), (16, 64), (37, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_parts_equal_the_whole_attention(new: int, head: int, dtype: torch.dtype) -> None:
    torch.manual_seed(new)
    parts = [
        (torch.randn(2, new, 3, head).to(dtype).transpose(1, 2), 5 * torch.randn(2, 3, new))
        for _ in range(2)
    ]
    (x, above), (y, below) = parts
    share = torch.sigmoid((above - below).double())[..., None]
    expected = (x.double() * share + y.double() * (1 - share)).transpose(1, 2)

    actual = attention.join_parts(*parts)

    assert actual.dtype == dtype
    assert actual.is_contiguous()
    # One unit in the last place: the interpreter truncates instead of rounding.
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=step, atol=TOLERANCES[torch.float32])


@pytest.mark.parametrize("graphs", [None, True])
def test_tokens_are_those_of_a_dynamic_cache(
    graphs: bool | None, fixed_interpreter: list[tuple[Any, Any]]
) -> None:
    """With windows and capped scores, over rows in the cache's own pages.

    Nothing is mapped beyond them: reading there would end the process.
    """
    model, prompts = tiny_model("gemma2"), random_prompts((3, 18, 9))
    expected = [reference_tokens(model, prompt, 4) for prompt in prompts]
    with small_generator(model, tokens=90, max_batch=3, graphs=graphs) as generator:
        assert run(generator, prompts, 4) == expected
    assert fixed_interpreter  # the kernel was used
