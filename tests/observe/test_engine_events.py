"""Recordings of Penstock engines agree with their schedules and plans."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock
from penstock.engine import step_records
from penstock.machine import discovery
from penstock.machine.probe_cache import save_probe
from penstock.observe import engine_events
from penstock.observe.hardware import disk_name
from penstock.observe.records import OBSERVING, RecordedRun
from penstock.observe.run_files import read_run
from penstock.observe.steps import find_steps
from penstock.plan.budget import Budget
from penstock.plan.build_schedule import step_schedule
from penstock.plan.traffic import step_traffic
from penstock.planner import QUICK, make_plan
from penstock.tiers import Tier
from penstock.units import GiB
from tests.equivalence.runs import DRAM, WAYS, Setup, Way
from tests.support.machines import machine
from tests.support.models import llama, work

STEPS = 5


def observed(setup: Setup, way: Way, disk: Path, out: Path) -> RecordedRun:
    with setup.engine(way, disk) as engine, penstock.observe(out):
        for batch in setup.batches(STEPS):
            engine.step(batch)
        engine.evaluate(setup.batches(1))
    return read_run(out)


@pytest.mark.parametrize("way", [WAYS[3], WAYS[8]], ids=lambda way: way.name)
def test_bytes_per_link_and_step_match_the_schedule(way: Way, tmp_path: Path) -> None:
    setup = Setup.of("llama")
    disk = tmp_path / "disk"
    disk.mkdir()

    run = observed(setup, way, disk, tmp_path / "run")

    placement = setup.plan(way, disk).placement
    names = {f"disk:{disk}": f"disk:{disk_name(str(disk))}"}
    for step in range(1, STEPS + 1):
        schedule = step_schedule(setup.model, placement, pending=step > 1)
        wanted = step_traffic(setup.model, setup.work, placement, schedule)
        seen: Counter[str] = Counter()
        for event in run.events:
            if event.step == step and event.link is not None and event.nbytes is not None:
                seen[event.link] += event.nbytes

        assert seen == {names.get(link, link): nbytes for link, nbytes in wanted.items()}, step
    full = step_schedule(setup.model, placement)
    links = step_traffic(setup.model, setup.work, placement, full)
    planned = run.observation.planned
    assert planned is not None
    assert planned.links == {names.get(link, link): nbytes for link, nbytes in links.items()}


def test_an_exact_step_is_kept_and_profiler_time_belongs_to_no_step(tmp_path: Path) -> None:
    setup, steps = Setup.of("llama"), 12
    with setup.engine(DRAM, tmp_path) as engine, penstock.observe(tmp_path / "run", exact=[6]):
        for batch in setup.batches(steps):
            engine.step(batch)
    run = read_run(tmp_path / "run")

    assert {e.track for e in run.events if e.step == 6 and e.link} >= {"h2d", "d2h"}
    pauses = [phase for phase in run.phases if phase.name == OBSERVING]
    assert len(pauses) == 2
    step = {step.number: step for step in find_steps(run)}
    assert step[5].end <= pauses[0].start < pauses[0].end <= step[6].start
    assert step[6].end <= pauses[1].start < pauses[1].end <= step[7].start


def test_phases_plan_and_tiers_come_from_the_engine(tmp_path: Path) -> None:
    setup = Setup.of("llama")
    gc.collect()  # engines of other tests

    run = observed(setup, DRAM, tmp_path, tmp_path / "run")

    names = [(phase.name, phase.step) for phase in run.phases]
    expected = [(name, step) for step in range(1, STEPS + 1) for name in ("forward", "backward")]
    assert names == [*expected, ("update", STEPS), ("evaluate", STEPS)]
    assert all(a.end <= b.start for a, b in zip(run.phases, run.phases[1:], strict=False))
    plan, planned = setup.plan(DRAM, tmp_path), run.observation.planned
    assert planned is not None
    assert planned.tiers["dram"].peak == plan.peak(Tier.DRAM)
    tiers = [sample.tiers for sample in run.samples]
    assert tiers[0]["dram"] == plan.peak(Tier.DRAM)  # before the first step has ended
    assert 0 < tiers[0]["hbm"] <= plan.peak(Tier.HBM)
    assert planned.host == plan.host_nbytes
    assert tiers == tiers[:1] * len(tiers)
    assert planned.phases.keys() == {"forward", "backward", "update"}
    assert planned.step_seconds is not None
    assert planned.bound_by


def test_compute_events_are_on_one_track_and_inside_their_phase(tmp_path: Path) -> None:
    setup = Setup.of("llama")

    run = observed(setup, DRAM, tmp_path, tmp_path / "run")

    spans = {(phase.name, phase.step): phase for phase in run.phases}
    computed = [event for event in run.events if event.kind == "compute"]
    assert len(computed) == STEPS * (2 * len(setup.model.blocks) - 1)
    for event in computed:
        assert event.track == "gpu"
        within = spans[str(event.phase), event.step]
        assert within.start - 1e-6 <= event.start <= event.end <= within.end + 1e-6


def test_no_watcher_is_left_after_observing(tmp_path: Path) -> None:
    with penstock.observe(tmp_path / "run"):
        pass

    assert step_records._observers == []


def test_the_planned_cost_uses_the_speeds_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speeds are those of the cached probe, of compiled layers if layers are compiled."""
    probed = machine(cards=0)
    bare = replace(probed, nodes=tuple(replace(n, rates=()) for n in probed.nodes), transfers=())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_probe(probed)
    monkeypatch.setattr(discovery, "discover", lambda storage=(): bare)
    model = llama("3m", 256, 768, 3, 256, 64, 2048, False)
    for compiled in (False, True):
        workload = work(model, 64, 8)
        numerics = replace(workload.numerics, compiled=compiled)
        workload = replace(workload, numerics=numerics)
        budget = Budget(hbm=2 * GiB, dram=GiB)
        planned = make_plan(model, workload, budget, probed, effort=QUICK)
        device = SimpleNamespace(torch_device=torch.device("cuda"))
        record: Any = SimpleNamespace(plan=planned.plan, inventory=model, device=device)

        predicted = engine_events._predicted_cost(record)

        assert predicted == (planned.cost.step_seconds, planned.cost.bound_by)
