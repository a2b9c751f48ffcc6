"""Inputs that rest where gradients leave room. Room: decide.

A gradient is used up by its block's sweep, before the block's forward, and comes again with its
backward. Between the two its bytes are free, and that is when block inputs need a place: the input
of a block exists from the forward of the block before to its own backward, which comes before the
backward of every earlier block. So an input may rest in the gradients of earlier blocks, and takes
no memory of its own. With several rounds, or where calls add to gradients, those are never free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.plan.placement import BlockPlacement, Home
from penstock.roles import Role
from penstock.tiers import Tier

HOST = (Tier.DRAM, Tier.CXL)
"""What lies in HBM is not lent: an evaluation writes inputs there too, and may come at any time."""


class OverlaidActivation(NamedTuple):
    """Where an input rests."""

    node: int
    """The memory node."""

    offset: int
    """The first byte, counted through the gradients of that node in the order of the row."""


def node_of(home: Home | None) -> int | None:
    """The one node of the host that all of it lies on; None if there is no such."""
    if home is None or len(home.shares) != 1 or home.shares[0].tier not in HOST:
        return None
    return home.shares[0].node


def overlaid_activations(
    blocks: Sequence[BlockPlacement], *, rounds: int = 1, accumulate: bool = False
) -> dict[int, OverlaidActivation]:
    """By block, the inputs that take no memory of their own."""
    found: dict[int, OverlaidActivation] = {}
    if rounds > 1 or accumulate:
        return found
    free: Counter[int] = Counter()  # by node: bytes of earlier blocks' gradients
    used: Counter[int] = Counter()
    for index, block in enumerate(blocks):
        given = block.home(Role.INPUT)
        node = node_of(given)
        if given is not None and node is not None and used[node] + given.nbytes <= free[node]:
            found[index] = OverlaidActivation(node, used[node])
            used[node] += given.nbytes
        gradient = block.home(Role.GRADIENT)
        node = node_of(gradient)
        if gradient is not None and node is not None:
            free[node] += gradient.nbytes
    return found


def overlaid_nbytes(
    blocks: Sequence[BlockPlacement], *, rounds: int = 1, accumulate: bool = False
) -> Counter[Tier]:
    """What those inputs would take, by tier."""
    found: Counter[Tier] = Counter()
    for index in overlaid_activations(blocks, rounds=rounds, accumulate=accumulate):
        home = blocks[index].home(Role.INPUT)
        assert home is not None
        found[home.shares[0].tier] += home.nbytes
    return found
