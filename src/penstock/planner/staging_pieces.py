"""How large the pieces are in which a sweep passes through host staging. Room: decide.

A piece should be long enough for a drive's best rate, and three of them a small part of DRAM. It
can change no result: a sweep goes element by element.
"""

from __future__ import annotations

from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget
from penstock.plan.workload import Workload
from penstock.roles import SWEEP_LEAF
from penstock.tiers import Tier

MOST = 1 << 24
"""Parameters: 160 MiB of exact states, long enough for any drive's best rate."""

LEAST = SWEEP_LEAF
"""Also a page of the smallest role."""

STAGED_SHARE = 1 / 32
"""Of DRAM that three pieces may take, with every role of theirs on NVMe: what staging takes must
rest on NVMe instead, and be read and written with every step."""

SMALL = 1 << 22
"""Parameters. Smaller pieces would waste requests and pages, so that three of these may take..."""

SMALL_SHARE = 1 / 8
"""... this much of DRAM."""

PIECES = 1024
"""Of a whole model, about the most that are worth cutting: every piece is an operation or four of
the schedule."""

FEW = 4
"""Of a layer, as many as show that reads, sweeps and writes overlap."""


def piece_sizes(inventory: Inventory, workload: Workload, budget: Budget) -> tuple[int, ...]:
    """The size to plan with, and the least, for where that one does not fit.

    The least depends on the model alone, so that what fits into a budget fits into a larger one.
    """
    least = max(LEAST, min(MOST, _power_of_two_below(inventory.parameters(True) // PIECES)))
    staged = 3 * workload.formats().per_parameter
    room = budget.of(Tier.DRAM) / staged
    small = min(SMALL, _power_of_two_below(int(SMALL_SHARE * room)))
    right = max(least, min(MOST, max(small, _power_of_two_below(int(STAGED_SHARE * room)))))
    return (right, least) if right > least else (least,)


def coarse(inventory: Inventory, piece_elements: int) -> int:
    """Pieces that are large enough to time candidates with: a few for each layer."""
    largest = max(block.flat_elements(True) for block in inventory.layers)
    while piece_elements * FEW < largest:
        piece_elements *= 2
    return piece_elements


def _power_of_two_below(value: int) -> int:
    return 1 << max(value.bit_length() - 1, 0)
