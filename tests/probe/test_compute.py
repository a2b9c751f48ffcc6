"""Compute rates of simulated GPUs; one test needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.machine.machine import Gpu, Machine
from penstock.machine.sysfs import System
from penstock.probe import ProbeOptions, compute, copies, session
from penstock.probe.measurement import Effort, Progress
from penstock.units import GiB
from tests.probe.conftest import PROCESS
from tests.support.probing import NODE, TINY, FakeGpuBenchmark


def test_a_gpu_gets_the_figures_that_the_planner_needs():
    measured = compute.probe_gpu(Gpu(index=2), FakeGpuBenchmark(), TINY, Progress(5))
    assert measured.matmul_flops.median == pytest.approx(100e12)
    assert measured.block_flops.median == pytest.approx(60e12)
    assert measured.compiled_flops.median == pytest.approx(70e12)
    assert measured.attention_flops.median == pytest.approx(50e12)
    assert measured.memory_bandwidth.median == pytest.approx(1e12)
    assert measured.index == 2


def test_a_quick_probe_does_not_compile():
    measured = compute.probe_gpu(
        Gpu(index=0), FakeGpuBenchmark(), TINY, progress := Progress(4), quick=True
    )
    assert measured.compiled_flops is None
    assert measured.attention_flops is not None
    assert progress.done == 4


def test_a_figure_that_cannot_be_measured_is_skipped_with_a_note():
    lacking = FakeGpuBenchmark(lacks="block_flops")
    measured = compute.probe_gpu(Gpu(index=0), lacking, TINY, progress := Progress(5))
    assert measured.block_flops is None
    assert measured.memory_bandwidth is not None
    assert progress.notes == ["GPU 0: block flops: not measured: out of memory"]
    assert progress.done == 5


def test_a_probe_measures_every_gpu_that_cuda_lists(monkeypatch):
    monkeypatch.setattr(copies, "cuda_ordinals", lambda gpus: {1: 0})
    monkeypatch.setattr(compute, "TorchGpuBenchmark", lambda ordinal: FakeGpuBenchmark())
    machine = Machine(nodes=(NODE,), gpus=(Gpu(index=0), Gpu(index=1)))
    probe_session = session.Session(machine, ProbeOptions(quick=True, nodes=()), System())
    monkeypatch.setattr(probe_session, "effort", lambda num_figures: TINY)

    measured, notes = probe_session.run()

    assert probe_session.num_figures == 9
    assert measured.process_memory == PROCESS
    assert measured.gpus[0] == Gpu(index=0)
    assert measured.gpus[1].matmul_flops.median == pytest.approx(100e12)
    assert notes == (
        "GPU 0: not measured: CUDA does not list it in this process; check CUDA_VISIBLE_DEVICES",
    )


def test_the_measured_layer_performs_the_counted_operations():
    layer = compute.Layer(hidden=64, inside=160, heads=4, key_value_heads=2, context=32)
    weights = {name: torch.randn(shape, requires_grad=True) for name, shape in layer.widths.items()}
    hidden_in = torch.randn(2, 32, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = compute.forward(layer, weights, hidden_in)
        torch.autograd.grad(out.sum(), [hidden_in, *weights.values()])
    assert out.shape == hidden_in.shape

    # The counter misses the CPU's attention kernel: the causal half of two matrix products in
    # forward, and of five in backward.
    attention = 2 * 32 * (1 + 2.5) * 4 * 64 * (32 // 2)
    assert counter.get_total_flops() == layer.operations(2) - attention


@pytest.mark.parametrize("compiled", [False, True])
def test_the_measured_workloads_run(compiled, monkeypatch):
    """Run them on the CPU, without a compiler."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    layer = compute.Layer(hidden=64, inside=160, heads=4, key_value_heads=2, context=32)
    cpu = torch.device("cpu")

    compute._layer(layer, 1, cpu, compiled=compiled)()
    compute._attention(layer, 64, cpu)()

    attention = layer.operations(1) - 3 * 2 * 32 * sum(a * b for a, b in layer.widths.values())
    assert layer.attention_operations(32) == attention


@pytest.mark.gpu
def test_a_real_gpu_computes_at_a_plausible_rate():
    from penstock.machine.discovery import discover

    gpus = discover().gpus
    index, ordinal = next(iter(copies.cuda_ordinals(gpus).items()))
    card = next(g for g in gpus if g.index == index)
    effort = Effort(slice_seconds=0.3, host_bytes=GiB)
    benchmark = compute.TorchGpuBenchmark(ordinal)
    measured = compute.probe_gpu(card, benchmark, effort, progress := Progress(5))
    assert progress.notes == []
    for what in ("matmul", "block", "compiled", "attention"):  # no GPU is slower or faster
        assert 1e12 < getattr(measured, f"{what}_flops").median < 1e16, what
    assert 1e11 < measured.memory_bandwidth.median < 1e14
