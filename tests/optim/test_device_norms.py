"""Norms on the GPU give the same bits as on the host; invalid inputs are rejected."""

from __future__ import annotations

import math
import random
import weakref
from typing import Any

import pytest
import torch

from penstock.errors import SweepInputError
from penstock.optim import device_sweep, sweep
from penstock.optim.rules import Coefficients
from penstock.optim.sweep import LEAF, Segment
from tests.support.device_sweeps import (
    DTYPES,
    INTERPRETED,
    RULES,
    find_device,
    grad_of,
    on_device,
    quiet,
    state_of,
    to,
)
from tests.support.sweeps import leaves_of_every_kind

pytestmark = quiet


@pytest.fixture
def device() -> torch.device:
    return find_device()


@on_device
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("n", [1, 33, LEAF, 9 * LEAF + 1234])
def test_stats_equal_those_of_the_host(
    n: int, kind: str, backend: Any, device: torch.device
) -> None:
    grad = grad_of(n, DTYPES[kind], n)

    assert device_sweep.grad_stats(grad.to(device), backend=backend) == sweep.grad_stats(grad)


@on_device
def test_stats_of_many_leaves_equal_those_of_the_host(device: torch.device) -> None:
    n = 20 * LEAF + 7 if INTERPRETED else 3000 * LEAF + 7
    grad = (torch.randn(n) * torch.exp2(torch.randn(n) * 8)).bfloat16()

    assert device_sweep.grad_stats(grad.to(device)) == sweep.grad_stats(grad)


@on_device
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_kind_of_leaf_has_the_same_sum_as_on_the_host(
    dtype: torch.dtype, backend: Any, device: torch.device
) -> None:
    grad = leaves_of_every_kind(dtype)
    # All leaves in one launch, and each alone.
    for part in (grad, *grad.split(LEAF)):
        there = device_sweep.grad_stats(part.to(device), backend=backend)

        assert there == sweep.grad_stats(part)


@on_device
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", DTYPES)
def test_the_first_bad_element_is_named(
    bad: float, kind: str, backend: Any, device: torch.device
) -> None:
    grads = [grad_of(3 * LEAF, DTYPES[kind], seed) for seed in range(3)]
    grads[2][5] = bad
    grads[1][2 * LEAF + 17 :: 100] = bad
    host = sweep.grad_stats(grads)
    there = device_sweep.grad_stats([grad.to(device) for grad in grads], backend=backend)

    assert there.first_bad == host.first_bad == (1, 2 * LEAF + 17)
    assert there.units == host.units
    assert str(there.max_abs) == str(host.max_abs)


@on_device
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_stats_of_parts_of_one_buffer_equal_those_of_the_host(
    backend: Any, device: torch.device
) -> None:
    """Of any sizes, empty ones too, at places that are aligned and not, and of several types."""
    rng = random.Random(3)
    for step in (1, 8, 1):
        sizes = [step * rng.choice((0, 1, 300, LEAF // 8, 3 * LEAF + 5)) for _ in range(11)]
        whole = grad_of(sum(sizes) + 64, torch.bfloat16, step)
        at, grads = 0, []
        for size in sizes:
            grads.append(whole[at : at + size])
            at += size + rng.choice((0, step))
        grads[4:4] = [grad_of(2 * LEAF + 1, torch.float32, 1), grad_of(7, torch.float16, 1)]
        grads[rng.choice((0, 9))].fill_(math.inf)
        there = whole.to(device)
        moved = [
            there[g.storage_offset() :][: g.numel()] if g.dtype == whole.dtype else g.to(device)
            for g in grads
        ]

        assert device_sweep.grad_stats(moved, backend=backend) == sweep.grad_stats(grads)


@on_device
def test_a_step_returns_stats_if_requested(device: torch.device) -> None:
    grad = torch.randn(5000).bfloat16()
    state = to(state_of(5000, "adamw", "bf16", "fp32"), device)
    one = Segment(name="x", by=RULES["adamw"][1], grad=grad.to(device), **state)
    ticket = device_sweep.start("adamw", [one], stats=True)

    assert ticket.wait() == sweep.grad_stats(grad) == ticket.wait()
    assert ticket.done()


def segment(device: torch.device, **changes: Any) -> Segment:
    state = to(state_of(1000, "adamw", "bf16", "fp32"), device)
    grad = torch.ones(1000, dtype=torch.bfloat16, device=device)
    parts: dict[str, Any] = {"name": "layer", "by": Coefficients(), "grad": grad, **state}
    return Segment(**{**parts, **changes})


BAD = {
    "shorter grad": ({"grad": torch.ones(999)}, "weight of layer has 1000 elements.* 999"),
    "dtype of grad": ({"grad": torch.ones(1000, dtype=torch.float64)}, "is torch.float64"),
    "dtype of rest": ({"rest": torch.zeros(1000)}, "expected int16"),
    "moments differ": ({"second": torch.zeros(1000).bfloat16()}, "expected float32"),
    "no remainder": ({"rest": None}, "rest of layer is missing"),
    "no second": ({"second": None}, "second of layer is missing"),
    "a base too many": ({"first_base": torch.zeros(4, dtype=torch.int16)}, "is not used"),
    "strided": ({"grad": torch.ones(2000).bfloat16()[::2]}, "not contiguous"),
    "between leaves": ({"first_index": 100}, "begins at element 100"),
}


@on_device
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_changes_nothing(name: str, device: torch.device) -> None:
    changes, message = BAD[name]
    there = {}
    for role, value in changes.items():
        there[role] = value
        if isinstance(value, torch.Tensor):
            step = 2 if name == "strided" else 1
            there[role] = torch.zeros(value.numel() * step).to(device, value.dtype)[::step]
    good, bad = segment(device), segment(device, **there)
    before = good.weight.clone()
    with pytest.raises(SweepInputError, match=message):
        device_sweep.start("adamw", [good, bad])

    assert torch.equal(good.weight, before)


@on_device
def test_shared_memory_is_rejected(device: torch.device) -> None:
    memory = torch.zeros(1500, device=device)
    with pytest.raises(SweepInputError, match="shares memory with first of layer"):
        device_sweep.start("adamw", [segment(device, first=memory[:1000], second=memory[500:])])
    one = segment(device)
    with pytest.raises(SweepInputError, match="shares memory"):
        device_sweep.start("adamw", [one, one])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter accepts host tensors")
def test_a_host_tensor_is_rejected() -> None:
    with pytest.raises(SweepInputError, match="on cpu; it must be a dense cuda tensor"):
        device_sweep.start("adamw", [segment(torch.device("cpu"))])
    with pytest.raises(SweepInputError, match="on cpu; it must be a dense cuda tensor"):
        device_sweep.grad_stats(torch.ones(5))


def test_an_empty_job_finishes() -> None:
    assert device_sweep.start("adamw", []).wait() is None
    assert device_sweep.grad_stats([]).sum_squares == 0.0


@on_device
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_ticket_does_not_keep_gradients_in_memory(backend: Any, device: torch.device) -> None:
    """A step rounds every block's gradient to a temporary copy and reads its norm at the end."""
    grad = grad_of(LEAF, torch.bfloat16, 3).to(device)
    expected = device_sweep.grad_stats(grad, backend=backend)
    ticket = device_sweep.start_stats([grad], backend=backend)
    reference = weakref.ref(grad)
    del grad

    assert reference() is None
    assert ticket.wait() == expected
