"""Memory rates of a simulated node, and the native streams that measure real ones.

tests/native/stream_test.cpp checks each instruction set byte by byte.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import pytest

from penstock import _native
from penstock.machine.sysfs import NodeBytes, System
from penstock.probe import memory
from penstock.probe.measurement import Effort, Progress
from penstock.units import GiB, MiB
from tests.support.probing import NODE, TINY


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("isa", _native.isa_names())
def test_a_stream_copies_exactly_the_given_bytes(isa, threads):
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


def test_an_unknown_instruction_set_is_rejected():
    with pytest.raises(ValueError, match="this processor has no mmx"):
        _native.stream(_native.StreamOp.read, 0, 0, 0, 1, [], 1, "mmx")


def _address(buffer: bytearray) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@dataclass
class FakeBuffer:
    """A node with 80 ns latency that reads at 40, writes at 20 and copies at 10 GB/s per thread."""

    nbytes: int = 64 * MiB
    broken: str = ""

    def max_nbytes(self, operation):
        return self.nbytes // 2 if operation == "copy" else self.nbytes

    def stream(self, operation, nbytes, threads):
        if operation == self.broken:
            raise OSError(5, "Input/output error")
        assert nbytes <= self.max_nbytes(operation)
        return nbytes / ({"read": 40e9, "write": 20e9, "copy": 10e9}[operation] * threads)

    def prepare_chase(self, nbytes):
        assert nbytes <= self.nbytes
        return 0.001

    def chase(self, hops):
        return hops * 80e-9


def test_a_node_of_known_speed_is_reported_at_that_speed():
    progress = Progress(7)
    node = memory.probe_node(NODE, FakeBuffer(), (1, 4), TINY, progress)
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


def test_a_figure_that_cannot_be_measured_becomes_a_note():
    progress = Progress(4)
    node = memory.probe_node(NODE, FakeBuffer(broken="write"), (1,), TINY, progress)
    assert [r.operation for r in node.rates] == ["read", "copy"]
    assert progress.notes == ["node 0: write, 1 thread: not measured: [Errno 5] Input/output error"]


def test_thread_counts_are_powers_of_two_and_all_cpus():
    assert memory.thread_counts(1, quick=False) == (1,)
    assert memory.thread_counts(12, quick=False) == (1, 2, 4, 8, 12)
    assert memory.thread_counts(16, quick=False) == (1, 2, 4, 8, 16)
    assert memory.thread_counts(16, quick=True) == (1, 8, 16)
    assert memory.thread_counts(2, quick=True) == (1, 2)


def test_the_probe_uses_at_most_a_quarter_of_the_free_memory():
    class Small(System):
        def node_bytes(self, node):
            return NodeBytes(total=GiB, free=100 * MiB, available=100 * MiB)

    assert memory.spare_bytes(0, GiB, Small()) == 24 * MiB  # whole huge pages
    assert memory.spare_bytes(0, 16 * MiB, Small()) == 16 * MiB


def test_a_slow_node_gets_a_small_buffer():
    slow = Effort(slice_seconds=0.1, host_bytes=GiB)
    assert memory.fit_buffer(GiB, slow, lambda nbytes: nbytes / 33e6) == memory.MIN_BYTES
    assert memory.fit_buffer(GiB, slow, lambda nbytes: nbytes / 1e12) == GiB
