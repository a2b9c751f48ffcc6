"""Rates of the optimizer sweep: how they are measured, and which ones a plan uses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from penstock.errors import MachineError, ProbeError
from penstock.machine.machine import Figure, Machine, MemoryRate
from penstock.optim.sweep import LEAF, Pool
from penstock.optim.sweep_benchmark import SweepBuffers
from penstock.planner.cost.rates import Rates
from penstock.probe import plot, sweep
from penstock.probe.measurement import Effort, Progress
from penstock.units import GiB, MiB
from tests.support.machines import machine
from tests.support.probing import NODE, TINY

M = 10**6


@dataclass
class FakeSweepBuffers:
    """Updates `pace` parameters per second and thread, with 20 bytes of traffic per parameter."""

    traffic: float = 20.0
    pace: float = 500e6
    passes: list[int] = field(default_factory=list)

    def seconds(self, parameters, threads):
        self.passes.append(parameters)
        return parameters / (self.pace * threads)


def test_a_full_probe_measures_all_sizes_with_all_threads():
    wanted = sweep.plan("fp32", 16 * GiB, (1, 2, 4), quick=False)
    assert [p.parameters for p in wanted if p.threads == 4] == list(sweep.SIZES)
    assert {p for p in wanted if p.threads < 4} == {
        sweep.SweepPass(64 * M, 1),
        sweep.SweepPass(64 * M, 2),
    }
    assert (sweep.SIZES[0], sweep.SIZES[-1]) == (M, 1000 * M)


def test_sizes_that_do_not_fit_in_memory_are_skipped():
    sizes = {
        moments: max(p.parameters for p in sweep.plan(moments, 2 * GiB, (1,), quick=False))
        for moments in sweep.MOMENTS
    }
    assert sizes == {"fp32": 64 * M, "bf16": 64 * M, "int8": 256 * M}
    assert sweep.plan("int8", 7 * MiB, (1,), quick=False) == []


def test_a_quick_probe_measures_one_size_with_all_threads():
    assert sweep.plan("bf16", 512 * MiB, (1, 8, 16), quick=True) == [sweep.SweepPass(16 * M, 16)]


def test_buffers_of_known_speed_are_reported_at_that_speed():
    wanted = sweep.plan("bf16", 100 * MiB, (1, 4), quick=False)
    progress, buffers = Progress(len(wanted)), FakeSweepBuffers()
    rates = list(sweep.probe_sweeps(0, "bf16", wanted, (buffers, 4 * M), TINY, progress))
    assert {(r.parameters, r.threads): r.bytes_per_second.median for r in rates} == pytest.approx(
        {(4 * M, 1): 10e9, (M, 4): 40e9, (4 * M, 4): 40e9}
    )
    assert {(r.operation, r.moments) for r in rates} == {("sweep", "bf16")}
    assert progress.done == progress.total
    assert set(buffers.passes) == {M, 4 * M}


@dataclass
class FakeAllocator:
    """Creates buffers in 0.1 s plus a second for every `per_second` parameters."""

    per_second: float
    steps_per_second: float = 500e6
    sizes: list[int] = field(default_factory=list)

    def create(self, parameters):
        self.sizes.append(parameters)
        return FakeSweepBuffers(pace=self.steps_per_second)

    def clock(self):
        return sum(0.1 + parameters / self.per_second for parameters in self.sizes)

    def fit(self, wanted, *, quick):
        effort = Effort(slice_seconds=0.5, host_bytes=GiB)
        return sweep.find_largest(wanted, effort, self.create, self.clock, quick=quick)


def test_buffers_that_are_slow_to_allocate_are_smaller():
    wanted, allocator = sweep.plan("fp32", 16 * GiB, (1,), quick=False), FakeAllocator(5e6)
    buffers = allocator.fit(wanted, quick=False)
    assert allocator.sizes == [sweep.TRIAL_SIZE, M, 16 * M, 64 * M]
    assert buffers[1] == 64 * M
    progress = Progress(len(wanted))
    rates = list(sweep.probe_sweeps(0, "fp32", wanted, buffers, TINY, progress))
    assert [r.parameters for r in rates] == [M, 4 * M, 16 * M, 64 * M]
    assert progress.notes[0].endswith(
        "256 M parameters, 1 thread: not measured: time only allowed for 64 M"
    )


def test_buffers_that_are_slow_to_update_are_smaller():
    wanted, allocator = sweep.plan("fp32", 16 * GiB, (1,), quick=False), FakeAllocator(1e9, 5e6)
    assert allocator.fit(wanted, quick=False)[1] == 16 * M  # five passes of 3.2 s each
    assert max(allocator.sizes) == 16 * M


def test_a_quick_probe_updates_fewer_parameters_in_slow_memory():
    wanted, allocator = sweep.plan("fp32", GiB, (1,), quick=True), FakeAllocator(5e6, 5e6)
    _, capacity = allocator.fit(wanted, quick=True)
    assert (wanted, capacity) == ([sweep.SweepPass(16 * M, 1)], 4 * M)
    assert sweep.limit_passes(wanted, capacity) == [sweep.SweepPass(4 * M, 1)]
    assert sweep.limit_passes(wanted, 64 * M) == wanted


@pytest.mark.parametrize(("quick", "allowed"), [(True, "10.0 s"), (False, "20.0 s")])
def test_memory_too_slow_for_any_sweep_is_skipped_after_one_trial(quick, allowed):
    wanted, allocator = sweep.plan("fp32", GiB, (1,), quick=quick), FakeAllocator(1e9, 0.2e6)
    with pytest.raises(
        ProbeError, match=rf"1 M parameters would .* 26\.5 s, longer than the {allowed} allowed;"
    ):
        allocator.fit(wanted, quick=quick)
    assert allocator.sizes == [sweep.TRIAL_SIZE]


def test_too_little_memory_is_reported():
    with pytest.raises(ProbeError, match=r"it needs 13\.4 MiB, and a quarter of the free"):
        FakeAllocator(1e9).fit([], quick=True)


@pytest.mark.parametrize("moments", sweep.MOMENTS)
def test_each_pass_continues_where_the_last_one_ended(moments):
    buffers = sweep.NodeSweepBuffers(0, moments, 5 * LEAF, (0,))
    before = buffers._buffers.weight.clone()
    touched = []
    for _ in range(3):
        assert buffers.seconds(2 * LEAF - 100, 1) > 0
        moved = (buffers._buffers.weight != before).nonzero()
        touched.append((int(moved[0]) // LEAF, int(moved[-1]) // LEAF))
        before.copy_(buffers._buffers.weight)
    assert touched == [(0, 1), (2, 3), (0, 1)]


@pytest.mark.parametrize("moments", sweep.MOMENTS)
def test_updating_in_parts_equals_updating_everything(moments):
    torch.manual_seed(1)
    whole = SweepBuffers(4 * LEAF, moments)
    torch.manual_seed(1)
    parts = SweepBuffers(4 * LEAF, moments)
    pool = Pool(2)
    whole.step(pool)
    parts.step(pool, at=0, numel=LEAF)
    parts._step = 0
    parts.step(pool, at=LEAF, numel=3 * LEAF)
    for sweep_pass, other in zip(
        [whole.weight, *whole.moment], [parts.weight, *parts.moment], strict=True
    ):
        assert torch.equal(sweep_pass, other)


def rate(speed, **more):
    return MemoryRate(operation="sweep", bytes_per_second=Figure.from_number(speed), **more)


def with_rates(*rates: MemoryRate) -> Machine:
    box = machine(cards=0)
    others = [r for r in box.nodes[0].rates if r.operation != "sweep"]
    return replace(box, nodes=(replace(box.nodes[0], rates=(*others, *rates)),))


def test_moments_and_parameters_belong_to_sweeps():
    for extra in ({"moments": "fp32"}, {"parameters": 5}):
        with pytest.raises(MachineError, match='belongs to a "sweep", not to a "read"'):
            MemoryRate(operation="read", bytes_per_second=Figure.from_number(1.0), **extra)
    with pytest.raises(MachineError, match='moments: must be "fp32" or "bf16" or "int8"'):
        rate(1.0, moments="fp8")
    with pytest.raises(MachineError, match="parameters: must be 1 or more"):
        rate(1.0, parameters=0)


def test_a_plan_uses_the_longest_sweeps_of_its_format_with_the_best_threads():
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
    assert any("optimizer sweep at 73 GB/s" in text for text in assumed.assumed)


def test_a_rate_without_a_format_is_used_for_formats_without_a_rate():
    box = with_rates(rate(60e9, threads=8), rate(40e9, moments="bf16", parameters=M))
    assert Rates.of(box).nodes[0].sweep == 60e9
    assert Rates.of(box, "bf16").nodes[0].sweep == 40e9


def test_the_plot_has_a_line_for_each_format():
    rates = [rate(1e9, moments=of, parameters=n * M) for of in sweep.MOMENTS for n in (1, 4)]
    slower = rate(5e8, moments="fp32", parameters=4 * M)
    box = Machine(nodes=(replace(NODE, rates=(*(replace(r, threads=2) for r in rates), slower)),))
    panel = plot.sweeps(box)
    assert {name.split()[-2] for name in panel.lines} == set(sweep.MOMENTS)
    assert all(set(line) == {M, 4 * M} for line in panel.lines.values())
    assert plot.memory(box).lines == {}
