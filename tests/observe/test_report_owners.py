"""What a figure is of: whose work, which step, which phase."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.observe.measures import Measures, measure
from penstock.observe.page import page
from penstock.observe.page_plots import memory_plots, step_window
from penstock.observe.records import Event, GpuSample, HostSample, Phase, RecordedRun, Sample
from penstock.units import GiB
from tests.observe.made_runs import make_run, offloaded, streamed


def finishing(run: RecordedRun, *steps: int) -> RecordedRun:
    """The same with a sweep of 0.3 s apart, at the end of some of the steps."""
    late = [Phase("update", n, 1.5 * n + 1.5 - 0.3, 1.5 * n + 1.5) for n in steps]
    cut = [
        replace(p, end=p.end - 0.3) if p.name == "backward" and p.step in steps else p
        for p in run.phases
    ]
    return replace(run, phases=tuple(sorted([*cut, *late], key=lambda p: p.start)))


def test_what_an_engine_sweeps_apart_at_the_end_is_of_no_step() -> None:
    m = measure(finishing(streamed(), 7))

    assert "update" not in m.phases
    assert m.steps[-1].seconds == pytest.approx(1.2)


def test_an_update_that_most_steps_have_is_theirs() -> None:
    every = measure(finishing(streamed(), *range(8)))
    anybodys = measure(replace(offloaded(), phases=offloaded().phases[:-1]))

    assert every.phases["update"] == pytest.approx(0.3)
    assert anybodys.phases["update"] == pytest.approx(0.8 * 4 / 5)


def test_a_copy_within_the_gpu_is_its_own_work() -> None:
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


def ahead() -> Measures:
    """A host that is through with backward before the GPU is through with forward."""
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


def test_memory_of_torch_belongs_to_the_hosts_phase_and_other_figures_to_the_moments() -> None:
    m = ahead()
    torchs, kernels = m.stats(m.memory["gpu0.allocated"]), m.stats(m.memory["host.rss"])

    assert (torchs["forward"].high, torchs["backward"].high) == (2 * GiB, 9 * GiB)
    assert (kernels["forward"].high, kernels["backward"].high) == (9 * GiB, 2 * GiB)
    peaks = {peak.key: (peak.step, peak.phase) for peak in m.peaks}
    assert peaks["gpu0.allocated"] == (0, "backward")
    assert peaks["host.rss"] == (0, "forward")


def test_a_peak_before_the_first_phase_is_said_to_be_there() -> None:
    early = Sample(t=-1.0, gpu=(GpuSample(allocated=23 * GiB),))
    run = offloaded()
    m = measure(replace(run, samples=(early, *run.samples)))

    peak = next(peak for peak in m.peaks if peak.key == "gpu0.allocated")
    assert (peak.measured, peak.step, peak.phase) == (23 * GiB, None, "before the first phase")


def test_a_peak_between_two_samples_is_torchs_to_tell() -> None:
    run = offloaded()
    told = tuple(
        replace(s, gpu=(replace(s.gpu[0], peak=(9 if s.t < 5.0 else 23) * GiB),))
        for s in run.samples
    )
    known, unknown = measure(replace(run, samples=told)), measure(run)

    def tensors(m: Measures) -> tuple[int | None, int | None, str | None]:
        peak = next(peak for peak in m.peaks if peak.key == "gpu0.allocated")
        return peak.measured, peak.step, peak.phase

    assert tensors(known) == (23 * GiB, None, "step 2, between samples")
    assert tensors(unknown) == (20 * GiB, 0, "backward")
    assert "step 2, between samples" in page(known)


def test_what_an_engine_sets_aside_in_hbm_is_not_taken_for_what_it_held() -> None:
    run = streamed()
    aside = tuple(replace(s, tiers={**s.tiers, "hbm": 7 * GiB}) for s in run.samples)
    m = measure(replace(run, samples=aside))

    held = max(sample.gpu[0].allocated or 0 for sample in run.samples)
    tier = next(peak for peak in m.peaks if peak.key == "tier.hbm")
    assert (tier.planned, tier.measured) == (7 * GiB, held)
    window = step_window(m)
    assert window is not None
    drawn = memory_plots(m, window)[0]
    assert [line.name for line in drawn.lines] == ["tensors", "reserved by torch", "whole device"]
    assert "budget of hbm" in [level.name for level in drawn.references]
