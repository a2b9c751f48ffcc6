"""The optimizers compared with fp64, with torch and with the papers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from penstock.optim import SGD, AdamW, Lion, formats

N = 2048
STEPS = 1000

Grads = Callable[[int], torch.Tensor]


def random_grads(step: int) -> torch.Tensor:
    torch.manual_seed(step)
    return torch.randn(N) * torch.exp2(torch.linspace(-8, 8, N))


def grads_with_zeros(step: int) -> torch.Tensor:
    grad = random_grads(step)
    grad[step % 3 :: 3] = 0
    grad[:200] = 0
    return grad


def denormal_grads(step: int) -> torch.Tensor:
    return random_grads(step).sign() * 1e-39


def tiny_grads(step: int) -> torch.Tensor:
    """Return gradients whose squares are denormal or zero."""
    return random_grads(step) * 1e-19


def huge_grads(step: int) -> torch.Tensor:
    """Return gradients whose squares are not finite in fp32."""
    return random_grads(step).clamp(-10, 10) * 1e36


def alternating_grads(step: int) -> torch.Tensor:
    return torch.linspace(1e-3, 10, N) * (-1) ** step


def spiky_grads(step: int) -> torch.Tensor:
    """Return gradients with a spike every hundred steps, which only the second moment remembers."""
    return random_grads(step) * (1e3 if step % 100 == 0 else 1e-3)


def run(optimizer: torch.optim.Optimizer, param: torch.Tensor, grads: Grads, steps: int) -> None:
    for step in range(1, steps + 1):
        param.grad = grads(step).to(param.dtype)
        optimizer.step()


def errors(value: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    difference = (value.double() - truth).abs()
    return float(difference.max()), float(difference.square().mean().sqrt())


HARD_GRADS = (
    random_grads,
    grads_with_zeros,
    denormal_grads,
    tiny_grads,
    huge_grads,
    alternating_grads,
    spiky_grads,
)


@pytest.mark.parametrize(
    ("grads", "dtype"),
    [
        *((grads, torch.float32) for grads in HARD_GRADS),
        *((grads, torch.bfloat16) for grads in (random_grads, huge_grads, alternating_grads)),
    ],
)
@pytest.mark.parametrize("steps", [250, pytest.param(STEPS, marks=pytest.mark.long)])
def test_the_error_of_adamw_is_no_larger_than_torchs(
    grads: Grads, dtype: torch.dtype, steps: int
) -> None:
    torch.manual_seed(0)
    initial = torch.randn(N).to(dtype)
    all_grads = [grads(step).to(dtype) for step in range(1, steps + 1)]
    grads_at = lambda step: all_grads[step - 1]  # noqa: E731
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    ours, theirs, truth = (
        initial.clone().requires_grad_(),
        initial.float().clone().requires_grad_(),
        initial.double().requires_grad_(),
    )
    optimizer = AdamW([ours], **settings)
    run(optimizer, ours, grads_at, steps)
    run(torch.optim.AdamW([theirs], foreach=False, **settings), theirs, grads_at, steps)
    run(torch.optim.AdamW([truth], foreach=False, **settings), truth, grads_at, steps)
    master = formats.read_master(ours.detach(), optimizer.state[ours].get("low"))
    worst, mean = errors(master, truth.detach())
    their_worst, their_mean = errors(theirs.detach(), truth.detach())

    assert worst <= their_worst
    assert mean <= their_mean


@pytest.mark.parametrize(
    ("our_class", "torch_class", "settings"),
    [
        (AdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
        (AdamW, torch.optim.AdamW, {"lr": 1e-2, "maximize": True}),
        (SGD, torch.optim.SGD, {"lr": 1e-2}),
        (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
        (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
        (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.5, "weight_decay": 0.1}),
    ],
)
def test_non_default_settings_agree_with_torch(
    our_class: type[torch.optim.Optimizer], torch_class: type[torch.optim.Optimizer], settings: dict
) -> None:
    ours = torch.linspace(-1, 1, N).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    grads = lambda step: random_grads(step).clamp(-3, 3)  # noqa: E731
    run(our_class([ours], **settings), ours, grads, 30)
    run(torch_class([theirs], **settings), theirs, grads, 30)

    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_l2_decay_agrees_with_adam() -> None:
    ours = torch.linspace(-1, 1, N).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    run(AdamW([ours], weight_decay=0.3, decoupled_weight_decay=False), ours, alternating_grads, 20)
    run(torch.optim.Adam([theirs], weight_decay=0.3), theirs, alternating_grads, 20)

    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_lion_agrees_with_the_paper() -> None:
    ours = torch.linspace(-1, 1, N).requires_grad_()
    expected, moment = ours.detach().double(), torch.zeros(N, dtype=torch.float64)
    run(Lion([ours], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1), ours, random_grads, 50)
    for step in range(1, 51):
        g = random_grads(step).double()
        expected = expected * (1 - 1e-3 * 0.1) - 1e-3 * (0.9 * moment + 0.1 * g).sign()
        moment = 0.99 * moment + 0.01 * g

    assert torch.allclose(ours.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_small_changes_of_the_second_moment_are_not_lost(moments: formats.Moments) -> None:
    """From step 500 on, the gradient is a tenth. Rounded to nearest, bf16 would not change at all:
    each step subtracts 0.1 %, and half the spacing of bf16 is 0.2 to 0.4 %."""
    param = torch.zeros(N).requires_grad_()
    optimizer = AdamW([param], moments=moments)
    run(optimizer, param, lambda step: torch.full((N,), 1.0 if step <= 500 else 0.1), 1500)
    stored = formats.read_moment(optimizer.state[param], "exp_avg_sq", second=True)
    peak = 1 - 0.999**500
    exact = peak * 0.999**1000 + 0.01 * (1 - 0.999**1000)

    assert abs(float(stored.mean()) / exact - 1) < 0.05
    nearest = torch.tensor(peak).bfloat16()
    assert (nearest.float() * 0.999 + 0.001 * 0.01).bfloat16() == nearest


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_adamw_fits_a_matrix_in_every_format(dtype: torch.dtype, moments: formats.Moments) -> None:
    torch.manual_seed(0)
    target = torch.randn(40, 30)
    param = torch.zeros(40, 30, dtype=dtype).requires_grad_()
    optimizer = AdamW([param], lr=0.05, weight_decay=0.0, moments=moments)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    for _ in range(300):
        optimizer.zero_grad()
        (param.float() - target).square().mean().backward()
        optimizer.step()
        scheduler.step()

    assert float((param.detach().float() - target).square().mean()) < 1e-3
