"""States and gradients for tests of the optimizer sweep."""

from __future__ import annotations

import torch

from penstock.optim import formats, rules
from penstock.optim.rules import Coefficients, RuleName
from penstock.optim.sweep import LEAF, Segment

FLOATS = (torch.bfloat16, torch.float32, torch.float16)
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
RULES: dict[RuleName, Coefficients] = {
    "adamw": rules.adamw(
        step=3, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, scale=0.3
    ),
    "sgd": rules.sgd(step=2, lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.01, nesterov=True),
    "lion": rules.lion(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
}

State = dict[str, torch.Tensor]


def state_of(n: int, rule: RuleName, weight: torch.dtype, moments: str) -> State:
    torch.manual_seed(5)
    state = {"weight": torch.randn(n).to(weight)}
    if weight == torch.bfloat16:
        state["rest"] = torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16)
    if weight == torch.float16:
        state["rest"] = state["weight"].float()
    for role in ("first", "second")[: rules.NUM_MOMENTS[rule]]:
        state[role] = torch.zeros(n, dtype=MOMENTS[moments])
        if moments == "int8":
            state[f"{role}_base"] = torch.zeros(formats.num_blocks(n), dtype=torch.int16)
    return state


def rough_grad(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a gradient over many octaves, with zeros, denormals and values close to overflow."""
    torch.manual_seed(seed)
    grad = torch.randn(n) * torch.exp2(torch.randn(n) * 6)
    grad[::7] = 0
    grad[1::97] = torch.finfo(dtype).tiny * 0.3
    if dtype != torch.float16:
        grad[2::97] = -3e38
    return grad.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def leaves_of_every_kind(dtype: torch.dtype) -> torch.Tensor:
    """Return leaves whose squares fit in fp32, do not fit, and are at the limit."""
    torch.manual_seed(1)
    leaves = []
    for top in (0.0, 1.0, 2.0**-48, 2.0**-49, 2.0**-120, 255 * 2.0**40, 2.0**48, 2.0**120):
        leaf = torch.rand(LEAF) * torch.exp2(torch.randn(LEAF) * 20)
        leaf = leaf.clamp(max=1).to(torch.bfloat16).float() * top
        leaf[7] = -top
        leaves.append(leaf.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max))
    return torch.cat([*leaves, torch.tensor([1.0, -3.0])]).to(dtype)


def copy_of(state: State) -> State:
    return {role: tensor.clone() for role, tensor in state.items()}


def same(a: State, b: State) -> bool:
    return all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)


def split_segments(
    state: State, grad: torch.Tensor, by: Coefficients, at: list[int]
) -> list[Segment]:
    """Split a tensor into several segments."""
    ends = [*at, grad.numel()]
    segments = []
    for begin, end in zip([0, *at], ends, strict=True):
        parts = {
            role: t[begin // formats.BLOCK : -(-end // formats.BLOCK)]
            if role.endswith("_base")
            else t[begin:end]
            for role, t in state.items()
        }
        segments.append(
            Segment(name="x", by=by, grad=grad[begin:end], first_index=begin, key=77, **parts)
        )
    return segments
