"""Compute how much of each tier is in use in each phase of a step.

Pools and stored bytes stay allocated, so a plan's peak is their sum. The figures here say which
phase needs that much. If a tier is short, look at that phase first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.model.inventory import Inventory
from penstock.plan.activation_overlay import overlaid_activations
from penstock.plan.buffers import STATES, BufferPool
from penstock.plan.lifetimes import (
    gradient_lifetimes,
    staging_lifetimes,
    state_lifetimes,
    weight_lifetimes,
)
from penstock.plan.placement import Placement
from penstock.plan.schedule import Operation, Schedule, Verb
from penstock.plan.workload import Workload
from penstock.roles import PASSING, Role
from penstock.tiers import Tier

PHASES = ("sweep", "forward", "backward")
"""The phases. Optimizer sweeps run during forward, so that time counts for both phases."""

TEMPORARY = ("weight slots", "gradient buffers", STATES, "NVMe staging")
"""Pools whose buffers are in use only part of the time."""

_Use = tuple[Tier, int, int, int]
"""A tier, a number of bytes, the first operation that needs them and the one past the last."""


def phase_peaks(
    inventory: Inventory,
    workload: Workload,
    placement: Placement,
    schedule: Schedule,
    pools: Iterable[BufferPool],
) -> dict[str, dict[Tier, int]]:
    """Return the most bytes in use in each tier during each phase."""
    formats = workload.formats(placement.rounds)
    temporary = [
        *((Tier.HBM, item) for item in weight_lifetimes(schedule, placement)),
        *((Tier.HBM, item) for item in gradient_lifetimes(inventory, schedule, placement, formats)),
        *((Tier.HBM, item) for item in state_lifetimes(inventory, schedule, placement, formats)),
        *((Tier.DRAM, item) for item in staging_lifetimes(inventory, schedule, placement, formats)),
    ]
    uses: list[_Use] = [(tier, item.nbytes, item.start, item.end) for tier, item in temporary]
    overlaid = overlaid_activations(
        placement.blocks, rounds=placement.rounds, accumulate=workload.accumulate,
        in_hbm=workload.sums_apart(placement.rounds),
    )  # fmt: skip
    uses += [
        use for key, use in _activations(placement, schedule.operations) if key not in overlaid
    ]
    return _peaks(_permanent(placement, pools), uses, schedule.operations)


def _permanent(placement: Placement, pools: Iterable[BufferPool]) -> Counter[Tier]:
    """Return the bytes in use all the time, by tier."""
    total: Counter[Tier] = Counter()
    for block in placement.blocks:
        for home in block.homes:
            for share in home.shares if home.role not in PASSING else ():
                total[share.tier] += share.nbytes
    for pool in pools:
        if pool.what not in TEMPORARY:
            total[pool.tier] += pool.nbytes
    return total


def _activations(
    placement: Placement, operations: Sequence[Operation]
) -> Iterator[tuple[tuple[int, Role], _Use]]:
    """Yield blocks, and the use of their activations and of what their attention returned.

    They are in use from the forward that produces them to the backward that needs them last.
    """
    produced_at: dict[tuple[int, Role], int] = {}
    for at, operation in enumerate(operations):
        if operation.verb is Verb.FORWARD:
            produced_at[operation.block + 1, Role.ACTIVATION] = at
            produced_at[operation.block, Role.ATTENTION] = at
        elif operation.verb is Verb.BACKWARD:
            for role in PASSING:
                key = (operation.block, role)
                home = placement.blocks[operation.block].home(role)
                for share in home.shares if home and key in produced_at else ():
                    yield key, (share.tier, share.nbytes, produced_at[key], at + 1)


def _peaks(
    permanent: Mapping[Tier, int], uses: Iterable[_Use], operations: Sequence[Operation]
) -> dict[str, dict[Tier, int]]:
    changes: dict[int, Counter[Tier]] = defaultdict(Counter)
    for tier, nbytes, start, end in uses:
        changes[start][tier] += nbytes
        changes[end][tier] -= nbytes
    live = {tier: permanent.get(tier, 0) for tier in Tier}
    peaks = {phase: dict.fromkeys(Tier, 0) for phase in PHASES}
    for at, operation in enumerate(operations):
        for tier, change in changes.get(at, {}).items():
            live[tier] += change
        phases = [operation.phase, *(["sweep"] if operation.verb is Verb.SWEEP else [])]
        for phase in phases:
            for tier in Tier:
                peaks[phase][tier] = max(peaks[phase][tier], live[tier])
    return peaks
