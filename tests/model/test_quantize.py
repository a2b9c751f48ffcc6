"""Quantized weights have the values of bitsandbytes' definition, on any path."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.errors import EngineError
from penstock.model import quantize as quantizing
from penstock.model.quantize import (
    INT4,
    NF4,
    dequantize,
    dequantized_parts,
    quantize,
    quantized_values,
)
from penstock.packed_weights import BLOCK, GROUP, PackedLayout, Quantization, scratch_nbytes

FORMS: tuple[Quantization, ...] = ("nf4", "int4")
SIZES = (1, 63, 64, 65, 127, 16384, 16385, 3 * 16384 + 641)


def draw(elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw weights whose blocks have different sizes."""
    generator = torch.Generator().manual_seed(elements)
    sizes = torch.rand(elements // BLOCK + 1, generator=generator).repeat_interleave(BLOCK)
    return (torch.randn(elements, generator=generator) * sizes[:elements]).to(dtype)


def pack(weights: torch.Tensor, form: Quantization) -> torch.Tensor:
    packed = torch.full((PackedLayout(weights.numel()).nbytes,), 255, dtype=torch.uint8)
    quantize(lambda low, high: weights[low:high], weights.numel(), form, packed)
    return packed


def defined_values(weights: torch.Tensor, form: Quantization) -> torch.Tensor:
    """Quantize by the definition, one weight after the other, with fp32 scales of blocks."""
    table = torch.tensor({"nf4": NF4, "int4": INT4[1:]}[form])
    found = []
    for block in weights.float().split(BLOCK):
        scale = block.abs().max()
        normed = block / scale if scale else block
        nearest = (normed[:, None] - table[None, :]).abs().argmin(1)
        found.append(table[nearest] * scale)
    return torch.cat(found)


@pytest.mark.parametrize(("form", "elements"), list(itertools.product(FORMS, SIZES)))
def test_values_are_those_of_the_definition_but_for_the_scales_rounding(
    form: Quantization, elements: int
) -> None:
    weights = draw(elements)
    expected = defined_values(weights, form)
    found = quantized_values(weights, form)
    # Scales are stored in 8 bits: relative to the largest scale of a group, a code is within 1 %.
    largest = float(weights.abs().max())
    assert float((found - expected).abs().max()) <= 0.01 * largest


def test_scales_have_the_256_values_of_the_signed_dynamic_map() -> None:
    table = quantizing._scale_table(torch.device("cpu")).tolist()
    # The largest scale of a group is exact, and so is zero; the others are midpoints.
    assert (len(table), table[-1], table.count(0.0)) == (256, 1.0, 1)
    assert table == sorted(table)
    assert table[-2] == pytest.approx(1 - 0.9 / 128)
    assert table[0] == -table[-2]
    assert min(value for value in table if value > 0) == pytest.approx(0.55e-6)


def test_zeros_stay_zeros() -> None:
    weights = torch.cat([torch.zeros(200), draw(500), torch.zeros(64 * 300)])
    for form in FORMS:
        values = quantized_values(weights, form)
        assert float(values[:128].abs().max()) == 0.0
        assert not bool(quantized_values(torch.zeros(65), form).any())
        tiny = torch.full((130,), 1e-42)
        assert float(quantized_values(tiny, form).abs().max()) <= 1e-42


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_its_table_value_times_its_scale_rounded_once(dtype: torch.dtype) -> None:
    elements = 16384 + 700
    packed, layout = pack(draw(elements, dtype), "nf4"), PackedLayout(elements)
    into = torch.empty(elements, dtype=dtype)
    dequantize(packed, "nf4", into, torch.empty(scratch_nbytes(elements), dtype=torch.uint8))
    codes = torch.stack([packed[layout.codes] >> 4, packed[layout.codes] & 15], 1).view(-1)
    steps = quantizing._scale_table(torch.device("cpu"))[packed[layout.scale_codes].long()]
    groups = packed[layout.group_scales].view(torch.float32).repeat_interleave(GROUP)
    scales = steps * groups[: layout.blocks] + packed[layout.mean].view(torch.float32)
    products = torch.tensor(NF4)[codes.long()] * scales.repeat_interleave(BLOCK)[:elements]
    assert torch.equal(into, products.to(dtype))


def test_parts_and_chunks_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = 5 * 16384 + 77
    weights = draw(elements, torch.bfloat16)
    whole = pack(weights, "nf4")
    expected = quantized_values(weights, "nf4")
    monkeypatch.setattr(quantizing, "PART", 2 * 16384)
    monkeypatch.setattr(quantizing, "CACHED", 16384)
    monkeypatch.setattr(quantizing, "CHUNK", 16384)
    assert torch.equal(pack(weights, "nf4"), whole)
    into = torch.empty_like(weights)
    dequantize(whole, "nf4", into, torch.empty(scratch_nbytes(elements), dtype=torch.uint8))
    assert torch.equal(into, expected)
    parts = dequantized_parts(whole, elements, "nf4", torch.bfloat16)
    assert torch.equal(torch.cat([part.clone() for part in parts]), expected)


def test_the_kernel_that_is_compiled_computes_the_same_bits() -> None:
    """Here as separate operations: a GPU compiles the same function."""
    for form, elements in itertools.product(FORMS, (130, 16384)):
        weights = draw(elements, torch.bfloat16)
        packed, layout = pack(weights, form), PackedLayout(elements)
        scratch = torch.empty(scratch_nbytes(elements), dtype=torch.uint8)
        expected, found = torch.empty_like(weights), torch.empty_like(weights)
        dequantize(packed, form, expected, scratch)
        scales = quantizing._Scratch.of(scratch, layout.blocks).scales
        table = torch.tensor(quantizing._TABLES[form])
        quantizing._multiply(packed[layout.codes], scales, table, found)
        assert torch.equal(found, expected)


def test_70_billion_weights_take_0_516_bytes_each() -> None:
    assert PackedLayout(70 << 30).nbytes / (70 << 30) == pytest.approx(0.515869, abs=1e-6)


def test_weights_that_are_not_finite_are_refused() -> None:
    for value in (float("inf"), float("nan")):
        weights = draw(300)
        weights[17] = value
        with pytest.raises(EngineError, match="not finite"):
            quantized_values(weights, "nf4")


def test_values_are_those_of_bitsandbytes() -> None:
    """Codes are equal; scales may differ where the mean of all scales has another last bit."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    elements = 96 * 200
    weights = draw(elements, torch.bfloat16)
    codes, state = functional.quantize_4bit(
        weights, blocksize=BLOCK, quant_type="nf4", compress_statistics=True
    )
    packed, layout = pack(weights, "nf4"), PackedLayout(elements)
    assert torch.equal(packed[layout.codes], codes.view(-1))
    packed[layout.mean] = state.offset.float().view(1).view(torch.uint8)
    packed[layout.group_scales] = state.state2.absmax.view(torch.uint8)
    packed[layout.scale_codes] = state.absmax
    into = torch.empty_like(weights)
    dequantize(packed, "nf4", into, torch.empty(scratch_nbytes(elements), dtype=torch.uint8))
    assert torch.equal(into, functional.dequantize_4bit(codes, state).view(-1))


def test_a_kernel_with_other_bits_is_found_out() -> None:
    table = torch.tensor(NF4)
    assert quantizing._has_equal_bits(
        lambda codes, scales, into: quantizing._multiply(codes, scales, table, into),
        table,
        torch.bfloat16,
    )
    assert not quantizing._has_equal_bits(
        lambda codes, scales, into: quantizing._multiply(codes, scales * 1.01, table, into),
        table,
        torch.bfloat16,
    )
