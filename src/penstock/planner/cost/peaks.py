"""How much of each tier is in use, phase by phase. Room: decide.

Pools are taken once and held, so a plan's peak is the sum of its parts whenever it is asked. This
says which phase needs it: where a tier is short, that is the one to look at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.model.inventory import Inventory
from penstock.plan.activation_overlay import overlaid_activations
from penstock.plan.buffers import Pool
from penstock.plan.lifetimes import gradient_lifetimes, staging_lifetimes, weight_lifetimes
from penstock.plan.placement import Placement
from penstock.plan.schedule import Operation, Schedule, Verb
from penstock.plan.workload import Workload
from penstock.roles import Role
from penstock.tiers import Tier

PHASES = ("sweep", "forward", "backward")
"""Sweeps come between the computations of forward; a moment of theirs counts for both."""

PASSING = ("weight slots", "gradient buffers", "NVMe staging")
"""Pools whose buffers come and go."""

_Use = tuple[Tier, int, int, int]
"""A tier, bytes, and the first operation and the one past the last that need them."""


def phase_peaks(
    inventory: Inventory,
    workload: Workload,
    placement: Placement,
    schedule: Schedule,
    pools: Iterable[Pool],
) -> dict[str, dict[Tier, int]]:
    """The most bytes in use in each tier. The clock counts the schedule's operations."""
    formats = workload.formats(placement.rounds)
    passing = [
        *((Tier.HBM, item) for item in weight_lifetimes(schedule, placement)),
        *((Tier.HBM, item) for item in gradient_lifetimes(inventory, schedule, placement, formats)),
        *((Tier.DRAM, item) for item in staging_lifetimes(inventory, schedule, placement, formats)),
    ]
    uses: list[_Use] = [(tier, item.nbytes, item.start, item.end) for tier, item in passing]
    lent = overlaid_activations(
        placement.blocks, rounds=placement.rounds, accumulate=workload.accumulate
    )
    uses += [use for block, use in _inputs(placement, schedule.operations) if block not in lent]
    return _most(_steady(placement, pools), uses, schedule.operations)


def _steady(placement: Placement, pools: Iterable[Pool]) -> Counter[Tier]:
    """What is there all the time."""
    found: Counter[Tier] = Counter()
    for block in placement.blocks:
        for home in block.homes:
            for share in home.shares if home.role is not Role.INPUT else ():
                found[share.tier] += share.nbytes
    for pool in pools:
        if pool.what not in PASSING:
            found[pool.tier] += pool.nbytes
    return found


def _inputs(placement: Placement, operations: Sequence[Operation]) -> Iterator[tuple[int, _Use]]:
    """Block inputs, and whose: from the forward that makes them to the backward that needs them
    last."""
    since: dict[int, int] = {}
    for at, operation in enumerate(operations):
        if operation.verb is Verb.FORWARD:
            since[operation.block + 1] = at
        elif operation.verb is Verb.BACKWARD and operation.block in since:
            home = placement.blocks[operation.block].home(Role.INPUT)
            for share in home.shares if home else ():
                yield (
                    operation.block,
                    (share.tier, share.nbytes, since[operation.block], at + 1),
                )


def _most(
    steady: Mapping[Tier, int], uses: Iterable[_Use], operations: Sequence[Operation]
) -> dict[str, dict[Tier, int]]:
    changes: dict[int, Counter[Tier]] = defaultdict(Counter)
    for tier, nbytes, start, end in uses:
        changes[start][tier] += nbytes
        changes[end][tier] -= nbytes
    live = {tier: steady.get(tier, 0) for tier in Tier}
    most = {phase: dict.fromkeys(Tier, 0) for phase in PHASES}
    for at, operation in enumerate(operations):
        for tier, change in changes.get(at, {}).items():
            live[tier] += change
        phases = [operation.phase, *(["sweep"] if operation.verb is Verb.SWEEP else [])]
        for phase in phases:
            for tier in Tier:
                most[phase][tier] = max(most[phase][tier], live[tier])
    return most
