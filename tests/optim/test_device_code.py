"""Tests of the GPU kernels on a machine without a GPU: interpreted, and as compiled PTX."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.device_sweeps import DTYPES, count_interpreted, needs_triton, quiet

pytestmark = quiet


@needs_triton
@pytest.mark.timeout(900)
def test_the_kernels_pass_their_tests_in_the_interpreter() -> None:
    files = [str(Path(__file__).with_name(f"test_device_{name}.py")) for name in ("sweep", "norms")]
    assert count_interpreted(*files, "-m", "not gpu") > 100


def test_without_triton_the_backend_is_torch() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from penstock.optim.device_backend import choose_backend\n"
        "print(choose_backend())\n"
        "try: choose_backend('triton')\n"
        "except ValueError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.startswith("torch\n")
    assert "pip install triton" in run.stdout


def compile_ptx(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """Return the PTX for Hopper. Triton's compiler does not need a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t.startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"enable_fp_fusion": False, "num_warps": 4}
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return ptx


def compile_sweep(rule: str, grad: str, master: str, moments: str, count: str) -> str:
    """Return the PTX of the sweep kernel for one combination of formats."""
    from penstock.optim import device_kernels

    g = "*fp32" if grad == "fp32" else "*i16"
    m = {"fp32": "*fp32", "bf16": "*i16", "int8": "*u8", "none": g}[moments]
    types = {"grad": g, "weight": "*fp32" if master == "single" else "*i16"}
    types |= {"rest": "*fp32" if master == "half" else "*i16", "first": m, "second": m}
    types |= {"first_base": "*i16", "second_base": "*i16", "refused": "*i64", "n": count}
    types |= dict.fromkeys(("first_index", "key0", "key1"), "i32")
    numbers = ("scale", "l2", "decay", "rate", "fresh1", "fresh2", "eps", "keep")
    types |= dict.fromkeys(numbers, "fp32")
    constants = {"RULE": rule, "LOOK": True, "GRAD": grad, "MASTER": master}
    constants |= {"LIMIT": 0x7F7FFFFF, "MOMENTS": moments, "ROWS": 4, "PTX": True}
    if count == "1":
        types["n"] = "constexpr"
        constants["n"] = 1
    return compile_ptx(device_kernels.sweep_kernel, types, constants)


@needs_triton
@pytest.mark.parametrize(
    ("rule", "grad", "master", "moments"),
    [
        ("adamw", "bf16", "split", "fp32"),
        ("adamw", "fp16", "half", "bf16"),
        ("adamw", "fp32", "single", "int8"),
        ("sgd", "bf16", "split", "none"),
        ("lion", "bf16", "split", "int8"),
    ],
)
@pytest.mark.parametrize("count", ["i32", "i64", "1"])
def test_compiled_arithmetic_rounds_once(
    rule: str, grad: str, master: str, moments: str, count: str
) -> None:
    ptx = compile_sweep(rule, grad, master, moments, count)
    arithmetic = set(re.findall(r"\b((?:mul|add|sub|div|sqrt|fma|mad)\.[a-z.]*f32)\b", ptx))

    assert arithmetic <= {"mul.rn.f32", "add.rn.f32", "sub.rn.f32", "div.rn.f32", "sqrt.rn.f32"}
    assert {"mul.rn.f32", "add.rn.f32"} <= arithmetic
    assert ".ftz" not in ptx
    assert ".approx" not in ptx
    assert "fma." not in ptx


@needs_triton
def test_the_sweep_kernel_does_not_compile_for_a_rule_it_lacks() -> None:
    from triton.compiler import CompilationError

    with pytest.raises(CompilationError, match="no step for this rule"):
        compile_sweep("adagrad", "bf16", "split", "fp32", "i32")


@needs_triton
@pytest.mark.parametrize("grad", DTYPES)
def test_the_norm_kernels_compile_without_fused_operations(grad: str) -> None:
    from penstock.optim import norm_kernels

    types = {"grad": "*fp32" if grad == "fp32" else "*i16", "leaf_sums": "*fp64"}
    types |= dict.fromkeys(("parts", "top_bits", "first_bad"), "*i64")
    constants = {"GRAD": grad, "LEAVES": 8, "PARTS": 16, "ALIGNED": True}
    ptx = compile_ptx(norm_kernels.leaf_kernel, types, constants)
    limbs = {"leaf_sums": "*fp64", "limbs": "*i64", "num_leaves": "i32"}

    assert ".ftz" not in ptx
    assert "fma." not in ptx
    assert "atom" in compile_ptx(norm_kernels.limb_kernel, limbs, {"LEAVES": 128})
