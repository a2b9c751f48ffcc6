"""The places this machine has: one node here, several in the VM."""

from __future__ import annotations

from penstock.machine.sysfs import System
from penstock.memory.placement import Interleave, Node, Place, Stripe


def places_here() -> list[Place]:
    """Every kind of place that can be tried on this machine: one node here, several in the VM."""
    nodes = System().allowed_nodes()
    places: list[Place] = [Node(n) for n in nodes]
    places += [Interleave(nodes), Interleave(nodes[-2:])]
    places += [Stripe(nodes), Stripe({n: i + 1 for i, n in enumerate(reversed(nodes))})]
    places.append(Stripe(dict(zip(nodes[-2:], (2, 1), strict=False))))
    return list(dict.fromkeys(places))
