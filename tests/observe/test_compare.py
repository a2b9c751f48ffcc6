"""The comparison of two runs, in figures and in sentences."""

from __future__ import annotations

import pytest

from penstock.observe.compare import compare
from penstock.observe.measures import measure
from tests.observe.synthetic_runs import make_run, offloaded, on_cpu, streamed


def test_a_comparison_says_which_is_faster_and_why() -> None:
    made = compare(measure(offloaded()), measure(streamed()))
    rows = {row.name: row for row in made.rows}

    assert made.words[0].startswith("B is 1.33 times as fast as A: 1.50 s per step")
    assert "Update takes 800 ms less in B: none instead of 800 ms." in made.words
    assert rows["step time"].ratio == pytest.approx(0.75)
    assert rows["step time"].judged == "better"
    assert rows["copies hidden behind compute"].change == "+58 points"
    assert rows["Host to GPU (h2d), per step"].ratio == 8.0
    assert rows["GPU 0, tensors"].judged == "better"


def test_a_run_compared_with_itself_has_no_differences() -> None:
    made = compare(measure(offloaded()), measure(offloaded()))

    assert made.words == ("A and B are equally fast: 2.00 s and 2.00 s per step.",)
    assert {row.judged for row in made.rows} == {""}


def test_a_comparison_mentions_different_hardware_and_missing_steps() -> None:
    other = compare(measure(offloaded()), measure(on_cpu()))
    nothing = compare(measure(make_run([], [], [])), measure(offloaded()))

    assert any("different hardware" in word for word in other.words)
    assert nothing.words[0] == "No steps were recorded in A: speeds cannot be compared."
