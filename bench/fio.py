"""fio on the same bytes: the yardstick of bench_storage."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.storage.header import DATA_OFFSET
from penstock.units import MiB

HUGE = 2 * MiB


@dataclass(frozen=True)
class FioRun:
    """Bytes a second, and the share of one CPU that it took."""

    rate: float
    cpu: float


def find_fio() -> str | None:
    return shutil.which("fio")


def fio_version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout


WAYS = ("io_uring", "io_uring in batches", "libaio", "psync")
"""How fio may do it: the best of them is the yardstick."""


def run_fio(
    path: str, pattern: str, way: str, *, nbytes: int, request: int, depth: int, huge: bool
) -> FioRun:
    """One pass, direct, over the store's own bytes, with as many requests in flight."""
    common = [
        "fio", "--output-format=json", "--direct=1", f"--filename={path}", f"--bs={request}",
        "--thread", "--invalidate=0", "--allow_file_create=0", "--overwrite=1",
        # The store's memory is in huge pages: small ones would be cut at the device's limit on
        # segments, and the ratio would compare pages.
        f"--mem={'mmaphuge' if huge else 'mmap'}",
        # Nothing that only fio would do: no new patterns in the buffers, no clock per request.
        "--refill_buffers=0", "--scramble_buffers=0", "--gtod_reduce=1",
    ]  # fmt: skip
    if pattern == "mixed":
        # The sweep's mix: one stream reads ahead, another writes behind, half of the depth each.
        half = nbytes // 2 // request * request
        jobs = _job(way, "read", DATA_OFFSET, half, request, depth // 2)
        jobs += _job(way, "write", DATA_OFFSET + half, half, request, depth // 2)
    else:
        jobs = _job(way, pattern, DATA_OFFSET, nbytes, request, depth)
    done = subprocess.run([*common, *jobs], capture_output=True, text=True, check=True)
    results = json.loads(done.stdout)["jobs"]
    moved = sum(job[kind]["io_bytes"] for job in results for kind in ("read", "write"))
    seconds = max(job[kind]["runtime"] for job in results for kind in ("read", "write")) / 1000
    cpu = sum(job["usr_cpu"] + job["sys_cpu"] for job in results) / 100
    return FioRun(moved / seconds, cpu)


def _job(way: str, pattern: str, offset: int, nbytes: int, request: int, depth: int) -> list[str]:
    """fio's own runtime leaves out its start, so what it needs to set up is not counted."""
    job = [f"--name={pattern}", f"--rw={pattern}"]
    if way == "psync":  # a thread for each request in flight, each with its part of the bytes
        part = nbytes // depth // request * request
        return [
            *job, "--ioengine=psync", f"--numjobs={depth}", f"--offset={offset}",
            f"--offset_increment={part}", f"--size={part}",
        ]  # fmt: skip
    job += [f"--offset={offset}", f"--size={nbytes}", f"--iodepth={depth}"]
    if way == "libaio":
        return [*job, "--ioengine=libaio"]
    job += ["--ioengine=io_uring", "--fixedbufs", "--registerfiles"]
    # Neighbours that are handed over together reach the device as one request.
    return [*job, f"--iodepth_batch={depth // 2}"] if way == "io_uring in batches" else job


@contextlib.contextmanager
def huge_pages(request: int, depth: int) -> Iterator[bool]:
    """Whether fio can have its buffers in huge pages; reserved for as long as they are needed."""
    place = Path("/proc/sys/vm/nr_hugepages")
    wanted = depth * (-(-request // HUGE) + 2)  # one job for each request takes the most
    try:
        before = place.read_text()
        place.write_text(str(int(before) + wanted))
    except OSError:
        yield False
        return
    try:
        yield int(place.read_text()) >= int(before) + wanted
    finally:
        place.write_text(before)
