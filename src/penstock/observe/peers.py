"""How long the ranks of a run waited for each other, and for which of them.

Ranks gather weights, exchange gradients and meet in the same order. An operation lasts until all of
them have come to it, so it is shortest on the rank that came last. What it lasts longer on the
others, they have waited. This compares lengths only: the clocks of two machines differ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.observe.records import Event, RecordedRun

PEERS = "ranks"
"""Track of what ranks do together."""

Key = tuple[int, str, int]
"""An operation of all ranks: its step, its name, and how often that name was in the step before."""


@dataclass(frozen=True, slots=True)
class PeerWaits:
    """Waits of ranks for each other, in seconds per step."""

    waited: Mapping[str, float]
    """By rank: how long it waited for others."""

    late: Mapping[str, float]
    """By rank: how long the rank that waited longest was kept waiting when this one came last."""

    steps: int
    """Number of steps with events of all ranks."""


def peer_waits(run: RecordedRun) -> PeerWaits | None:
    """Return how long ranks waited for each other; None without events of several ranks."""
    lengths: dict[Key, dict[str, float]] = defaultdict(dict)
    for name, rank in run.ranks.items():
        for key, seconds in _lengths(rank.events).items():
            lengths[key][name] = seconds
    together = {key: found for key, found in lengths.items() if len(found) == len(run.ranks) > 1}
    steps = len({step for step, *_ in together})
    if not steps:
        return None
    waited, late = dict.fromkeys(run.ranks, 0.0), dict.fromkeys(run.ranks, 0.0)
    for found in together.values():
        last = min(found, key=lambda name: found[name])
        for name, seconds in found.items():
            waited[name] += (seconds - found[last]) / steps
        late[last] += (max(found.values()) - found[last]) / steps
    return PeerWaits(waited, late, steps)


def _lengths(events: tuple[Event, ...]) -> dict[Key, float]:
    seen: Counter[tuple[int, str]] = Counter()
    found: dict[Key, float] = {}
    for event in events:
        if event.track == PEERS and event.step is not None:
            found[event.step, event.name, seen[event.step, event.name]] = event.seconds
            seen[event.step, event.name] += 1
    return found


def rank_title(name: str) -> str:
    """Return a rank's name for use in a sentence: `rank 1` for `rank-1`."""
    return name.replace("-", " ")
