"""Working memory for many workloads from a few: bytes are close to affine in tokens.

Advice asks what another context or batch would need. Tracing each of them takes seconds, so two
sizes are traced, and the others lie on the line through them.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.model.inventory import Inventory
from penstock.plan.working_memory import PartMemory, WorkingMemory, WorkingMemorySource
from penstock.plan.workload import Workload

SMALLER = 4
"""The second size has this many times fewer tokens per micro-batch than the first."""


def interpolated(source: WorkingMemorySource, base: Workload) -> WorkingMemorySource:
    """Return a source that asks another for two sizes only: that of `base`, and a smaller one.

    The figures for `base` are exact. For other numbers of tokens per micro-batch they lie on a
    line.
    """

    def find(inventory: Inventory, workload: Workload, /) -> WorkingMemory:
        numerics = replace(workload.numerics, micro_batch=base.numerics.micro_batch)
        here = replace(workload, context=base.context, batch=base.batch, numerics=numerics)
        large = source(inventory, here)
        tokens, most = _tokens(workload), _tokens(base)
        if tokens == most:
            return large
        shorter = replace(here, context=max(1, here.context // SMALLER))
        small, least = source(inventory, shorter), _tokens(shorter)
        if most == least or [p.name for p in small.parts] != [p.name for p in large.parts]:
            return large
        return _between(small, large, (tokens - least) / (most - least))

    return find


def _tokens(workload: Workload) -> int:
    return workload.numerics.micro_batch * workload.context


def _between(small: WorkingMemory, large: WorkingMemory, share: float) -> WorkingMemory:
    """Return the figures at a share of the way from the small size to the large one."""

    def at(low: int, high: int) -> int:
        return max(0, round(low + share * (high - low)))

    parts = (
        PartMemory(
            name=one.name,
            forward=at(one.forward, other.forward),
            backward=at(one.backward, other.backward),
            saved=None if one.saved is None or other.saved is None else at(one.saved, other.saved),
        )
        for one, other in zip(small.parts, large.parts, strict=True)
    )
    return replace(
        large,
        parts=tuple(parts),
        inputs=at(small.inputs, large.inputs),
        arguments=at(small.arguments, large.arguments),
        gaps=max(small.gaps, large.gaps),
    )
