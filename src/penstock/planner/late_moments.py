"""Decide whether moments are updated in backward instead of in the sweep before forward.

A step's forward pass waits for optimizer sweeps, because clipping needs the norm of all gradients.
With late moments, the sweep before a block's forward writes its weights only, and the moments
follow in backward, when the CPU and host memory have little else to do. That is more traffic in
all, and less of it while compute waits.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.candidate import Candidate
from penstock.planner.evaluator import PlanEvaluator
from penstock.tiers import Tier

GAIN = 0.99
"""A candidate with late moments must be faster than the one without by this factor."""


def update_moments_late(
    evaluator: PlanEvaluator, candidate: Candidate, *, exact: bool
) -> Candidate:
    """Return the candidate with late moments, if a step is faster with them.

    With `exact`, it fits to the byte. Gradients then exist all the time, so activations that were
    stored in their memory need memory of their own.
    """
    late = replace(candidate, late=True)
    if not _may_be_late(evaluator, late) or evaluator.shortage(late):
        return candidate
    if evaluator.score(late) > GAIN * evaluator.score(candidate):
        return candidate
    if exact:
        needed = evaluator.total_nbytes(late)
        if any(needed[tier] > evaluator.capacity(tier) for tier in Tier):
            return candidate
    return late


def _may_be_late(evaluator: PlanEvaluator, candidate: Candidate) -> bool:
    """Return whether any block has moments that may be updated late.

    With blocks on NVMe, the disk is the limit, and its pieces determine the order of sweeps.
    """
    blocks = range(len(candidate.locations))
    return (
        evaluator.workload.may_update_moments_late
        and evaluator.stored_nbytes(candidate)[Tier.NVME] == 0
        and any(map(candidate.has_late_moments, blocks))
    )
