"""States, gradients and marks for tests of the optimizer sweep on the GPU.

Without a GPU, these tests run in Triton's interpreter in a separate process
(`test_device_code.py`), because Triton decides at import whether it compiles or interprets.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from penstock.errors import NonFiniteMasterError
from penstock.optim import device_sweep, formats, rules, sweep
from penstock.optim.rules import Coefficients, RuleName
from penstock.optim.sweep import Segment

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None

on_device = pytest.mark.skipif(False, reason="") if INTERPRETED else pytest.mark.gpu
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
quiet = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.*"),
    # numpy warns about infinities that are intended
    *([pytest.mark.filterwarnings("ignore::RuntimeWarning")] if INTERPRETED else []),
]


def count_interpreted(*words: str) -> int:
    """Run tests in Triton's interpreter, assert that none fails, and return how many passed."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout[-3000:], run.stderr[-1000:])
    assert run.returncode == 0
    return int(re.findall(r"(\d+) passed", run.stdout)[-1])


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
RULES: dict[str, tuple[RuleName, Coefficients]] = {
    "adamw": (
        "adamw",
        rules.adamw(step=3, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, scale=0.3),
    ),
    "adam-l2": (
        "adamw",
        rules.adamw(
            step=1, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decoupled=False
        ),
    ),
    "sgd": (
        "sgd",
        rules.sgd(step=2, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, nesterov=False),
    ),
    "nesterov": (
        "sgd",
        rules.sgd(step=2, lr=0.1, momentum=0.9, dampening=0, weight_decay=0.01, nesterov=True),
    ),
    "lion": ("lion", rules.lion(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, scale=-2.0)),
}
KEY = rules.draw_key(1, 2, 3) | 1 << 63 | 1 << 31
"""Both halves are negative as 32-bit numbers."""

State = dict[str, torch.Tensor]


def find_device() -> torch.device:
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


def hard_floats(n: int, seed: int) -> torch.Tensor:
    """Return fp32 values with random bit patterns, signed zeros, denormals, ties and extremes."""
    torch.manual_seed(seed)
    value = torch.randn(n)
    wild = torch.randint(-(2**31), 2**31 - 1, (n,), dtype=torch.int32).view(torch.float32)
    wild = torch.where(wild.isfinite() & (wild.abs() < 1e30), wild, value)
    value = torch.where(torch.rand(n) < 0.5, value, wild)
    ends = [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 3e38, -3e38, 1.00390625, 1.01171875, -1.0]
    for i, end in enumerate(ends):
        value[i :: 10 * len(ends)] = end
    return value


def as_type(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    top = torch.finfo(dtype).max
    return value.clamp(-top, top).to(dtype)


def grad_of(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    grad = hard_floats(n, seed)
    if dtype == torch.float16:
        # As with a loss scale: mostly within the narrow range of fp16, including denormals.
        grad = torch.where(grad.abs() > 1e6, grad.sign(), grad)
        grad[5::17] *= 2.0**-20
    return as_type(grad, dtype)


def state_of(n: int, rule: RuleName, weight: str, moments: str, seed: int = 5) -> State:
    master = hard_floats(n, seed).clamp(-1e4, 1e4)
    state: State = {}
    if weight == "bf16":
        state["weight"], state["rest"] = formats.split(master)
    else:
        state["weight"] = as_type(master, DTYPES[weight])
    if weight == "fp16":
        state["rest"] = master
    for i, role in enumerate(("first", "second")[: rules.NUM_MOMENTS[rule]]):
        if moments == "none":
            continue
        value = hard_floats(n, seed + 1 + i).clamp(-1e9, 1e9)
        stored = formats.write_moment(
            value.abs() if role == "second" else value,
            role,
            moments,  # type: ignore[arg-type]
            second=role == "second",
        )
        state |= {name.removesuffix("_code"): tensor for name, tensor in stored.items()}
    return state


def to(state: State, device: torch.device) -> State:
    return {role: tensor.to(device, copy=True) for role, tensor in state.items()}


def differing(a: State, b: State) -> dict[str, int]:
    """Return the number of differing bytes of each role; empty if none differ."""
    counts = {
        role: int((a[role].cpu().view(torch.uint8) != b[role].cpu().view(torch.uint8)).sum())
        for role in a
    }
    return {role: count for role, count in counts.items() if count}


def step_on_host(rule: RuleName, state: State, grad: torch.Tensor, **more: Any) -> int | None:
    return outcome(sweep.start(rule, [Segment(name="x", grad=grad, **state, **more)]))


def step_on_device(rule: RuleName, state: State, grad: torch.Tensor, **more: Any) -> int | None:
    backend = more.pop("backend", None)
    segments = [Segment(name="x", grad=grad, **state, **more)]
    return outcome(device_sweep.start(rule, segments, backend=backend))


def outcome(ticket: Any) -> int | None:
    """Wait for a sweep and return the first refused element, or None."""
    try:
        ticket.wait()
    except NonFiniteMasterError as error:
        return error.index
    return None
