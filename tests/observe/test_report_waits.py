"""What the GPU waited for, where nothing was recorded, and which copies were not hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.observe.findings import Finding, busy_cores, find, unexplained_idle
from penstock.observe.measures import measure
from penstock.observe.records import RecordedRun
from tests.observe.made_runs import offloaded


def said(run: RecordedRun, kind: str) -> list[Finding]:
    return [finding for finding in find(measure(run)) if finding.kind == kind]


def unswept(busy: float = 0.8) -> RecordedRun:
    """An optimizer on the CPU that nobody recorded: no sweep, but cores that work in update. A
    sample says what they did since the one before."""
    run = offloaded()
    before = [None, *(sample.phase for sample in run.samples)]
    samples = tuple(
        replace(sample, cpu=(busy if phase == "update" else 0.1,) * 16)
        for sample, phase in zip(run.samples, before, strict=False)
    )
    events = tuple(e for e in run.events if e.kind != "sweep")
    return replace(run, events=events, samples=samples)


def test_a_wait_for_what_was_not_recorded_says_its_phase_and_what_the_cores_did() -> None:
    found = said(unswept(), "waiting")[0]

    # Of each step: 0.1 s before backward's first kernel, 0.6 of update.
    assert found.text == (
        "GPU idle for 700 ms per step, cause not recorded: 600 ms in update, "
        "with 13 of 16 CPU cores busy"
    )
    assert found.advice.startswith("Probably an optimizer on the CPU")
    assert found.seconds == pytest.approx(0.7)


def test_few_cores_and_no_figure_of_cores_are_told_apart() -> None:
    alone, unknown = unswept(busy=0.1), unswept()
    blind = replace(unknown, samples=tuple(replace(s, cpu=()) for s in unknown.samples))

    assert "with 2 of 16 CPU cores busy" in said(alone, "waiting")[0].text
    assert "main thread" in said(alone, "waiting")[0].advice
    assert said(blind, "waiting")[0].text.endswith("600 ms in update")
    assert said(blind, "waiting")[0].advice.startswith("Possible causes: Python code")


def test_a_figure_of_the_cores_counts_only_for_the_phase_that_it_is_of() -> None:
    """Read every 0.7 s, most figures are of two phases; those of update alone say what it was."""
    run = unswept()
    sparse, last, busy = [], 0.0, 0.0
    for sample in run.samples:
        busy += 0.05 * sample.cpu[0]
        due = sample.t - last >= 0.7
        sparse.append(replace(sample, cpu=(busy / (sample.t - last),) * 16 if due else ()))
        if due:
            last, busy = sample.t, 0.0
    m = measure(replace(run, samples=tuple(sparse)))

    cores = busy_cores(m, "update")
    assert cores is not None
    assert 0.8 * 0.8 * 16 <= cores <= 0.8 * 16 + 1e-6
    assert busy_cores(m, "forward") is None


def test_two_phases_that_share_a_wait_are_both_named() -> None:
    run = unswept()
    events = tuple(e for e in run.events if e.phase != "forward")
    m = measure(replace(run, events=events))

    assert unexplained_idle(m) == pytest.approx({"update": 0.6, "forward": 0.4, "backward": 0.1})
    text = said(replace(run, events=events), "waiting")[0].text
    assert text.endswith(
        "600 ms in update and 400 ms in forward, with 13 of 16 CPU cores busy in update"
    )


def test_copies_beside_a_sweep_that_is_waited_for_are_told_apart_and_cost_nothing() -> None:
    """The weights of each step come while the sweep goes on: it is the sweep that costs."""
    run = offloaded()
    events = [
        replace(e, start=e.start - 0.2, end=e.end - 0.2) if e.name == "weights" else e
        for e in run.events
    ]
    found = said(replace(run, events=tuple(events)), "overlap")[0]

    assert found.text == (
        "40 % of copy time hidden behind compute; 300 ms per step not hidden, "
        "of which 200 ms during the CPU optimizer sweep"
    )
    assert (found.level, found.seconds) == ("warn", pytest.approx(0.1))
    quick = [replace(e, end=e.start + 0.2) if e.name == "gradients" else e for e in events]
    assert said(replace(run, events=tuple(quick)), "overlap")[0].level == "note"


def test_pcie_is_not_called_idle_where_nothing_has_to_cross_it() -> None:
    run = offloaded()
    tokens = tuple(replace(e, nbytes=1000) if e.link else e for e in run.events)

    assert said(run, "link-idle")
    assert not said(replace(run, events=tokens), "link-idle")


def test_a_trough_is_not_told_of_a_phase_that_few_samples_saw() -> None:
    run = offloaded()
    few = tuple(s for s in run.samples if s.phase != "update" or s.step == 3)
    none = tuple(s for s in few if s.phase != "update" or s.t < 7.6)

    assert "during update" in said(replace(run, samples=few), "trough")[0].text
    assert "during update" not in said(replace(run, samples=none), "trough")[0].text
