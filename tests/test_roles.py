"""Bytes per parameter in each storage format."""

from __future__ import annotations

import pytest

from penstock.roles import Dtype, Formats, Moments


@pytest.mark.parametrize(
    ("dtype", "moments", "accumulates", "nbytes"),
    [
        ("bf16", "fp32", False, 14),
        ("bf16", "bf16", False, 10),
        ("bf16", "int8", False, 8 + 2 * 2 / 256),
        ("fp16", "fp32", False, 16),
        ("bf16", "fp32", True, 16),
        ("fp32", "fp32", False, 16),
        ("fp32", "bf16", False, 12),
        ("fp32", "int8", False, 10 + 2 * 2 / 256),
        ("fp32", "fp32", True, 16),
    ],
)
def test_bytes_per_parameter(
    dtype: Dtype, moments: Moments, accumulates: bool, nbytes: float
) -> None:
    formats = Formats(dtype=dtype, moments=moments, accumulates=accumulates)

    assert formats.per_parameter == nbytes
