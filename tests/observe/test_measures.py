"""Figures of runs whose answers are known."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from penstock.observe.findings import find
from penstock.observe.measures import Measures, measure
from penstock.observe.page import page
from penstock.observe.page_plots import memory_plots, step_window
from penstock.observe.records import Event, GpuSample, HostSample, Phase, Sample
from penstock.units import GiB
from tests.observe.synthetic_runs import (
    GB,
    PLANNED,
    make_run,
    offloaded,
    on_cpu,
    sampled,
    streamed,
    with_separate_sweeps,
)


def test_the_lower_bound_never_exceeds_the_step_time() -> None:
    """Even if the steps whose events were kept are slower than the median."""
    m = measure(offloaded())

    assert dataclasses.replace(m, seconds=1.0).floor == pytest.approx(0.5)


def test_an_offloaded_run_has_the_expected_figures() -> None:
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


def test_a_streamed_run_is_compute_bound_and_matches_its_plan() -> None:
    m = measure(streamed())

    assert m.bottleneck.resource == "gpu"
    assert m.bottleneck.limits_step
    assert m.bottleneck.share == pytest.approx(1 - 12 * 0.002 / 1.5)
    planned = m.run.observation.planned
    assert planned is not None
    assert {link: m.links[link].nbytes for link in planned.links} == planned.links
    tiers = {peak.key: (peak.planned, peak.budget) for peak in m.peaks if peak.planned is not None}
    assert tiers["tier.hbm"] == (7 * GiB, 8 * GiB)
    assert "tier.cxl" not in tiers  # neither planned nor used


def test_figures_from_samples_are_marked_as_inexact() -> None:
    m = measure(sampled())

    assert m.hidden is None
    assert m.waits == {}
    assert not m.bottleneck.exact
    assert m.bottleneck.resource == "gpu"
    assert m.bottleneck.share == pytest.approx(0.5)
    assert not m.links["h2d"].exact
    assert m.links["h2d"].nbytes == pytest.approx(3 * GB)


def test_the_cpu_is_the_bottleneck_of_a_run_without_gpu() -> None:
    m = measure(on_cpu())

    assert m.bottleneck.resource == "cpu"
    assert m.bottleneck.share == pytest.approx(0.7)
    assert [peak.key for peak in m.peaks] == ["host.rss"]


def test_a_sample_at_nan_is_ignored() -> None:
    run = sampled()
    bad = replace(run.samples[3], t=float("nan"))
    m = measure(replace(run, samples=(*run.samples, bad)))

    assert m.memory["host.rss"].points == measure(run).memory["host.rss"].points


def test_records_with_invalid_times_are_skipped_and_counted() -> None:
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


def test_low_disk_traffic_is_not_attributed_to_the_run() -> None:
    def links(rate: float) -> dict[str, float]:
        run = sampled()
        samples = tuple(replace(s, disk={"sda": (0, int(s.t * rate))}) for s in run.samples)
        return {
            link: use.rate for link, use in measure(replace(run, samples=samples)).links.items()
        }

    assert "disk:sda:write" not in links(2e5)
    assert links(2e6)["disk:sda:write"] == pytest.approx(2e6)


# Which step and phase a figure belongs to.


def test_a_final_sweep_belongs_to_no_step() -> None:
    m = measure(with_separate_sweeps(streamed(), 7))

    assert "update" not in m.phases
    assert m.steps[-1].seconds == pytest.approx(1.2)


def test_updates_of_most_steps_belong_to_the_steps() -> None:
    every = measure(with_separate_sweeps(streamed(), *range(8)))
    other = measure(replace(offloaded(), phases=offloaded().phases[:-1]))

    assert every.phases["update"] == pytest.approx(0.3)
    assert other.phases["update"] == pytest.approx(0.8 * 4 / 5)


def test_a_copy_within_the_gpu_counts_as_gpu_work() -> None:
    run = offloaded()
    within = [
        Event("d2d", "copy", "Memcpy DtoD", 2.0 * n + 0.4, 2.0 * n + 0.5, n, "backward", None, 8,
              "gpu", "gpu")
        for n in range(6)
    ]  # fmt: skip
    m = measure(replace(run, events=(*run.events, *within)))

    assert m.busy["gpu"] == pytest.approx(measure(run).busy["gpu"] + 0.05)
    assert "d2d" not in m.busy
    assert not any("d2d" in names for names in m.waits)


def host_ahead_of_gpu() -> Measures:
    """A host that finishes backward before the GPU finishes forward."""
    phases = [
        Phase(name, n, n + a, n + b)
        for n in range(6)
        for name, a, b in (("forward", 0.0, 0.5), ("backward", 0.5, 1.0))
    ]
    samples = [
        Sample(
            t=n + 0.1 * k,
            step=n,
            phase="forward" if k < 1 else "backward",
            gpu=(GpuSample(allocated=(9 if k == 3 else 2) * GiB),),
            host=HostSample(rss=(9 if k == 3 else 2) * GiB),
        )
        for n in range(6)
        for k in range(10)
    ]
    return measure(make_run(phases, [], samples))


def test_torch_memory_follows_the_hosts_phase_and_other_figures_the_gpus() -> None:
    m = host_ahead_of_gpu()
    by_torch, by_kernel = m.stats(m.memory["gpu0.allocated"]), m.stats(m.memory["host.rss"])

    assert (by_torch["forward"].high, by_torch["backward"].high) == (2 * GiB, 9 * GiB)
    assert (by_kernel["forward"].high, by_kernel["backward"].high) == (9 * GiB, 2 * GiB)
    peaks = {peak.key: (peak.step, peak.phase) for peak in m.peaks}
    assert peaks["gpu0.allocated"] == (0, "backward")
    assert peaks["host.rss"] == (0, "forward")


def test_a_peak_before_the_first_phase_is_described() -> None:
    early = Sample(t=-1.0, gpu=(GpuSample(allocated=23 * GiB),))
    run = offloaded()
    m = measure(replace(run, samples=(early, *run.samples)))

    peak = next(peak for peak in m.peaks if peak.key == "gpu0.allocated")
    assert (peak.measured, peak.step, peak.phase) == (23 * GiB, None, "before the first phase")


def test_a_peak_between_samples_comes_from_torch() -> None:
    run = offloaded()
    with_peaks = tuple(
        replace(s, gpu=(replace(s.gpu[0], peak=(9 if s.t < 5.0 else 23) * GiB),))
        for s in run.samples
    )
    known, unknown = measure(replace(run, samples=with_peaks)), measure(run)

    def tensors(m: Measures) -> tuple[int | None, int | None, str | None]:
        peak = next(peak for peak in m.peaks if peak.key == "gpu0.allocated")
        return peak.measured, peak.step, peak.phase

    assert tensors(known) == (23 * GiB, None, "step 2, between samples")
    assert tensors(unknown) == (20 * GiB, 0, "backward")
    assert "step 2, between samples" in page(known)


def test_reserved_hbm_is_not_mistaken_for_used_hbm_in_old_recordings() -> None:
    run = streamed()
    reserved = tuple(replace(s, tiers={**s.tiers, "hbm": 7 * GiB}) for s in run.samples)
    m = measure(replace(run, samples=reserved))

    used = max(sample.gpu[0].allocated or 0 for sample in run.samples)
    tier = next(peak for peak in m.peaks if peak.key == "tier.hbm")
    assert (tier.planned, tier.measured) == (7 * GiB, used)
    window = step_window(m)
    assert window is not None
    drawn = memory_plots(m, window)[0]
    assert [line.name for line in drawn.lines] == ["tensors", "reserved by torch", "whole device"]
    assert "HBM budget" in [level.name for level in drawn.references]


def test_measured_tiers_and_host_memory_are_compared_with_the_plan() -> None:
    run = streamed(planned=replace(PLANNED, host=43 * GiB))
    held = tuple(replace(s, tiers={**s.tiers, "hbm": 6 * GiB}) for s in run.samples)
    m = measure(replace(run, samples=held))
    peaks = {peak.key: (peak.planned, peak.measured) for peak in m.peaks}

    assert peaks["tier.hbm"] == (7 * GiB, 6 * GiB)
    assert peaks["host.rss"] == (43 * GiB, 42 * GiB)
    assert not [finding for finding in find(m) if finding.kind == "plan-peak"]
    window = step_window(m)
    assert window is not None
    assert "HBM tier" in [line.name for line in memory_plots(m, window)[0].lines]
