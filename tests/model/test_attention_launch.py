"""The tiles of the attention kernels, and what they allocate."""

from __future__ import annotations

import bisect
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import attention_launch, varlen_attention
from penstock.model.attention_launch import (
    Kernel,
    Tiles,
    attention_workspace_nbytes,
    choose_tiles,
    document_spans,
    padded_tokens,
)
from penstock.model.attention_sizes import PADDING
from penstock.model.operation_workspace import operation_workspace
from penstock.units import KiB
from tests.support.device_sweeps import count_interpreted, needs_triton

KERNELS: tuple[Kernel, ...] = ("forward", "query_gradient", "key_gradient", "value_gradient")
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


@needs_triton
@pytest.mark.timeout(600)
def test_the_kernels_in_the_interpreter() -> None:
    assert count_interpreted("tests/model/test_attention_kernels.py") == 46


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("size", range(8, 257, 8))
@pytest.mark.parametrize("element", [2, 4])
def test_every_supported_head_size_has_tiles(
    element: int, size: int, capability: tuple[int, int]
) -> None:
    for kernel in KERNELS:
        tiles = choose_tiles(kernel, size, capability, element)
        if tiles is None:
            assert kernel == "value_gradient"
            continue
        assert PADDING % tiles.queries == 0
        assert PADDING % tiles.keys == 0
        if kernel in ("key_gradient", "value_gradient"):
            # They read whole tiles of what the other two wrote in whole tiles.
            for writer in ("forward", "query_gradient"):
                written = choose_tiles(writer, size, capability, element)
                assert written is not None
                assert tiles.queries <= written.queries
        assert not tiles.copy_engine or (size & (size - 1) == 0 and capability[0] in (9, 10))


@needs_triton
@pytest.mark.parametrize("name", ["forward", "query_gradient", "key_gradient"])
@pytest.mark.parametrize(
    "size",
    [64, pytest.param(128, marks=pytest.mark.long), pytest.param(256, marks=pytest.mark.long)],
)
def test_compiled_fp32_products_are_exact_and_fit_into_shared_memory(
    name: Kernel, size: int
) -> None:
    """IEEE products are sums of fused multiply-adds. Triton's compiler needs no GPU."""
    tiles = choose_tiles(name, size, (8, 6), 4)
    assert tiles is not None

    code = compile_kernel(name, size, tiles)

    assert "tf32" not in code.asm["ptx"]
    assert code.asm["ptx"].count("fma.rn.f32") > 500
    assert code.metadata.shared <= 99 * KiB, "what every GPU has that is supported"


def compile_kernel(name: Kernel, size: int, tiles: Tiles) -> Any:
    """Compile a kernel in fp32 for GPUs with the least shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from penstock.model import attention_kernels

    kernel: Any = getattr(attention_kernels, f"{name}_kernel")
    constants = {
        "HEADS": 4, "SHARED": 2, "D": size, "WIDE": size, "BLOCK_M": tiles.queries,
        "BLOCK_N": tiles.keys, "WINDOW": 0, "CAPPED": False, "COPY_ENGINE": tiles.copy_engine,
        "IN_REGISTERS": tiles.in_registers, "KEYS": True, "VALUES": True,
    }  # fmt: skip
    types = {"firsts": "*i32", "lasts": "*i32", "tokens": "i32", "scale": "fp32", "cap": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {argument: types.get(argument, "*fp32") for argument in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t[0] == "*"
    }
    known = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(fn=kernel, signature=signature, constexprs=known, attrs=aligned)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 86, 32), options=options)


def test_numbers_per_token_are_padded_to_whole_tiles() -> None:
    assert [padded_tokens(n) for n in (1, 128, 129)] == [128, 128, 256]
    assert attention_workspace_nbytes(tokens=129, heads=3) == 4 * 3 * 256


def test_the_plan_counts_what_the_backward_allocates() -> None:
    query, key = torch.empty(129, 3, 16), torch.empty(129, 1, 16)
    backward = varlen_attention._backward._opoverload

    assert operation_workspace(backward, [query, query, key, key]) == 4 * 3 * 256


def test_spans_name_the_first_and_last_token_of_each_document() -> None:
    spans = document_spans([0, 2, 3, 130])

    assert spans.shape == (2, 256 + 2)
    assert spans[:, [0, 1, 2, 3, 129]].tolist() == [[0, 0, 2, 3, 3], [1, 1, 2, 129, 129]]
    assert spans.dtype == torch.int32
    assert set(spans[0, 130:256].tolist()) == {attention_launch.NEVER}


def test_blocks_of_whole_rows_start_with_the_longest_of_all_rows() -> None:
    spans = document_spans([0, 384, 768])

    assert spans[0, 768:].tolist() == [2, 5, 1, 4, 0, 3], "the last queries see the most keys"
    assert spans[1, 768:].tolist() == [0, 3, 1, 4, 2, 5], "the first keys are seen the most"


@given(lengths=st.lists(st.integers(1, 700), min_size=1, max_size=12))
def test_every_block_is_computed_once_and_none_before_one_with_more_work(
    lengths: list[int],
) -> None:
    bounds = list(itertools.accumulate(lengths, initial=0))
    spans, tokens = document_spans(bounds), bounds[-1]
    padded = padded_tokens(tokens)

    for row, work in ((0, keys_seen), (1, queries_seen)):
        order = spans[row, padded:].tolist()
        assert sorted(order) == list(range(padded // PADDING))
        amounts = [work(bounds, block * PADDING, tokens) for block in order]
        assert amounts == sorted(amounts, reverse=True)


def keys_seen(bounds: list[int], low: int, tokens: int) -> int:
    """Return the number of keys from the first one that a block sees to its last token."""
    first = bounds[bisect.bisect_right(bounds, low) - 1]
    return min(low + PADDING, tokens) - first


def queries_seen(bounds: list[int], low: int, tokens: int) -> int:
    last = min(low + PADDING, tokens) - 1
    return bounds[bisect.bisect_right(bounds, last)] - low


def test_the_kernels_and_their_launcher_pad_alike() -> None:
    kernels = pytest.importorskip("penstock.model.attention_kernels")

    assert kernels.PADDING.value == PADDING
