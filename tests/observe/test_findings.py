"""Findings appear in runs that show them, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.observe.findings import Finding, busy_cores, find, unexplained_idle
from penstock.observe.measures import measure
from penstock.observe.page import verdict
from penstock.observe.records import (
    DRIVER,
    STATES,
    Event,
    GpuSample,
    Hardware,
    HostSample,
    NodeInfo,
    Phase,
    PlannedTier,
    RecordedRun,
    Sample,
)
from penstock.units import GiB
from tests.observe.synthetic_runs import (
    GB,
    HARDWARE,
    PLANNED,
    make_run,
    offloaded,
    on_cpu,
    sampled,
    streamed,
)


def by_kind(run: RecordedRun) -> dict[str, Finding]:
    """Return the first finding of each kind."""
    kinds: dict[str, Finding] = {}
    for finding in find(measure(run)):
        kinds.setdefault(finding.kind, finding)
    return kinds


def of_kind(run: RecordedRun, kind: str) -> list[Finding]:
    return [finding for finding in find(measure(run)) if finding.kind == kind]


def texts(run: RecordedRun) -> list[str]:
    return [finding.text for finding in find(measure(run))]


@pytest.mark.parametrize(
    "text",
    [
        "GPU idle for 600 ms per step during the CPU optimizer sweep",
        "GPU idle for 200 ms per step during copies to the GPU",
        "pageable memory: 3.00 GB per step copied by `optimizer.step`",
        "40 % of copy time hidden behind compute; 300 ms per step not hidden",
        "PCIe idle for 100 % of forward, 63 % of backward and 75 % of update",
        "GPU memory: 18.0 GiB unused during update",
    ],
)
def test_an_offloaded_run_has_the_findings_of_the_study(text: str) -> None:
    assert text in texts(offloaded())


def test_a_streamed_run_has_none_of_these_findings() -> None:
    kinds = by_kind(streamed())

    assert not {"waiting", "overlap", "pageable", "link-idle", "plan-bytes", "serial"} & set(kinds)
    assert "hidden behind compute" in kinds["sweep"].text


def computing(share: float) -> RecordedRun:
    """Six steps of a second, of which a part is computed."""
    phases = [Phase("forward", step, step, step + 1.0) for step in range(6)]
    events = [Event("gpu", "kernel", "mm", step, step + share, step) for step in range(6)]
    return make_run(phases, events, [])


def test_a_run_that_only_computes_is_told_that_memory_does_not_help() -> None:
    (finding,) = of_kind(computing(0.98), "compute")

    assert "compute is busy for 98 % of the step: more memory or faster drives" in finding.text
    assert "LoRA adapter, or use a faster GPU" in finding.action
    assert not of_kind(computing(0.85), "compute")


def test_states_that_pass_through_the_gpu_are_reported_with_both_sides() -> None:
    run = streamed()
    passing = [
        Event("h2d", "copy", f"layers.{layer}{STATES}", 1.5 * step + 0.1 * layer,
              1.5 * step + 0.1 * layer + 0.05, step, "forward", "h2d", GB, "host", "gpu", True)
        for step in range(8) for layer in range(2)
    ]  # fmt: skip

    (found,) = of_kind(replace(run, events=(*run.events, *passing)), "sweep-sides")

    assert found.text == (
        "optimizer sweep: 2 blocks in host memory pass through the GPU (100 ms and 2.00 GB per "
        "step), the CPU sweeps others for 450 ms"
    )
    assert not of_kind(run, "sweep-sides")


def test_findings_are_sorted_by_what_can_be_gained() -> None:
    findings = find(measure(offloaded(exit_code=3)))

    assert findings[0].level == "bad"
    todo = [finding for finding in findings[1:] if finding.action]
    assert len(todo) >= 3
    assert list(findings[1 : len(todo) + 1]) == todo  # what has no remedy comes last
    gains = [finding.seconds for finding in todo]
    assert gains == sorted(gains, reverse=True)
    assert todo[0].text.startswith("GPU idle for 600 ms per step during the CPU optimizer sweep")


def test_advice_names_flags_only_for_runs_of_penstock() -> None:
    own = offloaded()
    kinds = by_kind(own)
    assert "--batch" not in kinds["waiting"].action
    assert "pin_memory" in kinds["pageable"].action
    planned = {f.text: f.action for f in find(measure(offloaded(planned=PLANNED)))}
    assert "`--batch`" in planned["GPU idle for 600 ms per step during the CPU optimizer sweep"]
    assert "`--hbm`" in planned["GPU idle for 200 ms per step during copies to the GPU"]


def with_exact_step(extra: float) -> RecordedRun:
    """Return twelve steps of one second; torch's profiler makes step 4 longer."""
    phases, at = [], 0.0
    for number in range(12):
        seconds = 1.0 + extra * (number == 4)
        phases.append(Phase("forward", number, at, at + seconds))
        at += seconds
    kernel = Event("gpu", "kernel", "layers.0", 4.0, 4.6, 4, "forward")
    return make_run(phases, [kernel], [], mode="exact")


