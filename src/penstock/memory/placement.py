"""Places: on which NUMA nodes memory is allocated.

Places are values. Nothing is allocated here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType

from penstock import _native
from penstock.errors import SizeError

MAX_PATTERN = 4096
"""Maximum number of units in a round. Weights are reduced first, so only ratios such as 4001:97
exceed it."""


@dataclass(frozen=True, slots=True)
class Node:
    """All pages on one node."""

    id: int

    def __post_init__(self) -> None:
        _check_node(self.id)

    @property
    def nodes(self) -> tuple[int, ...]:
        return (self.id,)

    def shares(self, nbytes: int) -> dict[int, int]:
        """Return the number of bytes that each node will hold."""
        return {self.id: nbytes}

    def native(self) -> _native.Placement:
        return _native.Placement(_native.Policy.bind, [self.id], [])


@dataclass(frozen=True, slots=True, init=False)
class Stripe:
    """Units of 2 MiB, distributed over nodes in proportion to weights.

    `Stripe({1: 2, 2: 1})` puts units 0 and 1 on node 1, unit 2 on node 2, and so on.
    `Stripe([1, 2])` gives all nodes the same weight. At any length, no node is more than one unit
    away from its exact share.
    """

    weights: Mapping[int, int]
    """Number of units of each node in one round, reduced to lowest terms."""

    pattern: tuple[int, ...]
    """Node of each unit in one round."""

    def __init__(self, weights: Mapping[int, int] | Sequence[int]) -> None:
        given = dict(weights) if isinstance(weights, Mapping) else dict.fromkeys(weights, 1)
        if not given:
            raise SizeError("a stripe needs at least one node, got none")
        for node, weight in given.items():
            _check_node(node)
            if isinstance(weight, bool) or not isinstance(weight, int) or weight < 1:
                raise SizeError(
                    f"node {node}: a weight must be an integer of 1 or more, got {weight!r}"
                )
        divisor = math.gcd(*given.values())
        reduced = {node: weight // divisor for node, weight in given.items()}
        if sum(reduced.values()) > MAX_PATTERN:
            raise SizeError(
                f"weights {given} need a round of {sum(reduced.values())} units, and at most "
                f"{MAX_PATTERN} units are possible; use a simpler ratio"
            )
        object.__setattr__(self, "weights", MappingProxyType(reduced))
        object.__setattr__(self, "pattern", build_pattern(reduced))

    def __repr__(self) -> str:
        return f"Stripe({dict(self.weights)})"

    def __reduce__(self) -> tuple[type[Stripe], tuple[dict[int, int]]]:
        return Stripe, (dict(self.weights),)

    def __hash__(self) -> int:
        return hash(self.pattern)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stripe) and self.pattern == other.pattern

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(self.weights)

    def shares(self, nbytes: int) -> dict[int, int]:
        """Return the number of bytes that each node will hold."""
        unit, round_units = _native.UNIT_NBYTES, len(self.pattern)
        rounds, rest = divmod(nbytes, unit * round_units)
        shares = {node: rounds * weight * unit for node, weight in self.weights.items()}
        for node in self.pattern[: math.ceil(rest / unit)]:
            shares[node] += min(unit, rest)
            rest -= min(unit, rest)
        return shares

    def native(self) -> _native.Placement:
        return _native.Placement(_native.Policy.bind, list(self.nodes), list(self.pattern))


@dataclass(frozen=True, slots=True, init=False)
class Interleave:
    """Single pages, distributed over nodes round robin by the OS."""

    nodes: tuple[int, ...]

    def __init__(self, nodes: Sequence[int]) -> None:
        given = tuple(nodes)
        for node in given:
            _check_node(node)
        if not given or len(set(given)) != len(given):
            raise SizeError(f"interleave needs one or more distinct nodes, got {list(given)}")
        object.__setattr__(self, "nodes", given)

    def __repr__(self) -> str:
        return f"Interleave({list(self.nodes)})"

    def shares(self, nbytes: int) -> dict[int, int]:
        """Return the number of bytes that each node will hold, to within one page."""
        return dict.fromkeys(self.nodes, -(-nbytes // len(self.nodes)))

    def native(self) -> _native.Placement:
        return _native.Placement(_native.Policy.interleave, list(self.nodes), [])


Place = Node | Stripe | Interleave

_default: ContextVar[Place | None] = ContextVar("penstock_default_place", default=None)


def current_place() -> Place | None:
    """Return the place set by the innermost `placing`, or None if the OS chooses."""
    return _default.get()


@contextlib.contextmanager
def placing(place: Place | None) -> Iterator[None]:
    """Make `place` the default of `penstock.empty` and similar functions inside the block.

    The default applies to this thread and to async tasks started from it. It does not affect
    torch's own allocations.
    """
    check_place(place)
    token = _default.set(place)
    try:
        yield
    finally:
        _default.reset(token)


def check_place(place: object) -> None:
    """Raise TypeError unless `place` is a place or None."""
    if place is not None and not isinstance(place, Node | Stripe | Interleave):
        raise TypeError(
            f"a place must be a penstock.Node, Stripe or Interleave, got {place!r}; "
            f"for node 1, pass place=penstock.Node(1)"
        )


def build_pattern(weights: Mapping[int, int]) -> tuple[int, ...]:
    """Build a round of units in which every prefix is within one unit of the exact proportion.

    Unit j (counted from 1) of a node with weight w in a round of W units must be in the window
    [floor((j-1)W/w), ceil(jW/w)). Choosing the eligible node whose window ends first satisfies
    every window (proportionate fairness), which bounds the deviation by one unit. Ties go to the
    node named first: the weights {1: 2, 2: 1} give 1, 1, 2.
    """
    total = sum(weights.values())
    counts = dict.fromkeys(weights, 0)
    pattern: list[int] = []
    for k in range(total):
        eligible = [n for n, w in weights.items() if counts[n] * total // w <= k and counts[n] < w]
        node = min(eligible, key=lambda n: -(-(counts[n] + 1) * total // weights[n]))
        counts[node] += 1
        pattern.append(node)
    return tuple(pattern)


def _check_node(node: object) -> None:
    if isinstance(node, bool) or not isinstance(node, int):
        raise TypeError(f"a node must be an integer, got {node!r}")
    if node < 0:
        raise SizeError(f"a node must be 0 or more, got {node}")
