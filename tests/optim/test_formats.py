"""Storage formats: exact where they promise it, and unbiased otherwise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SweepInputError
from penstock.optim import formats
from penstock.optim.formats import BLOCK, StateFormat
from penstock.optim.reference import WEIGHT_LIMIT
from penstock.optim.rules import draw_key

FINITE = 0x7F800000


def floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=200))
@settings(deadline=None)
def test_splitting_and_joining_any_finite_master_is_lossless(patterns: list[int]) -> None:
    bits = torch.tensor([p for p in patterns if (p & 0x7FFFFFFF) < FINITE] or [0])
    master = floats(bits)

    assert same_bits(formats.join(*formats.split(master)), master)


def test_all_low_halves_are_lossless_with_many_high_halves() -> None:
    low = torch.arange(1 << 16, dtype=torch.int64)
    highs = [0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x3FFF, 0x4000, 0x7F7E, 0x7F7F]
    highs += list(range(37, 0x7F7F, 1009))
    for high in [h | sign for h in highs for sign in (0, 0x8000)]:
        bits = (high << 16) + low
        master = floats(torch.where(bits >= 1 << 31, bits - (1 << 32), bits))
        weight, rest = formats.split(master)

        assert same_bits(formats.join(weight, rest), master), hex(high)


def test_the_weight_is_the_nearest_bf16_with_ties_away_from_zero() -> None:
    master = torch.randn(100_000) * torch.exp(torch.randn(100_000) * 20)
    weight, rest = formats.split(master)
    nearest = master.bfloat16()
    tie = rest == -32768

    assert torch.equal(weight[~tie], nearest[~tie])
    one_and_a_half_ulp = floats(torch.tensor([0x3F808000, 0x3F818000, -0x407F8000]))
    assert formats.split(one_and_a_half_ulp)[0].view(torch.int16).tolist() == [
        0x3F81,
        0x3F82,
        0xBF81 - 0x10000,
    ]


def halves(count: int, seed: int) -> torch.Tensor:
    key = draw_key(seed, step=1, tensor_id=0)
    return formats.draw_bits(key, 0, count, torch.device("cpu")) >> 16


def test_random_bits_are_uniform_and_depend_only_on_key_and_index() -> None:
    whole = formats.draw_bits(9, 0, 1 << 16, torch.device("cpu"))
    part = formats.draw_bits(9, 5000, 100, torch.device("cpu"))
    other = formats.draw_bits(10, 0, 1 << 16, torch.device("cpu"))

    assert torch.equal(part, whole[5000:5100])
    assert not torch.equal(whole, other)
    for half in (whole >> 16, whole & 0xFFFF):
        counts = torch.bincount(half >> 8, minlength=256).float()
        assert float(((counts - 256) ** 2 / 256).sum()) < 400  # chi squared, 255 degrees
    both = torch.stack([whole >> 16, whole & 0xFFFF, other >> 16]).double()
    assert float((torch.corrcoef(both) - torch.eye(3)).abs().max()) < 0.02


@pytest.mark.parametrize("value", [1.0, 1.001, -3.3e-5, 2.0**-130])
def test_stochastic_rounding_to_bf16_is_unbiased(value: float) -> None:
    x = torch.full((1 << 16,), value)
    rounded = formats.round_bf16(x, halves(x.numel(), 3)).double()

    assert abs(float(rounded.mean()) / float(x[0]) - 1) < 1e-4
    assert rounded.unique().numel() <= 2


@pytest.mark.parametrize("octaves", [1, 8, 15])
def test_int8_moments_are_unbiased_and_close(octaves: int) -> None:
    torch.manual_seed(0)
    x = torch.exp2(octaves * torch.rand(BLOCK)) * torch.randn(BLOCK).sign()
    for encode, decode, value in (
        (formats.encode_first, formats.decode_first, x),
        (formats.encode_second, formats.decode_second, x * x),
    ):
        draws = [decode(*encode(value, halves(BLOCK, seed))) for seed in range(800)]
        mean = torch.stack(draws).double().mean(0)

        assert float((mean / value - 1).abs().max()) < 0.02
        assert float((draws[0] / value - 1).abs().max()) <= 0.125


def test_int8_moments_do_not_change_when_another_element_grows() -> None:
    """All blocks use the same grid, so a new largest element does not round the others again."""
    x = torch.rand(BLOCK) + 1
    code, base = formats.encode_second(x, halves(BLOCK, 1))
    on_grid = formats.decode_second(code, base)
    grown = on_grid.clone()
    grown[0] = 1e4
    again = formats.decode_second(*formats.encode_second(grown, halves(BLOCK, 2)))

    assert torch.equal(again[1:], on_grid[1:])


def test_an_int8_second_moment_is_zero_only_if_the_exact_one_is() -> None:
    value = torch.tensor([0.0, 2.0**-149, 1e-30, 1e-12, 1.0, 3e38] * 100)
    for seed in range(20):
        stored = formats.decode_second(*formats.encode_second(value, halves(value.numel(), seed)))

        assert torch.equal(stored == 0, value == 0)
        assert bool(torch.isfinite(stored).all())


def test_a_first_moment_far_below_its_block_is_unbiased() -> None:
    value = torch.full((BLOCK,), 1e-7)
    value[0] = 1.0
    stored = [
        formats.decode_first(*formats.encode_first(value, halves(BLOCK, s))) for s in range(300)
    ]

    assert abs(float(torch.stack(stored)[:, 1:].double().mean()) / 1e-7 - 1) < 0.1


def test_the_last_block_may_be_partial() -> None:
    for numel in (1, BLOCK - 1, BLOCK, BLOCK + 1):
        code, base = formats.encode_second(torch.ones(numel), halves(numel, 0))

        assert code.numel() == numel
        assert base.numel() == formats.num_blocks(numel) == (numel + BLOCK - 1) // BLOCK


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("second", [False, True])
def test_writing_a_moment_again_changes_nothing(moments: formats.Moments, second: bool) -> None:
    value = torch.randn(3, 700).abs() if second else torch.randn(3, 700)
    once = formats.write_moment(value, "m", moments, second=second)
    back = formats.read_moment(once, "m", second=second)
    twice = formats.write_moment(back.view(3, 700), "m", moments, second=second)

    assert torch.allclose(back.view(3, 700), value, rtol=0.07, atol=0)
    assert all(same_bits(once[key], twice[key]) for key in once)


@pytest.mark.parametrize(
    ("weight", "moments", "total"),
    [
        (torch.bfloat16, "fp32", 14),
        (torch.bfloat16, "bf16", 10),
        (torch.bfloat16, "int8", 8 + 4 / BLOCK),
        (torch.float16, "fp32", 16),
        (torch.float32, "fp32", 14),
    ],
)
def test_bytes_per_parameter(weight: torch.dtype, moments: formats.Moments, total: float) -> None:
    assert StateFormat(weight=weight, moments=moments).bytes_per_parameter(torch.bfloat16) == total


def test_nbytes_lists_the_bytes_of_each_role() -> None:
    roles = StateFormat(moments="int8").nbytes(1000)

    assert roles == {
        "weight": 2000,
        "low": 2000,
        "first": 1000,
        "first_base": 8,
        "second": 1000,
        "second_base": 8,
    }


def test_unknown_formats_are_rejected() -> None:
    with pytest.raises(SweepInputError, match="'fp8'"):
        StateFormat(moments="fp8")  # type: ignore[arg-type]
    with pytest.raises(SweepInputError, match="float64"):
        StateFormat(weight=torch.float64)


def test_keys_never_change() -> None:
    """A run that is resumed with a later version draws what it would have drawn."""
    arguments = [(0, 0, 0), (7, 1, 0), (7, 1, 1), (7, 2, 0), (8, 1, 0), (-1, 3, (2 << 32) + 1)]

    assert [draw_key(*each) for each in arguments] == [
        0x238275BC38FCBE91,
        0xFBCA662387D9C66D,
        0x9FE1730FCF9F1E68,
        0x5FF9B15CC9A0DF49,
        0x201CFB7B6E3DD0D9,
        0x7F4040F73B2BA9A7,
    ]


def test_the_largest_moments_stay_finite_in_8_bits() -> None:
    largest = torch.full((BLOCK,), torch.finfo(torch.float32).max)
    always_up = torch.full((BLOCK,), 0xFFFF, dtype=torch.int32)
    for encode, decode in (
        (formats.encode_first, formats.decode_first),
        (formats.encode_second, formats.decode_second),
    ):
        stored = decode(*encode(largest, always_up))
        assert bool(stored.isfinite().all())
        assert bool((stored > 0.9 * largest).all())


@pytest.mark.parametrize("dtype", list(WEIGHT_LIMIT), ids=str)
def test_the_limit_of_a_master_is_the_largest_with_a_finite_weight(dtype: torch.dtype) -> None:
    masters = floats(torch.tensor([WEIGHT_LIMIT[dtype], WEIGHT_LIMIT[dtype] + 1]))

    assert masters.to(dtype).isfinite().tolist() == [True, False]
