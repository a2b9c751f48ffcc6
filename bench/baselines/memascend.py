"""MemAscend's model of host memory under ZeRO-Infinity (arXiv 2505.23254).

A reconstruction that reproduces the figures of the paper: see docs/planner.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model.inventory import Inventory
from penstock.units import GiB

COMMON = 10 * GiB
"""Optimizer staging, framework and short-context activations, which are the same in both
systems."""

CHECK = 1.25
"""Temporary memory of `isinf` relative to the fp32 gradient: its absolute value and a mask."""

POOL_BUFFERS = 9
"""Slots for the seven matrices of a layer, the embedding and the head, each as large as the
embedding."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory by purpose, in bytes."""

    pool: int
    """Staging pool for parameters."""

    gradient: int
    """The flat fp32 gradient, and the temporary memory of its overflow check."""

    common: int = COMMON
    """Everything else."""

    @property
    def total(self) -> int:
        return self.pool + self.gradient + self.common


def exact_pool(inventory: Inventory) -> int:
    """Return the pool bytes in use: embedding, head and one layer's matrices, in 16 bits."""
    embedding, layer, head = inventory.blocks[0], inventory.blocks[1], inventory.blocks[-1]
    matrices = [t.elements for b in (embedding, layer, head) for t in b.tensors if len(t.shape) > 1]
    return 2 * sum(matrices)


def slotted_pool(inventory: Inventory) -> int:
    """Return the pool bytes that ZeRO-Infinity reserves, before rounding."""
    largest = max(t.elements for b in inventory.blocks for t in b.tensors)
    return 2 * POOL_BUFFERS * largest


def zero_infinity(inventory: Inventory, *, fp16: bool) -> HostMemory:
    """Return ZeRO-Infinity's host memory: pinned memory is rounded up to a power of two."""
    flat = 4 * inventory.parameters()
    check = int(CHECK * flat) if fp16 else 0
    return HostMemory(
        _power_of_two(slotted_pool(inventory)), _power_of_two(flat) + check
    )  # fmt: skip


def memascend(inventory: Inventory) -> HostMemory:
    """Return MemAscend's host memory: exact sizes, and an overflow check without copies."""
    return HostMemory(exact_pool(inventory), 4 * inventory.parameters())


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()
