"""The kernel of PyTorch's attention on a GPU, which depends on the data type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the number of elements of the largest result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("masked", [True, False])
def test_queries_that_share_one_key_have_their_scores_in_memory(masked: bool) -> None:
    """No fused kernel broadcasts heads, as Falcon's multi-query attention asks for."""
    heads, tokens, size = 5, 24, 8
    query = torch.randn(1, heads, tokens, size)
    key, value = torch.randn(2, 1, 1, tokens, size)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril() if masked else None
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": not masked}
    expected = functional.scaled_dot_product_attention(query, key, value, **options)

    with attending_as_on_gpu(), _Largest() as largest:
        got = functional.scaled_dot_product_attention(query, key, value, **options)

    torch.testing.assert_close(got, expected)
    assert largest.elements == heads * tokens * tokens
