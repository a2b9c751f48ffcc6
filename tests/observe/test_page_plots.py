"""The time windows of plots, and the points in them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given

from penstock.observe.measures import Measures, measure
from penstock.observe.page import page
from penstock.observe.page_plots import (
    BINS,
    bin_traffic,
    memory_plots,
    overlay_steps,
    points_in,
    step_window,
    widened_window,
)
from penstock.observe.records import Event, GpuSample, HostSample, Phase, Sample
from penstock.units import GiB
from tests.observe.synthetic_runs import make_run, offloaded, streamed
from tests.observe.test_intervals import SPANS


def sparse(gap_after: int | None = None) -> Measures:
    """Return eight steps of 1 s and 1.5 s in turn, with a sample every 0.3 s. GPU memory grows by
    1 GiB per tenth of a step."""
    phases, samples, at = [], [], 0.0
    for n in range(8):
        wide = 1.5 if n % 2 else 1.0
        phases += [Phase("forward", n, at, at + 0.4 * wide),
                   Phase("backward", n, at + 0.4 * wide, at + wide)]  # fmt: skip
        start = at
        while start + 0.01 < at + wide:
            held = int(10 * (start - at) / wide * GiB)
            samples.append(Sample(t=start, step=n, gpu=(GpuSample(allocated=held),),
                                  host=HostSample(rss=(n + 1) * GiB)))  # fmt: skip
            start += 0.3
        at += wide
        if n == gap_after:
            phases.append(Phase("observing", None, at, at + 5.0))
            at += 5.0
    return measure(make_run(phases, [], samples))


def test_a_step_with_few_samples_is_drawn_from_all_steps() -> None:
    m = sparse()
    window = step_window(m)
    assert window is not None
    overlaid = overlay_steps(m, window, ["gpu0.allocated"])

    points = points_in(m.memory["gpu0.allocated"], overlaid)

    seconds = window.end - window.start
    assert len(points) == 3 * 4 + 4 * 5
    assert list(points) == sorted(points)
    for t, held in points:
        assert held == pytest.approx(10 * (t - window.start) / seconds * GiB, abs=2)
    assert "Samples of 7 steps" in page(m)


def test_only_gpu_memory_is_overlaid() -> None:
    m = sparse()
    window = step_window(m)
    assert window is not None
    gpu, host = memory_plots(m, window)

    assert gpu.note
    assert not host.note
    assert len({value for _, value in host.lines[0].points}) <= 3


def test_a_step_with_many_samples_is_drawn_from_its_own() -> None:
    for run in (offloaded(), streamed()):
        m = measure(run)
        window = step_window(m)
        assert window is not None
        assert overlay_steps(m, window, ["gpu0.allocated"]) is window


def test_a_widened_window_leaves_out_warmup_and_gaps_between_steps() -> None:
    whole = widened_window(sparse())
    assert whole is not None
    assert whole.title == "steps 1 to 7"

    for shown, title in ((2, "steps 1 to 3"), (6, "steps 4 to 7")):
        m = sparse(gap_after=3)
        parted = widened_window(replace(m, shown=m.steps[shown]))
        assert parted is not None
        assert parted.title == title
        assert {segment.name for segment in parted.segments} == {"forward", "backward"}


def test_the_warmup_step_is_mentioned_and_not_drawn() -> None:
    phases = [Phase("forward", 0, -20.0, 0.0)]
    phases += [Phase("forward", n, float(n - 1), float(n)) for n in range(1, 5)]

    html = page(measure(make_run(phases, [], [Sample(t=-20.0), Sample(t=4.0)])))

    assert "step time up to 1.00 s" in html
    assert "Step 0 (warm-up, not drawn) took 20.0 s." in html


def test_a_phase_has_the_same_colour_in_bars_and_plots() -> None:
    """Time between phases has no colour, and does not shift the colours of phases."""
    phases = [Phase(name, n, n + a, n + b) for n in range(4)
              for name, a, b in (("forward", 0.0, 0.3), ("update", 0.6, 1.0))]  # fmt: skip
    samples = [Sample(t=0.1 * k, host=HostSample(rss=GiB)) for k in range(40)]
    html = page(measure(make_run(phases, [], samples)))

    bar = re.search(r'<span class="phase-part (\w+)"[^>]*title="update"', html)
    toggle = re.search(r'class="toggle (\w+)"[^>]*>update<', html)
    assert bar is not None
    assert toggle is not None
    assert bar[1] == toggle[1]


def test_samples_before_an_engine_reports_its_tiers_lack_pinned_memory() -> None:
    run = streamed()
    before = [
        replace(s, tiers={}, host=replace(s.host, pinned=5)) if s.t < 1.6 else s
        for s in run.samples
    ]
    m = measure(replace(run, samples=tuple(before)))

    assert min(value for _, value in m.memory["host.pinned"].points) == 37 * GiB


@given(SPANS)
def test_binned_traffic_adds_up_to_the_bytes(spans: list) -> None:  # type: ignore[type-arg]
    events = [Event("h2d", "copy", "c", a, b, nbytes=1000) for a, b in spans if b >= a]

    points = bin_traffic(events, 0.0, 31.0)

    assert len(points) == 2 * BINS
    assert sum(rate for _, rate in points[::2]) * 31.0 / BINS == pytest.approx(1000 * len(events))