def test_what_the_profiler_costs_is_not_blamed_on_the_program() -> None:
    """Step 4 takes 3 s because it is recorded: it is no slow step, and 2 s of its idle time are the
    recording's."""
    m = measure(with_exact_step(2.0))
    found = {finding.kind: finding for finding in find(m)}

    assert (m.seconds, m.recording_seconds) == (1.0, 2.0)
    assert m.phases == {"forward": 1.0}
    assert "slow-steps" not in found
    assert found["waiting"].text.startswith("GPU idle for 400 ms per step, cause not recorded")
    assert found["waiting"].seconds == pytest.approx(0.4)
    assert "Another 2.00 s per step is the recording itself" in found["waiting"].advice
    assert "recording" not in by_kind(with_exact_step(0.0))["waiting"].advice


def test_the_sampling_thread_is_not_one_of_the_programs_cores() -> None:
    run = without_sweep_events()
    alone = busy_cores(measure(run), "update")
    sampled_by_us = replace(run, observation=replace(run.observation, overhead=0.5))

    assert alone is not None
    assert busy_cores(measure(sampled_by_us), "update") == pytest.approx(alone - 0.5)


def test_samples_show_an_idle_gpu_and_busy_cores() -> None:
    kinds = by_kind(sampled())

    assert kinds["gpu-idle"].text == (
        "GPU idle for 100 % of update, which takes 40 % of a step; CPU cores 100 % busy"
    )
    assert kinds["link-idle"].text.startswith("PCIe idle for 100 % of forward")
    assert "18.0 GiB unused" in kinds["trough"].text


def test_differences_from_the_plan_are_found_to_the_byte() -> None:
    planned = replace(
        PLANNED,
        tiers={**PLANNED.tiers, "dram": PlannedTier(40 * GiB, 36 * GiB, 38 * GiB - 1)},
        links={"h2d": PLANNED.links["h2d"] - 1, "d2h": PLANNED.links["d2h"]},
        step_seconds=1.0,
    )
    kinds = by_kind(streamed(planned=planned))

    assert kinds["plan-peak"].level == "bad"
    assert "1 bytes above" in kinds["plan-peak"].text
    assert "(+1 bytes)" in kinds["plan-bytes"].text
    assert "50 % more" in kinds["plan-time"].text


def test_hbm_above_the_plan_is_a_finding() -> None:
    run = streamed(planned=replace(PLANNED, host=60 * GiB))
    held = tuple(replace(s, tiers={**s.tiers, "hbm": 7 * GiB + 5}) for s in run.samples)

    (finding,) = of_kind(replace(run, samples=held), "plan-peak")

    assert finding.level == "bad"
    assert "HBM tier used 7.00 GiB, 5 bytes above the planned 7.00 GiB" in finding.text


def test_a_process_larger_than_planned_is_a_finding() -> None:
    (finding,) = of_kind(streamed(planned=replace(PLANNED, host=40 * GiB)), "plan-peak")

    assert finding.level == "warn"
    assert "42.0 GiB of host memory, 2.00 GiB above the planned 40.0 GiB" in finding.text
    assert "penstock probe" in finding.action
    assert not of_kind(streamed(planned=replace(PLANNED, host=42 * GiB)), "plan-peak")


