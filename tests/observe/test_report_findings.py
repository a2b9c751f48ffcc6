"""What a run shows, in words: said where it is so, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.observe.compare import compare
from penstock.observe.findings import Finding, find
from penstock.observe.measures import measure
from penstock.observe.page import verdict
from penstock.observe.records import (
    DRIVER,
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
from tests.observe.made_runs import (
    HARDWARE,
    PLANNED,
    make_run,
    offloaded,
    on_cpu,
    sampled,
    streamed,
)


def found(run: RecordedRun) -> dict[str, Finding]:
    """The first finding of each kind."""
    kinds: dict[str, Finding] = {}
    for finding in find(measure(run)):
        kinds.setdefault(finding.kind, finding)
    return kinds


def texts(run: RecordedRun) -> list[str]:
    return [finding.text for finding in find(measure(run))]


@pytest.mark.parametrize(
    "said",
    [
        "GPU idle for 600 ms per step during the CPU optimizer sweep",
        "GPU idle for 200 ms per step during copies to the GPU",
        "pageable memory: 3.00 GB per step copied by `optimizer.step`",
        "40 % of copy time hidden behind compute; 300 ms per step not hidden",
        "PCIe idle for 100 % of forward, 63 % of backward and 75 % of update",
        "GPU memory: 18.0 GiB unused during update",
    ],
)
def test_an_offloaded_run_shows_what_the_study_saw(said: str) -> None:
    assert said in texts(offloaded())


def test_a_streamed_run_shows_none_of_it() -> None:
    kinds = found(streamed())

    assert not {"waiting", "overlap", "pageable", "link-idle", "plan-bytes", "serial"} & set(kinds)
    assert "hidden behind compute" in kinds["sweep"].text


def test_what_costs_most_comes_first() -> None:
    findings = find(measure(offloaded()))

    levels = [finding.level for finding in findings]
    assert levels == sorted(levels, key=["bad", "warn", "note"].index)
    warned = [finding.seconds for finding in findings if finding.level == "warn"]
    assert warned == sorted(warned, reverse=True)
    assert findings[0].kind == "waiting"


def test_samples_alone_show_the_idle_gpu_and_its_cores() -> None:
    kinds = found(sampled())

    assert kinds["gpu-idle"].text == (
        "GPU idle for 100 % of update, which takes 40 % of a step; CPU cores 100 % busy"
    )
    assert kinds["link-idle"].text.startswith("PCIe idle for 100 % of forward")
    assert "18.0 GiB unused" in kinds["trough"].text


def test_more_than_planned_is_bad_and_bytes_are_compared_to_the_byte() -> None:
    planned = replace(
        PLANNED,
        tiers={**PLANNED.tiers, "dram": PlannedTier(40 * GiB, 36 * GiB, 38 * GiB - 1)},
        links={"h2d": PLANNED.links["h2d"] - 1, "d2h": PLANNED.links["d2h"]},
        step_seconds=1.0,
    )
    kinds = found(streamed(planned=planned))

    assert kinds["plan-peak"].level == "bad"
    assert "1 bytes above" in kinds["plan-peak"].text
    assert "(+1 bytes)" in kinds["plan-bytes"].text
    assert "50 % more" in kinds["plan-time"].text


def test_the_drivers_count_of_an_exact_step_is_set_beside_the_engines() -> None:
    run = streamed()
    again = [
        replace(e, track=DRIVER + e.track, link=None)
        for e in run.events
        if e.step == 4 and e.link in ("h2d", "d2h")
    ]
    tokens = Event(DRIVER + "h2d", "copy", "Memcpy HtoD", 6.0, 6.1, 4, None, None, 1000)
    exact = replace(run, events=(*run.events, *again, tokens))

    said = [finding for finding in find(measure(exact)) if finding.kind == "driver-bytes"]

    assert [finding.level for finding in said] == ["note", "note"]
    assert "+1,000 bytes compared with the engine's" in said[0].text
    assert "+0 bytes" in said[1].text
    assert measure(exact).links == measure(run).links
    lost = replace(exact, events=(*run.events, *again[: len(again) // 2]))
    assert next(f.level for f in find(measure(lost)) if f.kind == "driver-bytes") == "warn"


def test_a_killed_program_and_a_failed_one_are_said_first() -> None:
    killed = find(measure(offloaded(ended_by="signal 9", exit_code=None)))
    failed = find(measure(offloaded(exit_code=3)))

    assert killed[0].text == "the program was ended by signal 9 after 12.0 s, in step 5"
    assert failed[0].text == "the program ended with exit code 3"


def steady(grow: int = 0, available: int = 64 * GiB, reserved: int = 10 * GiB) -> RecordedRun:
    """Twelve steps of a second, of which each may hold more than the last."""
    phases = [Phase("forward", n, float(n), n + 1.0) for n in range(12)]
    samples = [
        Sample(
            t=n + 0.5,
            gpu=(GpuSample(allocated=10 * GiB + n * grow, reserved=reserved + n * grow),),
            host=HostSample(rss=GiB, available=available),
        )
        for n in range(12)
    ]
    hardware = Hardware(gpus=HARDWARE.gpus, nodes=(NodeInfo(id=0, nbytes=128 * GiB),))
    return make_run(phases, [], samples, hardware=hardware)


def test_memory_that_grows_fragments_or_runs_out_is_said() -> None:
    assert found(steady()) == {}
    assert "10.1 GiB" in found(steady(grow=GiB // 10))["growth"].text
    assert "holds 6.00 GiB more" in found(steady(reserved=16 * GiB))["fragmentation"].text
    assert "down to 1.00 GiB of 128 GiB" in found(steady(available=GiB))["host-memory"].text


def test_steps_far_slower_than_the_rest_are_counted() -> None:
    lengths = [1.0] * 9 + [4.0]
    phases, at = [], 0.0
    for number, seconds in enumerate(lengths):
        phases.append(Phase("forward", number, at, at + seconds))
        at += seconds

    said = found(make_run(phases, [], []))["slow-steps"].text
    assert said == "1 of 9 steps took more than twice the median; step 9 took 4.00 s"


@pytest.mark.parametrize(
    ("run", "said"),
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
def test_the_verdict_is_one_sentence(run: RecordedRun, said: str) -> None:
    assert verdict(measure(run)).startswith(said)


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


def test_a_comparison_with_itself_finds_nothing() -> None:
    made = compare(measure(offloaded()), measure(offloaded()))

    assert made.words == ("A and B are equally fast: 2.00 s and 2.00 s per step.",)
    assert {row.judged for row in made.rows} == {""}


def test_a_comparison_of_different_machines_or_of_nothing_says_so() -> None:
    other = compare(measure(offloaded()), measure(on_cpu()))
    nothing = compare(measure(make_run([], [], [])), measure(offloaded()))

    assert any("different hardware" in word for word in other.words)
    assert nothing.words[0] == "No steps were recorded in A: speeds cannot be compared."


def test_without_a_gpu_nothing_is_said_of_pcie_or_of_pinning() -> None:
    kinds = found(offloaded(hardware=replace(HARDWARE, gpus=())))

    assert "waiting" in kinds
    assert not {"pageable", "link-idle"} & set(kinds)


def test_many_causes_of_pageable_copies_are_summed() -> None:
    run = offloaded()
    copies = [e for e in run.events if e.pinned is False]
    more = [
        replace(e, where=f"place {k}", nbytes=10**6 * (k + 1)) for e in copies for k in range(9)
    ]
    said = [text for text in texts(replace(run, events=(*run.events, *more))) if "pageable" in text]

    assert len(said) == 4
    assert "pageable memory: 28.0 MB per step copied by 7 other callers" in said


def test_a_memory_node_is_never_what_is_waited_for() -> None:
    run = offloaded()
    sweeps = [e for e in run.events if e.kind == "sweep"]
    nodes = [replace(e, track="node0", link="node0", nbytes=10**9) for e in sweeps]
    m = measure(replace(run, events=(*run.events, *nodes)))

    assert m.waits == pytest.approx(measure(run).waits)
    assert m.bottleneck == measure(run).bottleneck
    assert m.links["node0"].nbytes == 10**9


def test_a_disks_plan_is_of_both_directions() -> None:
    both = 12 * (10**9 // 20 + 10**9 // 40)
    kept = streamed(planned=replace(PLANNED, links={"disk:nvme0n1": both}))
    missed = streamed(planned=replace(PLANNED, links={"disk:nvme0n1": both + 1}))

    assert "plan-bytes" not in found(kept)
    assert found(missed)["plan-bytes"].text.startswith("Disk nvme0n1 carried 900 MB per step")
