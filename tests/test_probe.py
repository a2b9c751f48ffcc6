"""The probe: what it measures is known, and it leaves nothing behind. Nothing here is timed."""

from __future__ import annotations

import io
import itertools
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from penstock import _native
from penstock.errors import ProbeError, UnknownNodeError
from penstock.machine import Machine, MemoryNode
from penstock.probe import ProbeOptions, gpu, memory, plot, probe, session, show, storage
from penstock.probe.crew import Crew
from penstock.probe.progress import Progress
from penstock.probe.sampling import Effort, take_rate, take_samples, take_time
from penstock.probe.scratch import ALIGNMENT, ScratchFile
from penstock.system import NodeBytes, System
from penstock.units import GiB, KiB, MiB

TINY = Effort(slice_seconds=0.004, host_bytes=16 * MiB)
NODE = MemoryNode(id=0, kind="dram", capacity=GiB)


@pytest.fixture
def tiny(monkeypatch):
    """Probes that take a moment and next to no memory or space."""
    monkeypatch.setattr(session, "choose_effort", lambda num_figures, quick: TINY)
    monkeypatch.setattr(storage, "MAX_FILE_BYTES", 4 * MiB)
    monkeypatch.setattr(storage, "FILL_BLOCK", MiB)
    few = tuple(
        storage.Request(op, 64 * KiB, depth) for op in ("write", "read") for depth in (1, 3)
    )
    monkeypatch.setattr(storage, "requests", lambda quick: few)


def probe_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("penstock-probe")]


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

    generous = Effort(slice_seconds=1, host_bytes=GiB)
    assert memory.spare_bytes(0, generous, Small()) == 24 * MiB  # whole huge pages
    assert memory.spare_bytes(0, TINY, Small()) == 16 * MiB


def test_a_full_node_is_left_out_with_a_note(tiny):
    class Full(System):
        def node_bytes(self, node):
            return NodeBytes(total=GiB, free=MiB, available=MiB)

    result = probe(ProbeOptions(quick=True, gpus=False), system=Full())
    assert result.machine.nodes[0].rates == ()
    assert any("node 0: not measured: it takes 8.00 MiB" in note for note in result.notes)


def test_a_slow_node_gets_a_small_buffer():
    slow = Effort(slice_seconds=0.1, host_bytes=GiB)
    assert memory.fit(GiB, slow, lambda nbytes: nbytes / 33e6) == memory.LEAST_BYTES
    assert memory.fit(GiB, slow, lambda nbytes: nbytes / 1e12) == GiB


def test_a_node_that_is_not_there_is_named():
    with pytest.raises(UnknownNodeError, match="there is no node 99"):
        probe(ProbeOptions(nodes=(99,)))


# GPU copies: their arithmetic needs no GPU.


@dataclass
class FakeCopier:
    """Every GPU has its own link of 50 GB/s each way; a node's memory gives 120 GB/s in all."""

    room: int = 64 * MiB

    def seconds(self, copy, count):
        ways = len(copy.gpus) * (2 if copy.direction == "both" else 1)
        return count * ways * copy.nbytes / min(50e9 * ways, 120e9)


def test_transfers_count_every_gpu_and_both_directions():
    (both_gpus,) = gpu.plan([0, 1], 256 * MiB, quick=True)[2:]
    transfers = list(gpu.probe_group(0, both_gpus, FakeCopier(), TINY, Progress(3)))
    rates = {t.direction: t.bytes_per_second.median for t in transfers}
    assert rates == pytest.approx({"h2d": 100e9, "d2h": 100e9, "both": 120e9})
    assert {t.nbytes for t in transfers} == {16 * MiB}  # 256 MiB would not fit twice for two


def test_copies_too_long_for_the_buffers_are_left_out_with_a_note():
    progress = Progress(0)
    (wanted,) = gpu.plan([3], GiB, quick=True)
    transfers = list(gpu.probe_group(0, wanted, FakeCopier(), TINY, progress))
    assert {t.nbytes for t in transfers} == {MiB, 16 * MiB}
    assert progress.notes[0] == (
        "node 0 and GPU 3: h2d, 256 MiB, 1 stream: not measured: "
        "there is room for 64.0 MiB at a time"
    )


def test_a_full_probe_goes_from_1_mib_to_1_gib():
    (wanted,) = gpu.plan([0], 2 * GiB, quick=False)
    assert {c.nbytes for c in wanted} == {MiB, 4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB, GiB}
    assert {c.streams for c in wanted} == {1, 4}


