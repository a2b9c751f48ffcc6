"""Run fio on the bytes of a store, as the baseline of bench_storage."""

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
    """Bytes per second, and CPU time as a fraction of one CPU."""

    rate: float
    cpu: float


def find_fio() -> str | None:
    return shutil.which("fio")


def fio_version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout


WAYS = ("io_uring", "io_uring in batches", "libaio", "psync")
"""I/O engines and settings of fio. The fastest of them is the baseline."""


def run_fio(
    path: str, pattern: str, way: str, *, nbytes: int, request: int, depth: int, huge: bool
) -> FioRun:
    """Run one pass with O_DIRECT over the store's own bytes, with the same queue depth."""
    common = [
        "fio", "--output-format=json", "--direct=1", f"--filename={path}", f"--bs={request}",
        "--thread", "--invalidate=0", "--allow_file_create=0", "--overwrite=1",
        # The store's buffers are in huge pages. Requests from small pages would be split at the
        # device's limit on segments, and the ratio would compare page sizes.
        f"--mem={'mmaphuge' if huge else 'mmap'}",
        # Disable work that only fio does: new patterns in the buffers, a timestamp per request.
        "--refill_buffers=0", "--scramble_buffers=0", "--gtod_reduce=1",
    ]  # fmt: skip
    if pattern == "mixed":
        # The mix of an optimizer sweep: one stream reads ahead and another writes behind, with half
        # of the queue depth each.
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
    """Return the options of one fio job.

    fio's own runtime excludes its setup, so neither side is charged for it.
    """
    job = [f"--name={pattern}", f"--rw={pattern}"]
    if way == "psync":  # one thread per request in flight, each with its part of the bytes
        part = nbytes // depth // request * request
        return [
            *job, "--ioengine=psync", f"--numjobs={depth}", f"--offset={offset}",
            f"--offset_increment={part}", f"--size={part}",
        ]  # fmt: skip
    job += [f"--offset={offset}", f"--size={nbytes}", f"--iodepth={depth}"]
    if way == "libaio":
        return [*job, "--ioengine=libaio"]
    job += ["--ioengine=io_uring", "--fixedbufs", "--registerfiles"]
    # Adjacent requests that are submitted together reach the device as one request.
    return [*job, f"--iodepth_batch={depth // 2}"] if way == "io_uring in batches" else job


@contextlib.contextmanager
def huge_pages(request: int, depth: int) -> Iterator[bool]:
    """Reserve huge pages for fio's buffers; yield whether that succeeded."""
    setting = Path("/proc/sys/vm/nr_hugepages")
    pages = depth * (-(-request // HUGE) + 2)  # psync needs the most: one job per request
    try:
        before = setting.read_text()
        setting.write_text(str(int(before) + pages))
    except OSError:
        yield False
        return
    try:
        yield int(setting.read_text()) >= int(before) + pages
    finally:
        setting.write_text(before)
