"""Places for tests on this machine."""

from __future__ import annotations

from penstock.machine.sysfs import System
from penstock.memory.placement import Interleave, Node, Place, Stripe


def places_here() -> list[Place]:
    """Return every kind of place on this machine: one node here, several in the VM."""
    nodes = System().allowed_nodes()
    places: list[Place] = [Node(n) for n in nodes]
    places += [Interleave(nodes), Interleave(nodes[-2:])]
    places += [Stripe(nodes), Stripe({n: i + 1 for i, n in enumerate(reversed(nodes))})]
    places.append(Stripe(dict(zip(nodes[-2:], (2, 1), strict=False))))
    return list(dict.fromkeys(places))