@pytest.mark.gpu
def test_real_copies_arrive_and_are_measured():
    from penstock.discovery import discover

    ordinals = gpu.cuda_ordinals(discover().gpus)
    copier = gpu.TorchCopier(0, ordinals, 256 * MiB)
    for streams in (1, 2, 4):
        wanted = gpu.copies(tuple(ordinals), (MiB, copier.room), (streams,))
        transfers = list(gpu.probe_group(0, wanted, copier, TINY, progress := Progress(0)))
        assert progress.notes == []
        assert len(transfers) == len(wanted)
    lane = next(iter(copier._lanes.values()))
    lane._host["h2d"].fill_(7)
    first = next(iter(ordinals))
    copier.seconds(gpu.Copy(direction="h2d", gpus=(first,), nbytes=MiB, streams=1), 64)
    assert bool((lane._device["h2d"][: 64 * MiB] == 7).all())


# Storage.


class FakeDisk:
    """One request at a time, at a set rate, by its own clock."""

    def __init__(self, rate: float) -> None:
        self.rate, self.now, self.written = rate, 0.0, set()
        self.lock = threading.Lock()

    def clock(self):
        return self.now

    def read(self, into, offset):
        assert offset in self.written, "reads what was never written"
        with self.lock:
            self.now += len(into) / self.rate

    def write(self, data, offset):
        self.written |= set(range(offset, offset + len(data), 64 * KiB))
        with self.lock:
            self.now += len(data) / self.rate

    def finish_writes(self):
        pass

    def forget(self):
        pass


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_disk_of_known_rate_is_reported_at_that_rate(operation, depth):
    disk, request = FakeDisk(2.5e9), storage.Request(operation, 64 * KiB, depth)
    with storage.Bench(disk, [request], disk.clock) as bench:
        bench.fill(64 * MiB, 1.0)
        figure = bench.rate(request, TINY)
    # With several threads the clock may move on between a start and its first request.
    assert figure.median == pytest.approx(2.5e9, rel=0.05 if depth == 1 else 0.3)


def test_a_slow_disk_gets_a_small_file():
    disk, request = FakeDisk(10e6), storage.Request("read", MiB, 32)
    with storage.Bench(disk, [request], disk.clock) as bench:
        bench.fill(GiB, 1.0)
        assert bench.nbytes == 16 * MiB
        with pytest.raises(ProbeError, match=r"needs 32.0 MiB at once, and the file has 16.0 MiB"):
            bench.rate(request, TINY)


def test_the_file_takes_a_twentieth_of_the_free_space_at_most(tmp_path, monkeypatch):
    stats = os.statvfs(tmp_path)
    assert storage.room(tmp_path) <= min(GiB, stats.f_bavail * stats.f_frsize / 20)
    monkeypatch.setattr(storage, "MAX_SHARE", 0.0)
    progress = Progress(0)
    result = probe_storage(tmp_path, progress)
    assert result is None
    assert "less than 1 MiB" in progress.notes[0]


def probe_storage(directory: Path, progress: Progress):
    from penstock.machine import StoragePath

    path, wanted = StoragePath(path=str(directory)), storage.requests(quick=True)
    return progress.attempt("it", lambda: storage.probe_path(path, wanted, TINY, progress))


@pytest.mark.parametrize("where", ["tmp_path", "/dev/shm"])
def test_storage_is_measured_and_nothing_stays(where, tmp_path, tiny):
    directory = tmp_path if where == "tmp_path" else Path(where)
    if not os.access(directory, os.W_OK):
        pytest.skip(f"{directory} is not there")
    before = set(directory.iterdir())
    progress = Progress(4)
    path = probe_storage(directory, progress)
    assert [(r.operation, r.depth) for r in path.rates] == [
        ("write", 1), ("write", 3), ("read", 1), ("read", 3),
    ]  # fmt: skip
    assert path.direct or any("no direct I/O" in note for note in progress.notes)
    assert set(directory.iterdir()) == before
    assert probe_threads() == []


def test_a_file_is_no_place_to_measure(tmp_path, tiny):
    (tmp_path / "disk.img").write_bytes(b"precious")
    progress = Progress(0)
    assert probe_storage(tmp_path / "disk.img", progress) is None
    assert progress.notes == [
        "it: not measured: it is not a directory, and the probe writes to nothing else"
    ]
    assert (tmp_path / "disk.img").read_bytes() == b"precious"


