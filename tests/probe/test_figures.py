"""Streams, sampling, memory and GPU copies, against links of known speed. Nothing here is timed."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field

import pytest

from penstock import _native
from penstock.machine.sysfs import NodeBytes, System
from penstock.probe import copies, memory
from penstock.probe.measurement import Effort, Progress, take_rate, take_samples, take_time
from penstock.units import GiB, KiB, MiB
from tests.support.probing import NODE, TINY, FakeCopier

# The native streams. Each instruction set is checked byte by byte in tests/native/stream_test.cpp.


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("isa", _native.isa_names())
def test_a_stream_copies_every_byte_and_no_more(isa, threads):
    source = bytearray(os.urandom(70_001))
    for offset, nbytes in itertools.product((0, 1, 63), (1, 64, 4097, 8193, 65_537)):
        target = bytearray(70_001)
        address = _address(target)
        seconds = _native.stream(
            _native.StreamOp.copy,
            address + 5,
            _address(source) + offset,
            nbytes,
            threads,
            [],
            2,
            isa,
        )
        assert target == bytes(5) + source[offset : offset + nbytes] + bytes(70_001 - 5 - nbytes)
        assert len(seconds) == 2


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match="this processor has no mmx"):
        _native.stream(_native.StreamOp.read, 0, 0, 0, 1, [], 1, "mmx")


def _address(buffer: bytearray) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


# Sampling, against links of known rate.


@dataclass
class FakeLink:
    """Moves bytes at a set rate; its first use, as of every cold link, is slow."""

    rate: float
    first: float = 5.0
    runs: list[int] = field(default_factory=list)
    spent: float = 0.0

    def run(self, count: int) -> float:
        seconds = count / self.rate + (self.first if not self.runs else 0.0)
        self.runs.append(count)
        self.spent += seconds
        return seconds


@pytest.mark.parametrize("rate", [33e6, 55.3e9, 4e12])
def test_a_link_of_known_rate_is_reported_at_that_rate(rate):
    figure = take_rate(FakeLink(rate, first=0).run, TINY, unit=MiB, most=GiB)
    assert figure.low == pytest.approx(rate)
    assert figure.median == pytest.approx(rate)
    assert figure.high == pytest.approx(rate)
    assert figure.samples >= 3


def test_warming_up_is_not_counted():
    figure = take_rate(FakeLink(1e9, first=5.0).run, TINY, unit=MiB, most=GiB)
    assert figure.low == pytest.approx(1e9)


def test_time_is_the_other_way_round():
    figure = take_time(FakeLink(10e6, first=0).run, TINY, unit=1000, most=10**6)
    assert figure.median == pytest.approx(100e-9)


def test_spread_is_of_the_samples():
    three = Effort(slice_seconds=0.01, host_bytes=MiB, samples_least=3, samples_most=3)
    rates = iter([1e6, 1e6, 4e9, 1e9, 2e9])  # two to find the length and warm up
    figure = take_rate(lambda n: n / next(rates), three, unit=MiB, most=MiB)
    assert (figure.low, figure.median, figure.high) == pytest.approx((1e9, 2e9, 4e9))


@pytest.mark.parametrize("rate", [1e6, 33e6, 1e9, 1e12])
def test_a_slow_link_takes_its_slice_and_no_more(rate):
    link, effort = FakeLink(rate, first=0), Effort(slice_seconds=0.3, host_bytes=GiB)
    take_samples(link.run, effort, unit=MiB, most=GiB)
    smallest = MiB / rate  # below this no run can be, however slow the link
    assert link.spent <= max(2.5 * effort.slice_seconds, 6 * smallest)


def test_runs_are_whole_units_within_the_limit():
    link = FakeLink(1e9, first=0)
    take_samples(link.run, TINY, unit=3 * KiB, most=100 * KiB)
    assert all(n % (3 * KiB) == 0 and n <= 100 * KiB for n in link.runs)


# Memory.


@dataclass
class FakeStretch:
    """A node that reads at 40, writes at 20 and copies at 10 GB/s a thread, 80 ns away."""

    nbytes: int = 64 * MiB
    broken: str = ""

    def room(self, operation):
        return self.nbytes // 2 if operation == "copy" else self.nbytes

    def stream(self, operation, nbytes, threads):
        if operation == self.broken:
            raise OSError(5, "Input/output error")
        assert nbytes <= self.room(operation)
        return nbytes / ({"read": 40e9, "write": 20e9, "copy": 10e9}[operation] * threads)

    def lay_chase(self, nbytes):
        assert nbytes <= self.nbytes
        return 0.001

    def chase(self, hops):
        return hops * 80e-9


def test_a_node_of_known_speed_is_reported_so():
    progress = Progress(7)
    node = memory.probe_node(NODE, FakeStretch(), (1, 4), TINY, progress)
    measured = {(r.operation, r.threads): r.bytes_per_second.median for r in node.rates}
    assert measured == pytest.approx(
        {
            ("read", 1): 40e9,
            ("read", 4): 160e9,
            ("write", 1): 20e9,
            ("write", 4): 80e9,
            ("copy", 1): 10e9,
            ("copy", 4): 40e9,
        }
    )
    assert node.latency.median == pytest.approx(80e-9)
    assert progress.done == progress.total
    assert progress.notes == []


def test_a_figure_that_cannot_be_taken_becomes_a_note():
    progress = Progress(4)
    node = memory.probe_node(NODE, FakeStretch(broken="write"), (1,), TINY, progress)
    assert [r.operation for r in node.rates] == ["read", "copy"]
    assert progress.notes == ["node 0: write, 1 thread: not measured: [Errno 5] Input/output error"]


def test_thread_counts():
    assert memory.thread_counts(1, quick=False) == (1,)
    assert memory.thread_counts(12, quick=False) == (1, 2, 4, 8, 12)
    assert memory.thread_counts(16, quick=False) == (1, 2, 4, 8, 16)
    assert memory.thread_counts(16, quick=True) == (1, 8, 16)
    assert memory.thread_counts(2, quick=True) == (1, 2)


def test_the_probe_takes_a_quarter_of_what_is_free_at_most():
    class Small(System):
        def node_bytes(self, node):
            return NodeBytes(total=GiB, free=100 * MiB, available=100 * MiB)

    assert memory.spare_bytes(0, GiB, Small()) == 24 * MiB  # whole huge pages
    assert memory.spare_bytes(0, 16 * MiB, Small()) == 16 * MiB


def test_a_slow_node_gets_a_small_buffer():
    slow = Effort(slice_seconds=0.1, host_bytes=GiB)
    assert memory.fit(GiB, slow, lambda nbytes: nbytes / 33e6) == memory.LEAST_BYTES
    assert memory.fit(GiB, slow, lambda nbytes: nbytes / 1e12) == GiB


# GPU copies: their arithmetic needs no GPU.


def test_transfers_count_every_gpu_and_both_directions():
    (both_gpus,) = copies.plan([0, 1], 256 * MiB, quick=True)[2:]
    transfers = list(copies.probe_group(0, both_gpus, FakeCopier(), TINY, Progress(3)))
    rates = {t.direction: t.bytes_per_second.median for t in transfers}
    assert rates == pytest.approx({"h2d": 100e9, "d2h": 100e9, "both": 120e9})
    assert {t.nbytes for t in transfers} == {16 * MiB}  # 256 MiB would not fit twice for two


def test_copies_too_long_for_the_buffers_are_left_out_with_a_note():
    progress = Progress(0)
    (wanted,) = copies.plan([3], GiB, quick=True)
    transfers = list(copies.probe_group(0, wanted, FakeCopier(), TINY, progress))
    assert {t.nbytes for t in transfers} == {MiB, 16 * MiB}
    assert progress.notes[0] == (
        "node 0 and GPU 3: h2d, 256 MiB, 1 stream: not measured: "
        "there is room for 64.0 MiB at a time"
    )


def test_a_full_probe_goes_from_1_mib_to_1_gib():
    (wanted,) = copies.plan([0], 2 * GiB, quick=False)
    assert {c.nbytes for c in wanted} == {MiB, 4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB, GiB}
    assert {c.streams for c in wanted} == {1, 4}


@pytest.mark.gpu
def test_real_copies_arrive_and_are_measured():
    from penstock.machine.discovery import discover

    ordinals = copies.cuda_ordinals(discover().gpus)
    copier = copies.TorchCopier(0, ordinals, 256 * MiB)
    for streams in (1, 2, 4):
        wanted = copies.copies(tuple(ordinals), (MiB, copier.room), (streams,))
        transfers = list(copies.probe_group(0, wanted, copier, TINY, progress := Progress(0)))
        assert progress.notes == []
        assert len(transfers) == len(wanted)
    lane = next(iter(copier._lanes.values()))
    lane._host["h2d"].fill_(7)
    first = next(iter(ordinals))
    copier.seconds(copies.Copy(direction="h2d", gpus=(first,), nbytes=MiB, streams=1), 64)
    assert bool((lane._device["h2d"][: 64 * MiB] == 7).all())
