"""Decide whether CPU sweeps over host memory run between the pieces that a disk reads.

The CPU sweeps in a fixed order. If a block in host memory is swept as a whole, the pieces of the
next block that the disk has read meanwhile wait for it, and with all of them in staging the disk
waits, too. In pieces, such a sweep fits between those of an earlier block, while the disk works.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.evaluator import PlanEvaluator


def interleave_sweeps(evaluator: PlanEvaluator, candidate: Candidate, *, exact: bool) -> Candidate:
    """Return the candidate with interleaved sweeps, unless a step takes longer with them.

    The order of sweeps changes no buffer, so both need the same bytes. With `exact`, steps are
    timed with pieces of the planned size.
    """
    if not any(map(_is_staged, candidate.locations)):
        return candidate
    interleaved = replace(candidate, interleaved=True)
    score = evaluator.exact_score if exact else evaluator.score
    return interleaved if score(interleaved) <= score(candidate) else candidate


def _is_staged(locations: BlockLocations) -> bool:
    """Return whether the sweep of a block passes through host staging."""
    trained = (locations.weight, locations.state, locations.gradient)
    return locations.state is not None and Location.NVME in trained
