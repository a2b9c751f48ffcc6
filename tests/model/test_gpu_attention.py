"""The kernel of PyTorch's attention on a GPU, which depends on the data type."""

from __future__ import annotations

import pytest
import torch

from penstock.model.gpu_attention import attending_as_on_gpu, choose_kernel


@pytest.mark.parametrize(
    ("dtype", "key_heads", "size", "masked", "kernel"),
    [
        (torch.bfloat16, 4, 64, False, "flash"),
        (torch.bfloat16, 2, 64, False, "flash"),
        (torch.bfloat16, 4, 512, False, "math"),
        (torch.bfloat16, 4, 64, True, "efficient"),
        (torch.float32, 4, 64, False, "efficient"),
        (torch.float32, 4, 512, False, "efficient"),
        (torch.float32, 2, 64, False, "math"),
        (torch.float32, 4, 30, False, "math"),
        (torch.float32, 4, 64, True, "efficient"),
    ],
)
def test_the_kernel_that_pytorch_uses(
    dtype: torch.dtype, key_heads: int, size: int, masked: bool, kernel: str
) -> None:
    query, key = torch.empty(1, 4, 8, size, dtype=dtype), torch.empty(1, key_heads, 8, size)
    mask = torch.ones(8, 8, dtype=torch.bool) if masked else None

    assert choose_kernel(query, key, mask) == kernel


def test_grouped_queries_in_fp32_are_computed_from_repeated_keys() -> None:
    query, key = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    attend = torch.nn.functional.scaled_dot_product_attention
    wanted = attend(query, key, key, is_causal=True, enable_gqa=True)
    with attending_as_on_gpu():
        attend = torch.nn.functional.scaled_dot_product_attention
        found = attend(query, key, key, is_causal=True, enable_gqa=True)

    torch.testing.assert_close(found, wanted)
