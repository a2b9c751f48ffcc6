"""Store saved activations in the memory of gradients that do not exist yet.

A block's gradient is consumed by its optimizer sweep, before the block's forward, and exists again
only after the block's backward. Between the two, its memory is free, and that is when activations
need memory: the activation of a block exists from the forward of the previous block to the block's
own backward, which comes before the backward of every earlier block. So the input can be stored in
the gradients of earlier blocks, and needs no memory of its own. The same is true of what attention
returned, which exists from the block's own forward to its own backward.

A block whose moments are updated in backward (`BlockPlacement.late_moments`) needs its gradient
until then, so nothing is stored in its memory. Such gradients follow all others on their node:
what is overlaid is contiguous.

With several rounds, or when calls accumulate gradients, gradients exist all the time and nothing
can be overlaid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.plan.placement import BlockPlacement, Home, Share
from penstock.roles import PASSING, Role
from penstock.tiers import Tier

HOST = (Tier.DRAM, Tier.CXL)
"""Tiers in which activations are overlaid. HBM is not one of them: an evaluation also writes
activations there, and may run at any time. It saves no results of attention, so these are overlaid
in HBM, too."""


class OverlaidActivation(NamedTuple):
    """Where an overlaid activation, or what attention returned, is stored."""

    node: int | None
    """The NUMA node; None for HBM."""

    offset: int
    """Offset in bytes, counted through the gradients on that node in `gradient_order`."""


def _only_share(home: Home | None, tiers: tuple[Tier, ...] = HOST) -> Share | None:
    """Return the share that is all of a home, if it is in one of the tiers."""
    if home is None or len(home.shares) != 1 or home.shares[0].tier not in tiers:
        return None
    return home.shares[0]


def overlaid_activations(
    blocks: Sequence[BlockPlacement], *, rounds: int = 1, accumulate: bool = False,
    in_hbm: bool = False,
) -> dict[tuple[int, Role], OverlaidActivation]:  # fmt: skip
    """Return, by block and role, what needs no memory of its own.

    With `in_hbm`, gradients in HBM are written when their block's backward ends, and not before, so
    results of attention may be stored in their memory (`Workload.sums_apart`).
    """
    overlaid: dict[tuple[int, Role], OverlaidActivation] = {}
    if rounds > 1 or accumulate:
        return overlaid
    available: dict[int | None, int] = {}  # by node: bytes of earlier blocks' gradients
    used: dict[int | None, int] = {}
    for index, block in enumerate(blocks):
        for role in PASSING:
            device = in_hbm and role is Role.ATTENTION
            share = _only_share(block.home(role), (*HOST, Tier.HBM) if device else HOST)
            if share is not None:
                offset = used.get(share.node, 0)
                if offset + share.nbytes <= available.get(share.node, 0):
                    overlaid[index, role] = OverlaidActivation(share.node, offset)
                    used[share.node] = offset + share.nbytes
        # Only later blocks may use this block's gradient, so it is added last.
        share = _only_share(block.home(Role.GRADIENT), (*HOST, Tier.HBM))
        if share is not None and not block.late_moments:
            available[share.node] = available.get(share.node, 0) + share.nbytes
    return overlaid


def gradient_order(blocks: Sequence[BlockPlacement]) -> list[int]:
    """Return the blocks in the order in which the gradients of one node are stored."""
    return sorted(range(len(blocks)), key=lambda index: blocks[index].late_moments)


def overlaid_nbytes(
    blocks: Sequence[BlockPlacement], *, rounds: int = 1, accumulate: bool = False,
    in_hbm: bool = False,
) -> Counter[Tier]:  # fmt: skip
    """Return the bytes that overlaying saves, by tier."""
    saved: Counter[Tier] = Counter()
    overlaid = overlaid_activations(blocks, rounds=rounds, accumulate=accumulate, in_hbm=in_hbm)
    for index, role in overlaid:
        home = blocks[index].home(role)
        assert home is not None
        saved[home.shares[0].tier] += home.nbytes
    return saved
