"""MemAscend's account of host memory under ZeRO-Infinity (arXiv 2505.23254). Room: decide.

A reconstruction that gives the paper's published figures: see docs/planner.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model.inventory import Inventory
from penstock.units import GiB

COMMON = 10 * GiB
"""Optimizer staging, framework and short-context activations: the same on both sides."""

CHECK = 1.25
"""What `isinf` adds to the fp32 gradient it looks through: its absolute value and a mask."""

POOL_BUFFERS = 9
"""One block's seven matrices, the embedding and the head, each as large as the embedding."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory."""

    pool: int
    """Staging of parameters."""

    gradient: int
    """The flat fp32 gradient, and what checking it adds."""

    common: int = COMMON
    """Everything else."""

    @property
    def total(self) -> int:
        return self.pool + self.gradient + self.common


def exact_pool(inventory: Inventory) -> int:
    """What is ever in use: the embedding, the head and one block's matrices, 16 bit."""
    embedding, layer, head = inventory.blocks[0], inventory.blocks[1], inventory.blocks[-1]
    matrices = [t.elements for b in (embedding, layer, head) for t in b.tensors if len(t.shape) > 1]
    return 2 * sum(matrices)


def slotted_pool(inventory: Inventory) -> int:
    """What ZeRO-Infinity reserves for it, before rounding."""
    largest = max(t.elements for b in inventory.blocks for t in b.tensors)
    return 2 * POOL_BUFFERS * largest


def zero_infinity(inventory: Inventory, *, fp16: bool) -> HostMemory:
    """The baseline: everything pinned is rounded up to a power of two."""
    flat = 4 * inventory.parameters()
    check = int(CHECK * flat) if fp16 else 0
    return HostMemory(
        _power_of_two(slotted_pool(inventory)), _power_of_two(flat) + check
    )  # fmt: skip


def memascend(inventory: Inventory) -> HostMemory:
    """Exact sizes, and a check without copies."""
    return HostMemory(exact_pool(inventory), 4 * inventory.parameters())


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()
