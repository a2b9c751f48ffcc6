"""Choose the size of the pieces in which an optimizer sweep passes through host staging.

A piece should be long enough for a drive's best rate, and three of them should be a small part of
DRAM. The size cannot change a result, because the optimizer works element by element.
"""

from __future__ import annotations

from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget
from penstock.plan.workload import Workload
from penstock.roles import SWEEP_LEAF
from penstock.tiers import Tier

MOST = 1 << 24
"""Maximum number of parameters per piece: 160 MiB of fp32 states, enough for any drive's best
rate."""

LEAST = SWEEP_LEAF
"""Minimum number of parameters per piece. It is also a page of the smallest role."""

STAGED_SHARE = 1 / 32
"""Fraction of DRAM that three pieces may use if all their roles are on NVMe. What staging uses is
missing for other data, which must then be stored on NVMe and read and written in every step."""

SMALL = 1 << 22
"""Number of parameters below which pieces waste requests and pages. Pieces of up to this size may
use `SMALL_SHARE` instead of `STAGED_SHARE`."""

SMALL_SHARE = 1 / 8
"""Fraction of DRAM that three small pieces may use."""

PIECES = 1024
"""Approximate maximum number of pieces per model. Every piece adds up to four operations to the
schedule."""

FEW = 4
"""Number of pieces per layer that is enough to model how reads, sweeps and writes overlap."""


def piece_sizes(inventory: Inventory, workload: Workload, budget: Budget) -> tuple[int, ...]:
    """Return the size to plan with and, if that does not fit, a smaller one to try.

    The smaller one depends on the model alone, so what fits into a budget also fits into a larger
    budget.
    """
    least = max(LEAST, min(MOST, _power_of_two_below(inventory.parameters(True) // PIECES)))
    staged = 3 * workload.formats().per_parameter
    elements_in_dram = budget.of(Tier.DRAM) / staged
    small = min(SMALL, _power_of_two_below(int(SMALL_SHARE * elements_in_dram)))
    preferred = max(small, _power_of_two_below(int(STAGED_SHARE * elements_in_dram)))
    preferred = max(least, min(MOST, preferred))
    return (preferred, least) if preferred > least else (least,)


def coarse_piece_elements(inventory: Inventory, piece_elements: int) -> int:
    """Return a larger piece size for timing candidates: a few pieces for each layer."""
    largest = max(block.shard_elements(True) for block in inventory.layers)
    while piece_elements * FEW < largest:
        piece_elements *= 2
    return piece_elements


def _power_of_two_below(value: int) -> int:
    return 1 << max(value.bit_length() - 1, 0)
