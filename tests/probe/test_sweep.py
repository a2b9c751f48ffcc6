"""Rates of the sweep: what is measured, how it is kept, and which of it a plan uses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from penstock.errors import MachineError, ProbeError
from penstock.machine.machine import Figure, Machine, MemoryRate
from penstock.optim.sweep import LEAF, Pool
from penstock.optim.sweep_rate import Bed
from penstock.planner.cost.rates import Rates
from penstock.probe import plot, sweep
from penstock.probe.measurement import Effort, Progress
from penstock.units import GiB, MiB
from tests.support.machines import machine
from tests.support.probing import NODE, TINY

M = 10**6


@dataclass
class FakeBed:
    """Steps so many parameters a second with each thread, 20 bytes for each."""

    traffic: float = 20.0
    pace: float = 500e6
    passes: list[int] = field(default_factory=list)

    def seconds(self, parameters, threads):
        self.passes.append(parameters)
        return parameters / (self.pace * threads)


# What is measured.


def test_all_sizes_with_all_threads_and_one_size_with_fewer():
    wanted = sweep.plan("fp32", 16 * GiB, (1, 2, 4), quick=False)
    assert [p.parameters for p in wanted if p.threads == 4] == list(sweep.SIZES)
    assert {p for p in wanted if p.threads < 4} == {sweep.Pass(64 * M, 1), sweep.Pass(64 * M, 2)}
    assert (sweep.SIZES[0], sweep.SIZES[-1]) == (M, 1000 * M)


def test_only_what_there_is_room_for():
    sizes = {
        moments: max(p.parameters for p in sweep.plan(moments, 2 * GiB, (1,), quick=False))
        for moments in sweep.MOMENTS
    }
    assert sizes == {"fp32": 64 * M, "bf16": 64 * M, "int8": 256 * M}
    assert sweep.plan("int8", 7 * MiB, (1,), quick=False) == []


def test_a_quick_probe_takes_one_size_with_all_threads():
    assert sweep.plan("bf16", 512 * MiB, (1, 8, 16), quick=True) == [sweep.Pass(16 * M, 16)]


def test_a_bed_of_known_speed_is_reported_so():
    wanted = sweep.plan("bf16", 100 * MiB, (1, 4), quick=False)
    progress, bed = Progress(len(wanted)), FakeBed()
    rates = list(sweep.probe_sweeps(0, "bf16", wanted, (bed, 4 * M), TINY, progress))
    assert {(r.parameters, r.threads): r.bytes_per_second.median for r in rates} == pytest.approx(
        {(4 * M, 1): 10e9, (M, 4): 40e9, (4 * M, 4): 40e9}
    )
    assert {(r.operation, r.moments) for r in rates} == {("sweep", "bf16")}
    assert progress.done == progress.total
    assert set(bed.passes) == {M, 4 * M}


@dataclass
class Workshop:
    """Makes beds: a tenth of a second for each, and a second for so many parameters."""

    per_second: float
    steps_per_second: float = 500e6
    made: list[int] = field(default_factory=list)

    def make(self, parameters):
        self.made.append(parameters)
        return FakeBed(pace=self.steps_per_second)

    def clock(self):
        return sum(0.1 + parameters / self.per_second for parameters in self.made)

    def fit(self, wanted, *, quick):
        effort = Effort(slice_seconds=0.5, host_bytes=GiB)
        return sweep.fit(wanted, effort, self.make, self.clock, quick=quick)


def test_a_bed_that_took_too_long_to_make_is_smaller_with_a_note():
    wanted, shop = sweep.plan("fp32", 16 * GiB, (1,), quick=False), Workshop(5e6)
    bed = shop.fit(wanted, quick=False)
    assert shop.made == [sweep.TRIAL, M, 16 * M, 64 * M]
    assert bed[1] == 64 * M
    progress = Progress(len(wanted))
    rates = list(sweep.probe_sweeps(0, "fp32", wanted, bed, TINY, progress))
    assert [r.parameters for r in rates] == [M, 4 * M, 16 * M, 64 * M]
    assert progress.notes[0].endswith(
        "256 M parameters, 1 thread: not measured: there was time for 64 M"
    )


def test_memory_that_is_slow_to_step_gets_a_smaller_bed_too():
    wanted, shop = sweep.plan("fp32", 16 * GiB, (1,), quick=False), Workshop(1e9, 5e6)
    assert shop.fit(wanted, quick=False)[1] == 16 * M  # in five passes of 3.2 s
    assert max(shop.made) == 16 * M


def test_a_quick_probe_steps_fewer_parameters_on_slow_memory():
    wanted, shop = sweep.plan("fp32", GiB, (1,), quick=True), Workshop(5e6, 5e6)
    _, room = shop.fit(wanted, quick=True)
    assert (wanted, room) == ([sweep.Pass(16 * M, 1)], 4 * M)
    assert sweep.within(wanted, room) == [sweep.Pass(4 * M, 1)]
    assert sweep.within(wanted, 64 * M) == wanted


@pytest.mark.parametrize(("quick", "allowed"), [(True, "10.0 s"), (False, "20.0 s")])
def test_memory_too_slow_for_any_sweep_is_left_after_one_try_and_said(quick, allowed):
    wanted, shop = sweep.plan("fp32", GiB, (1,), quick=quick), Workshop(1e9, 0.2e6)
    with pytest.raises(
        ProbeError, match=rf"1 M parameters would .* 26\.5 s, and may .* {allowed};"
    ):
        shop.fit(wanted, quick=quick)
    assert shop.made == [sweep.TRIAL]


def test_no_room_at_all_is_said():
    with pytest.raises(ProbeError, match=r"it takes 13\.4 MiB, and a quarter of what is free"):
        Workshop(1e9).fit([], quick=True)


@pytest.mark.parametrize("moments", sweep.MOMENTS)
def test_passes_go_on_where_the_last_one_ended(moments):
    bed = sweep.NodeBed(0, moments, 5 * LEAF, (0,))
    before = bed._bed.weight.clone()
    touched = []
    for _ in range(3):
        assert bed.seconds(2 * LEAF - 100, 1) > 0
        moved = (bed._bed.weight != before).nonzero()
        touched.append((int(moved[0]) // LEAF, int(moved[-1]) // LEAF))
        before.copy_(bed._bed.weight)
    assert touched == [(0, 1), (2, 3), (0, 1)]


@pytest.mark.parametrize("moments", sweep.MOMENTS)
def test_a_part_of_a_bed_is_stepped_as_in_the_whole(moments):
    torch.manual_seed(1)
    whole = Bed(4 * LEAF, moments)
    torch.manual_seed(1)
    parts = Bed(4 * LEAF, moments)
    pool = Pool(2)
    whole.step(pool)
    parts.step(pool, at=0, numel=LEAF)
    parts._step = 0
    parts.step(pool, at=LEAF, numel=3 * LEAF)
    for one, other in zip(
        [whole.weight, *whole.moment], [parts.weight, *parts.moment], strict=True
    ):
        assert torch.equal(one, other)


# How it is kept, and which of it a plan uses.


def rate(speed, **more):
    return MemoryRate(operation="sweep", bytes_per_second=Figure.from_number(speed), **more)


def with_rates(*rates: MemoryRate) -> Machine:
    box = machine(cards=0)
    kept = [r for r in box.nodes[0].rates if r.operation != "sweep"]
    return replace(box, nodes=(replace(box.nodes[0], rates=(*kept, *rates)),))


def test_moments_and_parameters_belong_to_sweeps():
    for extra in ({"moments": "fp32"}, {"parameters": 5}):
        with pytest.raises(MachineError, match='belongs to a "sweep", not to a "read"'):
            MemoryRate(operation="read", bytes_per_second=Figure.from_number(1.0), **extra)
    with pytest.raises(MachineError, match='moments: must be "fp32" or "bf16" or "int8"'):
        rate(1.0, moments="fp8")
    with pytest.raises(MachineError, match="parameters: must be 1 or more"):
        rate(1.0, parameters=0)


def test_a_plan_uses_its_formats_longest_sweeps_with_the_best_threads():
    box = with_rates(
        rate(90e9, moments="fp32", parameters=M, threads=4),
        rate(70e9, moments="fp32", parameters=64 * M, threads=4),
        rate(75e9, moments="fp32", parameters=64 * M, threads=2),
        rate(30e9, moments="int8", parameters=64 * M, threads=4),
    )
    assert Rates.of(box).nodes[0].sweep == 75e9
    assert Rates.of(box, "int8").nodes[0].sweep == 30e9
    assert Rates.of(box, "int8").nodes[0].total == Rates.of(box).nodes[0].total == 80e9
    assumed = Rates.of(box, "bf16")
    assert assumed.nodes[0].sweep == pytest.approx(0.91 * 80e9)
    assert any("a sweep at 73 GB/s" in text for text in assumed.assumed)


def test_a_figure_without_a_format_stands_in_for_those_that_have_none():
    box = with_rates(rate(60e9, threads=8), rate(40e9, moments="bf16", parameters=M))
    assert Rates.of(box).nodes[0].sweep == 60e9
    assert Rates.of(box, "bf16").nodes[0].sweep == 40e9


def test_a_picture_has_a_line_for_each_format():
    rates = [rate(1e9, moments=of, parameters=n * M) for of in sweep.MOMENTS for n in (1, 4)]
    slower = rate(5e8, moments="fp32", parameters=4 * M)
    box = Machine(nodes=(replace(NODE, rates=(*(replace(r, threads=2) for r in rates), slower)),))
    panel = plot.sweeps(box)
    assert {name.split()[-2] for name in panel.lines} == set(sweep.MOMENTS)
    assert all(set(line) == {M, 4 * M} for line in panel.lines.values())
    assert plot.memory(box).lines == {}
