"""Places: stripes are proportional, and invalid arguments are refused."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import _native
from penstock.errors import SizeError
from penstock.memory.placement import (
    Interleave,
    Node,
    Stripe,
    build_pattern,
    current_place,
    placing,
)

UNIT = _native.UNIT_NBYTES

weights = st.dictionaries(st.integers(0, 63), st.integers(1, 40), min_size=1, max_size=8)


@given(weights)
def test_a_round_gives_each_node_exactly_its_weight(given_weights: dict[int, int]) -> None:
    pattern = build_pattern(given_weights)

    assert {n: pattern.count(n) for n in given_weights} == given_weights


@given(weights, st.integers(1, 5000))
def test_no_node_is_a_unit_off_its_share_at_any_length(
    given_weights: dict[int, int], units: int
) -> None:
    stripe = Stripe(given_weights)
    units_of = [stripe.pattern[k % len(stripe.pattern)] for k in range(units)]
    total = sum(given_weights.values())

    for node, weight in given_weights.items():
        assert abs(units_of.count(node) - units * weight / total) < 1


@given(weights, st.integers(1, 1 << 40))
def test_shares_add_up_and_follow_the_pattern(given_weights: dict[int, int], nbytes: int) -> None:
    stripe = Stripe(given_weights)
    total = sum(given_weights.values())

    shares = stripe.shares(nbytes)

    assert sum(shares.values()) == nbytes
    for node, weight in given_weights.items():
        assert abs(shares[node] - nbytes * weight / total) < UNIT


@given(weights, st.integers(2, 5))
def test_only_the_ratio_of_weights_matters(given_weights: dict[int, int], factor: int) -> None:
    scaled = {node: weight * factor for node, weight in given_weights.items()}

    assert Stripe(scaled) == Stripe(given_weights)
    assert hash(Stripe(scaled)) == hash(Stripe(given_weights))


def test_weights_of_two_to_one_alternate_two_and_one() -> None:
    stripe = Stripe({1: 2, 2: 1})

    assert stripe.pattern == (1, 1, 2)
    assert stripe.shares(2048 * UNIT) == {1: 1366 * UNIT, 2: 682 * UNIT}


def test_equal_weights_alternate_in_the_order_given() -> None:
    assert Stripe({2: 5, 0: 5}).pattern == (2, 0)
    assert Stripe([3, 1, 2]).pattern == (3, 1, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Node(-1), "-1"),
        (lambda: Stripe({}), "none"),
        (lambda: Stripe({0: 0}), "got 0"),
        (lambda: Stripe({0: -2}), "got -2"),
        (lambda: Stripe({0: 1.5}), "got 1.5"),
        (lambda: Stripe({0: 4001, 1: 97}), "4098 units"),
        (lambda: Interleave([]), r"\[\]"),
        (lambda: Interleave([1, 1]), r"\[1, 1\]"),
    ],
)
def test_invalid_places_are_refused_with_the_value(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SizeError, match=message):
        make()


@pytest.mark.parametrize("node", ["0", 1.0, None, True])
def test_a_node_must_be_an_integer(node: object) -> None:
    with pytest.raises(TypeError, match="integer"):
        Node(node)  # type: ignore[arg-type]


def test_placing_nests_and_ends_with_its_block() -> None:
    assert current_place() is None
    with placing(Node(0)):
        with placing(Interleave([0])):
            assert current_place() == Interleave([0])
        assert current_place() == Node(0)
        with pytest.raises(ZeroDivisionError), placing(None):
            _ = 1 / 0
        assert current_place() == Node(0)
    assert current_place() is None


def test_placing_applies_to_its_own_thread_only() -> None:
    both_inside = threading.Barrier(2, timeout=30)
    seen: dict[int, object] = {}

    def place_on(node: int) -> None:
        with placing(Node(node)):
            both_inside.wait()
            seen[node] = current_place()
            both_inside.wait()

    threads = [threading.Thread(target=place_on, args=(node,)) for node in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert seen == {0: Node(0), 1: Node(1)}
    assert current_place() is None


def test_placing_applies_to_tasks_started_inside() -> None:
    async def read_place() -> object:
        await asyncio.sleep(0)
        return current_place()

    async def start() -> tuple[object, object]:
        outside = asyncio.create_task(read_place())
        with placing(Node(1)):
            inside = asyncio.create_task(read_place())
            await outside
        return await outside, await inside

    assert asyncio.run(start()) == (None, Node(1))


@pytest.mark.parametrize(
    "place", [Node(3), Stripe({2: 4, 0: 6}), Stripe([1, 2]), Interleave([2, 0])], ids=repr
)
@pytest.mark.parametrize(
    "copier", [copy.copy, copy.deepcopy, lambda place: pickle.loads(pickle.dumps(place))]
)
def test_a_place_copied_or_pickled_is_the_same_place(place, copier) -> None:  # type: ignore[no-untyped-def]
    copied = copier(place)

    assert type(copied) is type(place)
    assert copied == place
    assert hash(copied) == hash(place)
    assert (copied.nodes, repr(copied)) == (place.nodes, repr(place))


def test_placing_refuses_other_types() -> None:
    with pytest.raises(TypeError, match=r"place=penstock.Node\(1\)"), placing(1):  # type: ignore[arg-type]
        pass
