"""The decode kernel without a GPU: run by the interpreter, and compiled for inspection."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kv import decode_attention
from penstock.kv.errors import KvWarning
from tests.support.device_sweeps import count_interpreted, needs_triton, quiet

pytestmark = quiet


@needs_triton
def test_the_interpreted_kernel_passes_its_tests() -> None:
    file = str(Path(__file__).with_name("test_decode_kernels.py"))
    assert count_interpreted(file) > 30


def compile_for_hopper(dtype: str, group: int, head: int, **more: Any) -> Any:
    """Compile the kernel for Hopper with Triton's compiler, as `decode_attention.attend` does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from penstock.kv import decode_kernels

    wide = max(16, decode_attention.next_power_of_two(head))
    element_nbytes = 4 if dtype == "fp32" else 2
    block = max(16, min(128, decode_attention.TILE_NBYTES // (wide * element_nbytes)))
    types = dict.fromkeys(("query", "key", "value"), f"*{dtype}")
    types |= {"starts": "*i64", "ends": "*i64", "out": f"*{dtype}"}
    types |= dict.fromkeys(("partial", "tops", "sums"), "*fp32")
    types |= {"splits": "i32", "scale": "fp32", "softcap": "fp32"}
    strides = ("query_row", "query_head", "key_token", "key_head", "value_token", "value_head")
    types |= dict.fromkeys(strides, "i32")
    constants = {
        "GROUP": group, "GROUP_PAD": max(16, decode_attention.next_power_of_two(group)),
        "HEAD": head, "HEAD_PAD": wide, "WHOLE": False,
        "STAGES": decode_attention.STAGES, "WINDOW": 0, "SOFTCAP": False, "BLOCK": block,
    } | more  # fmt: skip
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or name in strides
    }
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=decode_kernels.part_kernel, signature=signature, constexprs=constants, attrs=aligned
    )
    target = GPUTarget("cuda", 90, 32)
    options = {"num_warps": decode_attention.WARPS, "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "group", "head", "more"),
    [
        ("bf16", 4, 128, {}),
        ("bf16", 1, 80, {"WINDOW": 4096}),
        ("fp16", 8, 64, {"WHOLE": True}),
        ("bf16", 2, 256, {"SOFTCAP": True, "WINDOW": 4096}),
        ("fp32", 4, 128, {}),
        ("fp32", 2, 8, {}),
    ],
)
def test_keys_are_prefetched_in_16_byte_vectors(
    dtype: str, group: int, head: int, more: dict[str, Any]
) -> None:
    """Check the assumptions behind the tile sizes.

    Each thread copies 16 bytes asynchronously, without passing through registers, and as many
    programs fit on an SM as `num_splits` assumes.
    """
    kernel = compile_for_hopper(dtype, group, head, **more)

    copies = re.findall(r"cp\.async\.\S+ \[.*?\], \[.*?\], (\w+)", kernel.asm["ptx"])
    assert len(copies) >= 2 * (decode_attention.STAGES - 1)
    assert set(copies) == {"0x10"}
    assert decode_attention.PROGRAMS_PER_SM * (kernel.metadata.shared + 1024) <= 228 * 1024


def test_missing_triton_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "kernels", lambda: None)
    decode_attention.available.cache_clear()
    with pytest.warns(KvWarning, match="pip install triton"):
        assert not decode_attention.fits(torch.device("cuda:0"), torch.bfloat16, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not decode_attention.fits(torch.device("cuda:0"), torch.bfloat16, 128)
    decode_attention.available.cache_clear()


def test_unsupported_types_and_head_sizes_do_not_fit() -> None:
    here = torch.device("cpu")
    assert not decode_attention.fits(here, torch.bfloat16, 128)  # no interpreter in this process
    assert not decode_attention.fits(here, torch.float64, 128)
    assert not decode_attention.fits(here, torch.bfloat16, 512)
    assert not decode_attention.fits(here, torch.bfloat16, 20)
    assert not decode_attention.fits(here, torch.bfloat16, 4)
