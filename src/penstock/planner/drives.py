"""Choose which NVMe drives a plan uses, and how much of a stripe is on each of them.

A stripe is as fast as its slowest drive, so drives get bytes in proportion to their speed, not to
their budgets. A drive that is full gets no more, and the others get the rest. A slow drive may be
better left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.plan.budget import Budget
from penstock.planner.cost import Rates

DriveWeights = Mapping[str, float]
"""Weight of each path in a stripe. Paths that are not listed are not used."""

LEAST_SHARE = 1 / 32
"""Smallest share of a stripe that a drive can have: a store divides a stripe into that many units
at most."""


def drive_sets(budget: Budget, rates: Rates) -> list[tuple[str, ...]]:
    """Return the sets of paths to try: the fastest ones, and all but one."""
    paths = sorted((p.path for p in budget.nvme), key=lambda path: -drive_speed(rates, path))
    fastest = [tuple(paths[:count]) for count in range(len(paths), 0, -1)]
    without_one = [tuple(p for p in paths if p != left_out) for left_out in paths]
    return list(dict.fromkeys([*fastest, *filter(None, without_one)])) or [()]


def drive_speed(rates: Rates, path: str) -> float:
    """Return how many bytes per second a drive reads and then writes back, as a sweep needs it."""
    disk = rates.disks[path]
    if disk.both is None:  # reads and writes take turns
        return 1 / (1 / disk.read + 1 / disk.write)
    return min(disk.both / 2, disk.read, disk.write)


def weights_by_speed(budget: Budget, rates: Rates, paths: tuple[str, ...]) -> DriveWeights:
    """Return weights in proportion to the speeds of the drives."""
    limits = {p.path: p.nbytes for p in budget.nvme}
    speeds = {path: drive_speed(rates, path) for path in paths if limits[path]}
    return {path: max(speed, LEAST_SHARE * sum(speeds.values())) for path, speed in speeds.items()}


def weights_to_hold(
    budget: Budget, rates: Rates, paths: tuple[str, ...], nbytes: int
) -> DriveWeights:
    """Return weights with which the drives can hold `nbytes`, as close to their speeds as possible.

    Drives whose share would exceed their budget are filled, and the others share the rest.
    """
    limits = {p.path: p.nbytes for p in budget.nvme if p.path in paths and p.nbytes}
    open_paths, left = list(limits), float(nbytes)
    weights: dict[str, float] = {}
    while open_paths:
        total = sum(drive_speed(rates, path) for path in open_paths)
        shares = {path: left * drive_speed(rates, path) / total for path in open_paths}
        full = [path for path in open_paths if shares[path] >= limits[path]]
        for path in full or open_paths:
            weights[path] = min(shares[path], limits[path])
            left -= weights[path]
        open_paths = [path for path in open_paths if path not in weights]
    return weights


def capacity_of(budget: Budget, weights: DriveWeights) -> int:
    """Return how many bytes can be stored until the first drive is full."""
    limits = {p.path: p.nbytes for p in budget.nvme}
    total = sum(weights.values())
    return min((int(limits[path] * total / w) for path, w in weights.items() if w), default=0)
