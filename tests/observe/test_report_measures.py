"""Figures of runs whose answers are known, and sets of time against brute force."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.intervals import clip, difference, intersection, total_length, union
from penstock.observe.measures import measure
from penstock.observe.page import page
from penstock.observe.page_plots import BINS, bin_traffic
from penstock.observe.records import Event, Phase, Sample
from penstock.observe.series import split_at_gaps, stats_by_phase, thin
from penstock.observe.steps import UNNAMED, Segment, find_steps, flatten_phases, typical_step
from penstock.observe.usage import step_usages
from penstock.units import GiB
from tests.observe.made_runs import GB, make_run, offloaded, on_cpu, sampled, streamed

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)


def ticks(spans: list[tuple[float, float]]) -> set[int]:
    """The same set as whole seconds, counted one by one."""
    return {t for start, end in spans for t in range(int(start), int(end))}


@given(SPANS, SPANS)
def test_sets_of_time_are_what_counting_gives(left: list, right: list) -> None:  # type: ignore[type-arg]
    a, b = union(left), union(right)

    assert ticks(a) == ticks(left)
    assert a == sorted(a)
    assert all(a[i][1] < a[i + 1][0] for i in range(len(a) - 1))
    assert total_length(a) == len(ticks(left))
    assert ticks(intersection(a, b)) == ticks(left) & ticks(right)
    assert ticks(difference(a, b)) == ticks(left) - ticks(right)
    assert ticks(clip(left, 5, 20)) == ticks(left) & set(range(5, 20))


@given(SPANS, SPANS, SPANS)
def test_busy_hidden_idle_and_waits_are_what_counting_gives(
    gpu: list, copies: list, sweeps: list  # type: ignore[type-arg]
) -> None:  # fmt: skip
    events = [Event("gpu", "kernel", "k", a, b, 0) for a, b in gpu]
    events += [Event("h2d", "copy", "c", a, b, 0, link="h2d", nbytes=1) for a, b in copies]
    events += [Event("cpu sweep", "sweep", "s", a, b, 0) for a, b in sweeps]
    run = make_run([Phase("forward", 0, 0, 10), Phase("update", 0, 10, 25)], events, [])
    (use,) = step_usages(find_steps(run), run.events)
    whole = set(range(25))
    computing, copying, sweeping = (ticks(s) & whole for s in (gpu, copies, sweeps))

    assert use.seconds("gpu") == len(computing)
    assert use.hidden("h2d") == len(computing & copying)
    assert use.idle(["h2d"], "update") == (len(set(range(10, 25)) - copying), 15)
    waits = {names: total_length(spans) for names, spans in use.waits().items() if spans}
    idle = whole - computing
    counted = {
        (): len(idle - copying - sweeping),
        ("h2d",): len(idle & copying - sweeping),
        ("cpu sweep",): len(idle & sweeping - copying),
        ("cpu sweep", "h2d"): len(idle & sweeping & copying),
    }
    assert waits == {names: seconds for names, seconds in counted.items() if seconds}


@given(SPANS)
def test_phases_that_overlap_share_no_moment_and_lose_none(spans: list) -> None:  # type: ignore[type-arg]
    phases = [Phase(str(at), 0, a, b) for at, (a, b) in enumerate(spans)]

    segments = flatten_phases(phases)

    assert sum(s.end - s.start for s in segments) == len(ticks(spans))
    for segment in segments:
        latest = max(p.start for p in phases if p.start <= segment.start < p.end)
        assert next(p for p in phases if p.name == segment.name).start == latest


def test_no_step_is_told_to_take_longer_than_it_did() -> None:
    """As when the steps whose events were kept are not the typical ones."""
    m = measure(offloaded())

    assert dataclasses.replace(m, seconds=1.0).floor == pytest.approx(0.5)


def test_an_offloaded_run_gives_the_figures_it_was_made_with() -> None:
    m = measure(offloaded())

    assert m.seconds == pytest.approx(2.0)
    assert m.phases == pytest.approx({"forward": 0.4, "backward": 0.8, "update": 0.8})
    assert m.busy == pytest.approx({"gpu": 0.5, "cpu sweep": 0.3, "d2h": 0.15, "h2d": 0.1})
    assert m.waits == pytest.approx({("cpu sweep",): 0.6, ("h2d",): 0.2, ("d2h",): 0.1, (): 0.1})
    assert m.hidden == pytest.approx(0.4)  # 0.2 of 0.5 s
    assert m.exposed == pytest.approx(0.3)
    assert m.floor == pytest.approx(1.0)
    assert (m.links["h2d"].nbytes, m.links["d2h"].nbytes) == (3 * GB, 6 * GB)
    assert m.links["h2d"].rate == pytest.approx(15 * GB)
    assert (m.bottleneck.resource, m.bottleneck.limits_step) == ("gpu", False)
    peaks = {peak.key: peak for peak in m.peaks}
    assert peaks["gpu0.allocated"].measured == 20 * GiB
    assert peaks["gpu0.allocated"].phase == "backward"
    assert peaks["gpu0.allocated"].capacity == 24 * GiB


def test_a_streamed_run_is_bound_by_compute_and_keeps_its_plan() -> None:
    m = measure(streamed())

    assert m.bottleneck.resource == "gpu"
    assert m.bottleneck.limits_step
    assert m.bottleneck.share == pytest.approx(1 - 12 * 0.002 / 1.5)
    planned = m.run.observation.planned
    assert planned is not None
    assert {link: m.links[link].nbytes for link in planned.links} == planned.links
    tiers = {peak.key: (peak.planned, peak.budget) for peak in m.peaks if peak.planned is not None}
    assert tiers["tier.hbm"] == (7 * GiB, 8 * GiB)
    assert "tier.cxl" not in tiers  # nothing was planned there, and nothing was


def test_samples_alone_tell_less_and_say_so() -> None:
    m = measure(sampled())

    assert m.hidden is None
    assert m.waits == {}
    assert not m.bottleneck.exact
    assert m.bottleneck.resource == "gpu"
    assert m.bottleneck.share == pytest.approx(0.5)
    assert not m.links["h2d"].exact
    assert m.links["h2d"].nbytes == pytest.approx(3 * GB)


def test_a_run_without_gpu_is_bound_by_its_cores() -> None:
    m = measure(on_cpu())

    assert m.bottleneck.resource == "cpu"
    assert m.bottleneck.share == pytest.approx(0.7)
    assert [peak.key for peak in m.peaks] == ["host.rss"]


def test_a_step_ends_where_the_next_begins_or_where_saving_does() -> None:
    phases = [
        Phase("forward", 0, 0.0, 1.0), Phase("save", 0, 2.0, 9.0), Phase("forward", 1, 10.0, 11.0),
        Phase("forward", 2, 12.0, 13.0), Phase("forward", 9, 50.0, 51.0),
    ]  # fmt: skip
    steps = find_steps(make_run(phases, [], []))

    assert [(s.number, s.start, s.end) for s in steps] == [
        (0, 0.0, 2.0), (1, 10.0, 12.0), (2, 12.0, 13.0), (9, 50.0, 51.0),
    ]  # fmt: skip
    assert steps[0].during(UNNAMED) == [(1.0, 2.0)]


def test_steps_come_from_events_or_samples_where_no_phase_has_one() -> None:
    events = [Event("gpu", "kernel", "k", float(n), n + 0.5, n) for n in range(3)]
    samples = [Sample(t=float(n), step=n // 2) for n in range(6)]

    assert len(find_steps(make_run([], events, samples))) == 3
    assert [s.start for s in find_steps(make_run([], [], samples))] == [0.0, 2.0, 4.0]


def test_the_typical_step_is_neither_the_first_nor_the_slowest() -> None:
    lengths = [9.0, 1.0, 1.1, 5.0, 1.05]
    phases, at = [], 0.0
    for number, seconds in enumerate(lengths):
        phases.append(Phase("forward", number, at, at + seconds))
        at += seconds

    shown = typical_step(find_steps(make_run(phases, [], [])))
    assert shown is not None
    assert shown.number in (2, 4)


def test_an_event_that_reaches_into_the_next_step_is_busy_in_both_and_counted_once() -> None:
    phases = [Phase("forward", n, float(n), n + 1.0) for n in range(2)]
    copy = Event("h2d", "copy", "w", 0.5, 1.25, 0, link="h2d", nbytes=8)
    late = Event("d2h", "copy", "g", 1.5, 1.75, 0, link="d2h", nbytes=3)
    first, second = step_usages(find_steps(make_run(phases, [], [])), [copy, late])

    assert (first.seconds("h2d"), second.seconds("h2d")) == (0.5, 0.25)
    assert (first.seconds("d2h"), second.seconds("d2h")) == (0.0, 0.25)
    assert (first.nbytes, second.nbytes) == ({"h2d": 8, "d2h": 3}, {})


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=400), st.integers(1, 20))
def test_thinning_keeps_every_extreme_and_both_ends(values: list[int], buckets: int) -> None:
    points = [(float(t), float(v)) for t, v in enumerate(values)]

    kept = thin(points, buckets)

    assert len(kept) <= max(4 * buckets, 1)
    assert set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {max(v for _, v in kept), min(v for _, v in kept)} == {max(values), min(values)}
    assert list(kept) == sorted(kept)


@given(SPANS)
def test_a_plot_of_traffic_holds_exactly_the_bytes(spans: list) -> None:  # type: ignore[type-arg]
    events = [Event("h2d", "copy", "c", a, b, nbytes=1000) for a, b in spans if b >= a]

    points = bin_traffic(events, 0.0, 31.0)

    assert len(points) == 2 * BINS
    assert sum(rate for _, rate in points[::2]) * 31.0 / BINS == pytest.approx(1000 * len(events))


def test_a_line_is_not_drawn_over_a_hole() -> None:
    points = [(0.0, 1.0), (0.05, 1.0), (5.0, 2.0), (5.05, 2.0)]

    assert [len(stretch) for stretch in split_at_gaps(points, 0.05)] == [2, 2]


def test_a_moment_on_an_edge_is_the_next_phases() -> None:
    segments = [Segment("forward", 0.0, 1.0), Segment("update", 1.0, 2.0)]
    stats = stats_by_phase([(0.5, 1.0), (1.0, 3.0), (2.0, 9.0)], segments)

    assert (stats["forward"].high, stats["update"].high) == (1.0, 3.0)


def test_not_a_number_is_no_sample() -> None:
    run = sampled()
    bad = replace(run.samples[3], t=float("nan"))
    m = measure(replace(run, samples=(*run.samples, bad)))

    assert m.memory["host.rss"].points == measure(run).memory["host.rss"].points


def test_records_without_a_time_are_left_out_and_counted() -> None:
    run = offloaded()
    nan, inf = float("nan"), float("inf")
    events = (
        replace(run.events[0], start=nan), replace(run.events[0], end=inf),
        replace(run.events[0], start=3.0, end=2.0),
    )  # fmt: skip
    m = measure(replace(run, events=(*run.events, *events)))

    assert m.busy == measure(run).busy
    assert m.run.notes == ("3 records have invalid times and were left out",)
    assert "3 records have invalid times" in page(m)


def test_what_the_system_writes_to_a_disk_meanwhile_is_no_traffic_of_the_run() -> None:
    def links(rate: float) -> dict[str, float]:
        run = sampled()
        samples = tuple(replace(s, disk={"sda": (0, int(s.t * rate))}) for s in run.samples)
        return {
            link: use.rate for link, use in measure(replace(run, samples=samples)).links.items()
        }

    assert "disk:sda:write" not in links(2e5)
    assert links(2e6)["disk:sda:write"] == pytest.approx(2e6)