def test_a_file_system_without_direct_io_is_measured_too(tmp_path, tiny, monkeypatch):
    real = os.open

    def no_direct(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", no_direct)
    progress = Progress(4)
    path = probe_storage(tmp_path, progress)
    assert path.direct is False
    assert len(path.rates) == 4
    assert "no direct I/O on this file system" in progress.notes[0]


def test_without_nameless_files_the_name_is_gone_at_once(tmp_path, monkeypatch):
    real, opened = os.open, []

    def no_tmpfile(path, flags, *rest):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        opened.append(path)
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", no_tmpfile)
    with ScratchFile(tmp_path) as file:
        assert opened
        assert list(tmp_path.iterdir()) == []
        block = storage._noise(ALIGNMENT)
        file.write(block, 0)
        back = storage._noise(ALIGNMENT)
        file.read(back, 0)
        assert back == block
        with pytest.raises(ProbeError, match="the file ends at 4096"):
            file.read(back, ALIGNMENT)


def test_a_failing_request_stops_the_rest_and_is_the_one_reported():
    done = []

    def request(worker, offset):
        if offset == 5:
            raise OSError(5, "Input/output error")
        done.append(offset)

    import time

    with Crew(4, time.perf_counter) as crew:
        with pytest.raises(OSError, match="Input/output error"):
            crew.run(request, range(10_000_000), 4)
        assert len(done) < 10_000_000
        crew.run(lambda worker, offset: None, range(10), 4)  # and the crew goes on
    assert probe_threads() == []


# The whole.


def test_a_probe_comes_back_from_its_file(tmp_path, tiny):
    seen = []
    options = ProbeOptions(quick=True, storage=(tmp_path,), gpus=False)
    result = probe(options, lambda done, total, text: seen.append((done, total, text)))
    (node, *_) = result.machine.nodes
    assert {r.operation for r in node.rates} == {"read", "write", "copy"}
    assert node.latency is not None
    assert len(result.machine.storage[0].rates) == 4
    result.machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == result.machine
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


def test_tables_and_picture(tmp_path, tiny):
    result = probe(ProbeOptions(quick=True, storage=(tmp_path,), gpus=False))
    with_gpu = _with_transfers(result)
    text = _in_80_columns(with_gpu)
    for word in ("Memory", "latency", "GB/s", "h2d", "both", "Storage", "note: a note", "±"):
        assert word in text
    assert "…" not in text  # rich's sign for a cell cut short
    plot.save_plot(with_gpu.machine, tmp_path / "probe.png")
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")


def _in_80_columns(result) -> str:
    paper = io.StringIO()
    Console(width=80, file=paper).print(show.tables(result), soft_wrap=False)
    return paper.getvalue()


def _with_transfers(result):
    from dataclasses import replace

    from penstock.machine import Gpu

    (wanted,) = gpu.plan([0], GiB, quick=True)
    transfers = tuple(gpu.probe_group(0, wanted, FakeCopier(room=GiB), TINY, Progress(0)))
    machine = replace(result.machine, gpus=(Gpu(index=0),), transfers=transfers)
    return replace(result, machine=machine, notes=("a note",))


def test_nothing_to_plot_is_said():
    with pytest.raises(ProbeError, match="nothing was measured"):
        plot.save_plot(Machine(nodes=(NODE,)), Path("never.png"))


def test_the_probe_of_memory_and_storage_needs_no_torch():
    code = "import sys, penstock.probe, penstock.probe.show; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Ends that come early.


def test_ctrl_c_leaves_no_thread_and_no_file(tmp_path, tiny):
    def interrupt(done, total, text):
        if "read" in text and str(tmp_path) in text:
            raise KeyboardInterrupt

    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        probe(ProbeOptions(quick=True, storage=(tmp_path,), gpus=False), interrupt)
    assert probe_threads() == []
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


PROBE_UNTIL_STOPPED = """
import sys
from pathlib import Path
from penstock.probe import ProbeOptions, probe

def say(done, total, text):
    print(text, flush=True)

try:
    while True:
        probe(ProbeOptions(quick=True, storage=(Path(sys.argv[1]),), nodes=(), gpus=False), say)
except KeyboardInterrupt:
    import threading
    print("left:", [t.name for t in threading.enumerate() if t is not threading.main_thread()])
    sys.exit(130)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_process_leaves_nothing(how, tmp_path):
    command = [sys.executable, "-c", PROBE_UNTIL_STOPPED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "read, 64.0 KiB x 8" in line:  # in the middle, threads at work
                process.send_signal(how)
                break
        rest, _ = process.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "left: []" in rest