def test_the_drivers_count_is_compared_with_the_engines() -> None:
    run = streamed()
    again = [
        replace(e, track=DRIVER + e.track, link=None)
        for e in run.events
        if e.step == 4 and e.link in ("h2d", "d2h")
    ]
    tokens = Event(DRIVER + "h2d", "copy", "Memcpy HtoD", 6.0, 6.1, 4, None, None, 1000)
    exact = replace(run, events=(*run.events, *again, tokens))

    findings = of_kind(exact, "driver-bytes")

    assert [finding.level for finding in findings] == ["note", "note"]
    assert "+1,000 bytes compared with the engine's" in findings[0].text
    assert "+0 bytes" in findings[1].text
    assert measure(exact).links == measure(run).links
    lost = replace(exact, events=(*run.events, *again[: len(again) // 2]))
    assert next(f.level for f in find(measure(lost)) if f.kind == "driver-bytes") == "warn"


def test_a_killed_or_failed_program_is_the_first_finding() -> None:
    killed = find(measure(offloaded(ended_by="signal 9", exit_code=None)))
    failed = find(measure(offloaded(exit_code=3)))

    assert killed[0].text == "the program was ended by signal 9 after 12.0 s, in step 5"
    assert failed[0].text == "the program ended with exit code 3"


def steady(
    grow: int = 0, available: int = 64 * GiB, reserved: int = 10 * GiB, slows: float = 1.0
) -> RecordedRun:
    """Return twelve steps of one second whose memory may grow: less every step, if it slows."""
    grown = [int(grow * sum(slows**step for step in range(n))) for n in range(12)]
    phases = [Phase("forward", n, float(n), n + 1.0) for n in range(12)]
    samples = [
        Sample(
            t=n + 0.5,
            gpu=(GpuSample(allocated=10 * GiB + grown[n], reserved=reserved + grown[n]),),
            host=HostSample(rss=GiB, available=available),
        )
        for n in range(12)
    ]
    hardware = Hardware(gpus=HARDWARE.gpus, nodes=(NodeInfo(id=0, nbytes=128 * GiB),))
    return make_run(phases, [], samples, hardware=hardware)


def test_growing_fragmented_and_low_memory_are_found() -> None:
    assert by_kind(steady()) == {}
    assert "10.1 GiB" in by_kind(steady(grow=GiB // 10))["growth"].text
    assert by_kind(steady(grow=GiB, slows=0.7)) == {}  # 3 GiB, most of them in the first steps
    assert "holds 6.00 GiB more" in by_kind(steady(reserved=16 * GiB))["fragmentation"].text
    assert "down to 1.00 GiB of 128 GiB" in by_kind(steady(available=GiB))["host-memory"].text


def test_slow_steps_are_counted() -> None:
    lengths = [1.0] * 9 + [4.0]
    phases, at = [], 0.0
    for number, seconds in enumerate(lengths):
        phases.append(Phase("forward", number, at, at + seconds))
        at += seconds

    text = by_kind(make_run(phases, [], []))["slow-steps"].text
    assert text == "1 of 9 steps took more than twice the median; step 9 took 4.00 s"


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (offloaded(), "No single bottleneck: GPU compute, the busiest, takes 50 % of"),
        (streamed(), "Bottleneck: GPU compute, busy for 98 % of the 1.50 s step"),
        (on_cpu(), "Bottleneck: the CPU, busy for 70 % of the 200 ms step"),
        (make_run([], [], []), "No steps were recorded"),
        (
            make_run([Phase("x", 0, 0.0, 1.0)], [], []),
            "Step time 1.00 s; the bottleneck is not known",
        ),
    ],
)
def test_the_verdict_is_one_sentence(run: RecordedRun, text: str) -> None:
    assert verdict(measure(run)).startswith(text)


def test_without_a_gpu_there_are_no_findings_about_pcie_or_pinning() -> None:
    kinds = by_kind(offloaded(hardware=replace(HARDWARE, gpus=())))

    assert "waiting" in kinds
    assert not {"pageable", "link-idle"} & set(kinds)


def test_many_callers_of_pageable_copies_are_summed() -> None:
    run = offloaded()
    copies = [e for e in run.events if e.pinned is False]
    more = [
        replace(e, where=f"place {k}", nbytes=10**6 * (k + 1)) for e in copies for k in range(9)
    ]
    pageable = [
        text for text in texts(replace(run, events=(*run.events, *more))) if "pageable" in text
    ]

    assert len(pageable) == 4
    assert "pageable memory: 28.0 MB per step copied by 7 other callers" in pageable


def test_the_gpu_never_waits_for_a_memory_node() -> None:
    run = offloaded()
    sweeps = [e for e in run.events if e.kind == "sweep"]
    nodes = [replace(e, track="node0", link="node0", nbytes=10**9) for e in sweeps]
    m = measure(replace(run, events=(*run.events, *nodes)))

    assert m.waits == pytest.approx(measure(run).waits)
    assert m.bottleneck == measure(run).bottleneck
    assert m.links["node0"].nbytes == 10**9


def test_a_disks_plan_covers_both_directions() -> None:
    both = 12 * (10**9 // 20 + 10**9 // 40)
    kept = streamed(planned=replace(PLANNED, links={"disk:nvme0n1": both}))
    missed = streamed(planned=replace(PLANNED, links={"disk:nvme0n1": both + 1}))

    assert "plan-bytes" not in by_kind(kept)
    assert by_kind(missed)["plan-bytes"].text.startswith("Disk nvme0n1 carried 900 MB per step")


# Waits and overlap.


def without_sweep_events(busy: float = 0.8) -> RecordedRun:
    """Return a run whose CPU optimizer was not recorded: no sweep, but busy cores in update."""
    run = offloaded()
    before = [None, *(sample.phase for sample in run.samples)]
    samples = tuple(
        replace(sample, cpu=(busy if phase == "update" else 0.1,) * 16)
        for sample, phase in zip(run.samples, before, strict=False)
    )
    events = tuple(e for e in run.events if e.kind != "sweep")
    return replace(run, events=events, samples=samples)


def test_an_unexplained_wait_names_its_phase_and_busy_cores() -> None:
    found = of_kind(without_sweep_events(), "waiting")[0]

    # Per step: 0.1 s before the first kernel of backward, and 0.6 s in update.
    assert found.text == (
        "GPU idle for 700 ms per step, cause not recorded: 600 ms in update, "
        "with 13 of 16 CPU cores busy"
    )
    assert found.advice.startswith("Probably an optimizer on the CPU")
    assert found.seconds == pytest.approx(0.7)


def test_few_busy_cores_and_unknown_cores_give_different_advice() -> None:
    alone, unknown = without_sweep_events(busy=0.1), without_sweep_events()
    blind = replace(unknown, samples=tuple(replace(s, cpu=()) for s in unknown.samples))

    assert "with 2 of 16 CPU cores busy" in of_kind(alone, "waiting")[0].text
    assert "main thread" in of_kind(alone, "waiting")[0].advice
    assert of_kind(blind, "waiting")[0].text.endswith("600 ms in update")
    assert of_kind(blind, "waiting")[0].advice.startswith("Possible causes: Python code")


def test_core_load_counts_only_for_the_phase_that_it_covers() -> None:
    """With a sample every 0.7 s, most samples cover two phases and do not count."""
    run = without_sweep_events()
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


def test_an_unexplained_wait_in_two_phases_names_both() -> None:
    run = without_sweep_events()
    events = tuple(e for e in run.events if e.phase != "forward")
    m = measure(replace(run, events=events))

    assert unexplained_idle(m) == pytest.approx({"update": 0.6, "forward": 0.4, "backward": 0.1})
    text = of_kind(replace(run, events=events), "waiting")[0].text
    assert text.endswith(
        "600 ms in update and 400 ms in forward, with 13 of 16 CPU cores busy in update"
    )


def test_copies_during_a_sweep_cost_no_extra_time() -> None:
    """The weights are copied during the sweep, so the sweep is what costs time."""
    run = offloaded()
    events = [
        replace(e, start=e.start - 0.2, end=e.end - 0.2) if e.name == "weights" else e
        for e in run.events
    ]
    found = of_kind(replace(run, events=tuple(events)), "overlap")[0]

    assert found.text == (
        "40 % of copy time hidden behind compute; 300 ms per step not hidden "
        "(200 ms of it during the CPU optimizer sweep)"
    )
    assert (found.level, found.seconds) == ("warn", pytest.approx(0.1))
    quick = [replace(e, end=e.start + 0.2) if e.name == "gradients" else e for e in events]
    assert of_kind(replace(run, events=tuple(quick)), "overlap")[0].level == "note"


def test_pcie_is_not_reported_as_idle_if_nothing_uses_it() -> None:
    run = offloaded()
    tokens = tuple(replace(e, nbytes=1000) if e.link else e for e in run.events)

    assert of_kind(run, "link-idle")
    assert not of_kind(replace(run, events=tokens), "link-idle")


def test_unused_memory_is_not_reported_for_phases_with_few_samples() -> None:
    run = offloaded()
    few = tuple(s for s in run.samples if s.phase != "update" or s.step == 3)
    none = tuple(s for s in few if s.phase != "update" or s.t < 7.6)

    assert "during update" in of_kind(replace(run, samples=few), "trough")[0].text
    assert "during update" not in of_kind(replace(run, samples=none), "trough")[0].text
