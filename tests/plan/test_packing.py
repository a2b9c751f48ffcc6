"""Packing: never two at once in one place, and no more than lives at once on real models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.packing import Lifetime, Packing, pack, peak_nbytes
from penstock.units import GiB
from tests.support.staging_models import (
    Model,
    all_at_once,
    models,
    weights_one_ahead,
    whole_step,
    zero_infinity_nbytes,
)

DOCS = Path(__file__).parents[2] / "docs/staging-pool.md"

# MemAscend, figure 11: GiB that ZeRO-Infinity's pool takes, and GiB that are ever needed.
PUBLISHED = {
    "Llama-3.1-8B": (8.81, 2.36),
    "Qwen2.5-7B": (9.14, 2.46),
    "Qwen2.5-14B": (13.05, 3.41),
    "Qwen2.5-32B": (13.05, 3.81),
}

lifetimes = st.lists(
    st.tuples(st.integers(1, 50_000), st.integers(0, 30), st.integers(1, 12)), max_size=40
).map(
    lambda rows: [
        Lifetime(name=str(i), nbytes=b, start=s, end=s + d) for i, (b, s, d) in enumerate(rows)
    ]
)


def check_apart(items: list[Lifetime], packing: Packing) -> None:
    for a in items:
        assert packing.offsets[a.name] % 4096 == 0
        assert packing.offsets[a.name] + packing.sizes[a.name] <= packing.nbytes
        for b in items:
            if a.name == b.name or a.end <= b.start or b.end <= a.start:
                continue
            low, high = packing.offsets[a.name], packing.offsets[b.name]
            assert low + packing.sizes[a.name] <= high or high + packing.sizes[b.name] <= low


@settings(max_examples=200, deadline=None)
@given(lifetimes)
def test_what_lives_at_once_never_shares_bytes(items: list[Lifetime]) -> None:
    packing = pack(items)

    check_apart(items, packing)
    assert packing.nbytes >= packing.peak
    assert all(packing.sizes[item.name] >= item.nbytes for item in items)


@settings(max_examples=50, deadline=None)
@given(lifetimes)
def test_less_effort_is_still_right_and_more_never_takes_more(items: list[Lifetime]) -> None:
    quick = pack(items, mendings=0)

    check_apart(items, quick)
    assert quick.nbytes >= pack(items).nbytes >= quick.peak
    assert pack(items, mendings=0) == quick


def test_a_large_tensor_uses_the_place_of_a_slightly_smaller_one() -> None:
    # The head is the embedding plus a norm; it must not be put on top for those few bytes.
    rows = [("embedding", 1000, 0, 10), ("layer", 400, 5, 26), ("head", 1004, 10, 21)]
    items = [Lifetime(name=n, nbytes=b, start=s, end=e) for n, b, s, e in rows]

    assert pack(items, alignment=1, mendings=0).nbytes == peak_nbytes(items) == 1404


def test_pieces_that_differ_by_a_little_take_three_slots() -> None:
    # Three at a time, each a little smaller or larger than the one it follows.
    sizes = [1000 - (7 * i) % 13 for i in range(60)]
    items = [Lifetime(name=str(i), nbytes=b, start=i, end=i + 3) for i, b in enumerate(sizes)]

    assert pack(items, alignment=1, mendings=0).nbytes <= 3 * max(sizes)


def test_nothing_takes_nothing() -> None:
    assert pack([]).nbytes == 0
    assert pack([]).waste == 0


def test_tensors_that_follow_each_other_share() -> None:
    row = [Lifetime(name=str(i), nbytes=4096, start=i, end=i + 1) for i in range(100)]

    assert pack(row).nbytes == 4096


def test_the_peak_is_what_lives_at_once() -> None:
    items = [
        Lifetime(name="a", nbytes=10, start=0, end=3),
        Lifetime(name="b", nbytes=20, start=2, end=4),
        Lifetime(name="c", nbytes=25, start=3, end=5),
    ]

    assert peak_nbytes(items) == 45
    assert peak_nbytes(items, alignment=4096) == 2 * 4096


def test_a_name_is_used_once() -> None:
    twice = [Lifetime(name="a", nbytes=1, start=i, end=i + 1) for i in range(2)]

    with pytest.raises(ValueError, match="two tensors of one name"):
        pack(twice)


@pytest.mark.parametrize(("nbytes", "start", "end"), [(0, 0, 1), (1, 1, 1), (1, 2, 1)])
def test_a_lifetime_that_cannot_be(nbytes: int, start: int, end: int) -> None:
    with pytest.raises(ValueError, match="a: "):
        Lifetime(name="a", nbytes=nbytes, start=start, end=end)


@pytest.mark.parametrize("model", models(), ids=lambda m: m.name)
@pytest.mark.parametrize("schedule", [all_at_once, weights_one_ahead, whole_step])
def test_real_models_take_at_most_one_percent_above_the_bound(
    model: Model, schedule: Callable[[Model], list[Lifetime]]
) -> None:
    items = schedule(model)

    packing = pack(items)

    assert packing.waste <= 0.01
    assert packing.peak == peak_nbytes(items, alignment=4096)
    if len(items) < 1200:
        check_apart(items, packing)


@pytest.mark.parametrize("model", models(), ids=lambda m: m.name)
def test_memascends_figures_follow_from_the_config(model: Model) -> None:
    baseline, need = PUBLISHED[model.name]

    assert round(zero_infinity_nbytes(model) / GiB, 2) == baseline
    assert round(pack(all_at_once(model)).nbytes / GiB, 2) <= need
    assert pack(weights_one_ahead(model)).nbytes / GiB < need


def table_row(model: Model) -> str:
    baseline = zero_infinity_nbytes(model)
    same = pack(all_at_once(model))
    ours = pack(weights_one_ahead(model))
    whole = pack(whole_step(model))
    return (
        f"| {model.name} | {baseline / GiB:.2f} | {same.nbytes / GiB:.2f} | "
        f"{ours.nbytes / GiB:.2f} | {1 - ours.nbytes / baseline:.1%} | "
        f"{whole.nbytes / GiB:.2f} | {whole.waste:.2%} |"
    )


@pytest.mark.parametrize("model", models(), ids=lambda m: m.name)
def test_the_table_in_the_docs_is_true(model: Model) -> None:
    assert table_row(model) in DOCS.read_text()
