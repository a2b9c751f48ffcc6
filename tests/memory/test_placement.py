"""Places are values: stripes deal fairly, nonsense is refused."""

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
from penstock.memory.placement import Interleave, Node, Stripe, current_place, deal, placing

UNIT = _native.UNIT_NBYTES

weights = st.dictionaries(st.integers(0, 63), st.integers(1, 40), min_size=1, max_size=8)


@given(weights)
def test_a_round_gives_each_node_exactly_its_weight(given_weights: dict[int, int]) -> None:
    pattern = deal(given_weights)

    assert {n: pattern.count(n) for n in given_weights} == given_weights


@given(weights, st.integers(1, 5000))
def test_at_any_length_no_node_is_a_unit_off_its_share(
    given_weights: dict[int, int], units: int
) -> None:
    stripe = Stripe(given_weights)
    dealt = [stripe.pattern[k % len(stripe.pattern)] for k in range(units)]
    total = sum(given_weights.values())

    for node, weight in given_weights.items():
        assert abs(dealt.count(node) - units * weight / total) < 1


@given(weights, st.integers(1, 1 << 40))
def test_shares_add_up_and_follow_the_pattern(given_weights: dict[int, int], nbytes: int) -> None:
    stripe = Stripe(given_weights)
    total = sum(given_weights.values())

    shares = stripe.shares(nbytes)

    assert sum(shares.values()) == nbytes
    for node, weight in given_weights.items():
        assert abs(shares[node] - nbytes * weight / total) < UNIT


@given(weights, st.integers(2, 5))
def test_only_the_ratio_of_weights_counts(given_weights: dict[int, int], factor: int) -> None:
    scaled = {node: weight * factor for node, weight in given_weights.items()}

    assert Stripe(scaled) == Stripe(given_weights)
    assert hash(Stripe(scaled)) == hash(Stripe(given_weights))


def test_two_to_one_deals_two_then_one() -> None:
    stripe = Stripe({1: 2, 2: 1})

    assert stripe.pattern == (1, 1, 2)
    assert stripe.shares(2048 * UNIT) == {1: 1366 * UNIT, 2: 682 * UNIT}


def test_equal_weights_alternate_in_the_order_given() -> None:
    assert Stripe({2: 5, 0: 5}).pattern == (2, 0)
    assert Stripe([3, 1, 2]).pattern == (3, 1, 2)


@pytest.mark.parametrize(
    ("make", "names"),
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
def test_nonsense_is_refused_by_name(make, names) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SizeError, match=names):
        make()


@pytest.mark.parametrize("node", ["0", 1.0, None, True])
def test_a_node_is_a_whole_number(node: object) -> None:
    with pytest.raises(TypeError, match="whole number"):
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


def test_placing_holds_for_its_own_thread_alone() -> None:
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


def test_placing_follows_the_tasks_started_inside() -> None:
    async def look() -> object:
        await asyncio.sleep(0)
        return current_place()

    async def start() -> tuple[object, object]:
        outside = asyncio.create_task(look())
        with placing(Node(1)):
            inside = asyncio.create_task(look())
            await outside
        return await outside, await inside

    assert asyncio.run(start()) == (None, Node(1))


@pytest.mark.parametrize(
    "place", [Node(3), Stripe({2: 4, 0: 6}), Stripe([1, 2]), Interleave([2, 0])], ids=repr
)
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda place: pickle.loads(pickle.dumps(place))]
)
def test_a_place_copied_or_pickled_is_the_same_place(place, again) -> None:  # type: ignore[no-untyped-def]
    made = again(place)

    assert type(made) is type(place)
    assert made == place
    assert hash(made) == hash(place)
    assert (made.nodes, repr(made)) == (place.nodes, repr(place))


def test_placing_takes_a_place_and_says_so() -> None:
    with pytest.raises(TypeError, match=r"place=penstock.Node\(1\)"), placing(1):  # type: ignore[arg-type]
        pass
