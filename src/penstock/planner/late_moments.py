"""Decide whether moments are updated in backward instead of in the sweep before forward.

A step's forward pass waits for optimizer sweeps, because clipping needs the norm of all gradients.
With late moments, the sweep before a block's forward writes its weights only, and the moments
follow in backward, when the CPU, host memory and disks have little else to do. That is more traffic
in all, and less of it while compute waits.

Host memory has time for all moments. A disk does not: it is busy in backward, too, with activations
and weights, and moments on NVMe are read twice. So the number of such blocks is chosen.
"""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.planner.candidate import Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.tiers import Tier

GAIN = 0.99
"""A candidate with late moments must be faster than the one without by this factor."""

PARTS = 6
"""How many numbers of blocks on NVMe are tried, up to all of them."""

COMPARED = 3
"""How many of them are timed again, with pieces of the planned size."""


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
    return late if not exact or evaluator.fits_exactly(late) else candidate


def update_moments_on_nvme_late(
    evaluator: PlanEvaluator, candidate: Candidate, *, exact: bool
) -> Candidate:
    """Return the candidate with late moments of some blocks on NVMe, if a step is faster with them.

    Those are the first blocks: their gradients are replaced last. With `exact`, the result fits to
    the byte.
    """
    if not evaluator.workload.may_update_moments_late:
        return candidate
    blocks = [i for i, each in enumerate(candidate.locations) if each.state is Location.NVME]
    counts = {1, *(len(blocks) * part // PARTS for part in range(1, PARTS + 1))}
    wanted = (frozenset(blocks[:count]) for count in sorted(counts) if blocks[:count])
    choices = [_with_room(evaluator, replace(candidate, late_on_nvme=late)) for late in wanted]
    score = evaluator.exact_score if exact else evaluator.score
    if min(map(evaluator.score, choices), default=math.inf) > GAIN * evaluator.score(candidate):
        return candidate
    # Coarse pieces are wrong by a few percent, so what is close is timed again.
    close = sorted(choices, key=evaluator.score)[:COMPARED]
    for late in sorted(close, key=score):
        if not exact or evaluator.fits_exactly(late):
            return late if score(late) <= GAIN * score(candidate) else candidate
    return candidate


def _with_room(evaluator: PlanEvaluator, candidate: Candidate) -> Candidate:
    """Return the candidate with activations on NVMe that no longer fit in the memory of gradients.

    A disk has time for them: they are written in forward, when moments no longer are. It may still
    be too large.
    """
    # An activation is stored in gradients of earlier blocks, and the first blocks are those whose
    # gradients can no longer be used. Without an early activation, later ones find memory. Without
    # a late one, early ones still do not.
    for block in range(len(candidate.locations)):
        if evaluator.shortage(candidate).keys() != {Tier.DRAM}:
            break
        locations = candidate.locations[block]
        if locations.activation is Location.DRAM and not candidate.kept_of(block):
            moved = locations._replace(activation=Location.NVME)
            candidate = candidate.moved({block: moved})
    return candidate


def _may_be_late(evaluator: PlanEvaluator, candidate: Candidate) -> bool:
    """Return whether any block in host memory has moments that may be updated late.

    With blocks on NVMe, the disk is the limit, and its pieces determine the order of sweeps.
    """
    blocks = range(len(candidate.locations))
    return (
        evaluator.workload.may_update_moments_late
        and evaluator.stored_nbytes(candidate)[Tier.NVME] == 0
        and any(map(candidate.has_late_moments, blocks))
    )
