"""Places: what a caller may ask for. Room: hold. Values only; nothing is allocated here."""

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
"""Weights are reduced first, so this bounds only ratios such as 4001:97."""


@dataclass(frozen=True, slots=True)
class Node:
    """All pages on one node, and nowhere else."""

    id: int

    def __post_init__(self) -> None:
        _check_node(self.id)

    @property
    def nodes(self) -> tuple[int, ...]:
        return (self.id,)

    def shares(self, nbytes: int) -> dict[int, int]:
        """Bytes that each node will hold."""
        return {self.id: nbytes}

    def native(self) -> _native.Placement:
        return _native.Placement(_native.Policy.bind, [self.id], [])


@dataclass(frozen=True, slots=True, init=False)
class Stripe:
    """Whole 2 MiB units, dealt to nodes in proportion to weights.

    `Stripe({1: 2, 2: 1})` gives units 0 and 1 to node 1, unit 2 to node 2, and so on. At any length
    no node is more than one unit away from its exact share.
    """

    weights: Mapping[int, int]
    """Units of each node in one round, reduced to lowest terms."""

    pattern: tuple[int, ...]
    """The node of each unit of one round."""

    def __init__(self, weights: Mapping[int, int] | Sequence[int]) -> None:
        given = dict(weights) if isinstance(weights, Mapping) else dict.fromkeys(weights, 1)
        if not given:
            raise SizeError("a stripe needs at least one node, got none")
        for node, weight in given.items():
            _check_node(node)
            if isinstance(weight, bool) or not isinstance(weight, int) or weight < 1:
                raise SizeError(f"node {node}: a weight is a whole number from 1, got {weight!r}")
        divisor = math.gcd(*given.values())
        reduced = {node: weight // divisor for node, weight in given.items()}
        if sum(reduced.values()) > MAX_PATTERN:
            raise SizeError(
                f"weights {given} make a round of {sum(reduced.values())} units, at most "
                f"{MAX_PATTERN} can be dealt; round them to a simpler ratio"
            )
        object.__setattr__(self, "weights", MappingProxyType(reduced))
        object.__setattr__(self, "pattern", deal(reduced))

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
        """Bytes that each node will hold."""
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
    """Page by page over nodes, in the kernel's own round robin."""

    nodes: tuple[int, ...]

    def __init__(self, nodes: Sequence[int]) -> None:
        given = tuple(nodes)
        for node in given:
            _check_node(node)
        if not given or len(set(given)) != len(given):
            raise SizeError(f"interleave needs distinct nodes, at least one, got {list(given)}")
        object.__setattr__(self, "nodes", given)

    def __repr__(self) -> str:
        return f"Interleave({list(self.nodes)})"

    def shares(self, nbytes: int) -> dict[int, int]:
        """Bytes that each node will hold, to within one page."""
        return dict.fromkeys(self.nodes, -(-nbytes // len(self.nodes)))

    def native(self) -> _native.Placement:
        return _native.Placement(_native.Policy.interleave, list(self.nodes), [])


Place = Node | Stripe | Interleave

_default: ContextVar[Place | None] = ContextVar("penstock_default_place", default=None)


def current_place() -> Place | None:
    """The place set by the innermost `placing`; None leaves it to the kernel."""
    return _default.get()


@contextlib.contextmanager
def placing(place: Place | None) -> Iterator[None]:
    """Make `place` the default of `penstock.empty` and the like inside the block.

    It holds for this thread and for async tasks started from it, and for nothing else: torch's own
    allocations do not look at it.
    """
    check_place(place)
    token = _default.set(place)
    try:
        yield
    finally:
        _default.reset(token)


def check_place(place: object) -> None:
    """Raise TypeError unless `place` is one of the places, or None."""
    if place is not None and not isinstance(place, Node | Stripe | Interleave):
        raise TypeError(
            f"a place is penstock.Node, Stripe or Interleave, got {place!r}; "
            f"for node 1 write place=penstock.Node(1)"
        )


def deal(weights: Mapping[int, int]) -> tuple[int, ...]:
    """One round of units in which every prefix is within one unit of proportion.

    Unit j (from 1) of a node with weight w in a round of W must fall in
    [floor((j-1)W/w), ceil(jW/w)). Taking the eligible node whose window ends first meets every
    window (proportionate fairness), which bounds the deviation by one unit. Ties go to the node
    named first, so that 2:1 deals 1, 1, 2.
    """
    total = sum(weights.values())
    dealt = dict.fromkeys(weights, 0)
    pattern: list[int] = []
    for k in range(total):
        eligible = [n for n, w in weights.items() if dealt[n] * total // w <= k and dealt[n] < w]
        node = min(eligible, key=lambda n: -(-(dealt[n] + 1) * total // weights[n]))
        dealt[node] += 1
        pattern.append(node)
    return tuple(pattern)


def _check_node(node: object) -> None:
    if isinstance(node, bool) or not isinstance(node, int):
        raise TypeError(f"a node is a whole number, got {node!r}")
    if node < 0:
        raise SizeError(f"a node is 0 or more, got {node}")
