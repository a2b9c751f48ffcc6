"""fio on the same bytes: the yardstick of bench_storage."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass

from penstock.storage.header import DATA_OFFSET


@dataclass(frozen=True)
class FioRun:
    """Bytes a second, and the share of one CPU that it took."""

    rate: float
    cpu: float


def find_fio() -> str | None:
    return shutil.which("fio")


def fio_version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout


def run_fio(path: str, pattern: str, *, nbytes: int, request: int, depth: int) -> FioRun:
    """One pass, direct, with registered buffers and files, over the store's own bytes."""
    common = [
        "fio", "--output-format=json", "--ioengine=io_uring", "--fixedbufs", "--registerfiles",
        "--direct=1", f"--filename={path}", f"--bs={request}", "--thread", "--invalidate=0",
        "--mem=mmap", "--allow_file_create=0", "--overwrite=1",
        # Nothing that only fio would do: no new patterns in the buffers, no clock per request.
        "--refill_buffers=0", "--scramble_buffers=0", "--gtod_reduce=1",
    ]  # fmt: skip
    if pattern == "mixed":
        # The sweep's mix: one stream reads ahead, another writes behind, half of the depth each.
        half = nbytes // 2
        jobs = _job("read", DATA_OFFSET, half, depth // 2)
        jobs += _job("write", DATA_OFFSET + half, half, depth // 2)
    else:
        jobs = _job(pattern, DATA_OFFSET, nbytes, depth)
    done = subprocess.run([*common, *jobs], capture_output=True, text=True, check=True)
    results = json.loads(done.stdout)["jobs"]
    moved = sum(job[way]["io_bytes"] for job in results for way in ("read", "write"))
    seconds = max(job[way]["runtime"] for job in results for way in ("read", "write")) / 1000
    cpu = sum(job["usr_cpu"] + job["sys_cpu"] for job in results) / 100
    return FioRun(moved / seconds, cpu)


def _job(pattern: str, offset: int, nbytes: int, depth: int) -> list[str]:
    return [
        f"--name={pattern}", f"--rw={pattern}", f"--offset={offset}", f"--size={nbytes}",
        f"--iodepth={depth}",
    ]  # fmt: skip
