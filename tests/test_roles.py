"""Bytes per parameter in each storage format."""

from __future__ import annotations

import pytest

from penstock.roles import Formats


@pytest.mark.parametrize(
    ("dtype", "moments", "wide", "nbytes"),
    [
        ("bf16", "fp32", False, 14),
        ("bf16", "bf16", False, 10),
        ("bf16", "int8", False, 8 + 2 * 2 / 256),
        ("fp16", "fp32", False, 16),
        ("bf16", "fp32", True, 16),
    ],
)
def test_bytes_per_parameter(dtype: str, moments: str, wide: bool, nbytes: float) -> None:
    formats = Formats(dtype=dtype, moments=moments, wide_gradient=wide)  # type: ignore[arg-type]

    assert formats.per_parameter == nbytes
