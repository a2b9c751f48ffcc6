"""Measure memory placement against its upper bounds, all in one run.

- Allocating and touching a range, relative to touching a plain anonymous mmap with the same threads
  and page size.
- Bytes allocated in addition to the tensor.
- `where`.
- With a GPU: copies from a registered arena relative to torch's pinned memory, the memory that a
  pinned tensor of 1 GiB + 4 KiB uses, and the time of registering and pinning.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import penstock as ps
from bench import bench_copies
from bench.certificate import percentiles, save
from bench.measuring import timed
from penstock import _native
from penstock.machine.sysfs import System
from penstock.units import GiB, MiB, format_bytes, parse_bytes

PAGE = _native.page_nbytes()


def touch_plain(nbytes: int, threads: int, *, huge: bool) -> float:
    """Time the baseline: map a range, then write one byte per page from several threads."""
    range_ = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    range_.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    pages = np.frombuffer(range_, dtype=np.uint8)[::PAGE]
    share = -(-len(pages) // threads)

    def touch(part: int) -> None:
        pages[part * share : (part + 1) * share] = 1

    workers = [threading.Thread(target=touch, args=(part,)) for part in range(threads)]

    def run() -> None:
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()

    return timed(run)


def touch_placed(nbytes: int, *, huge: str | None, place: ps.Node) -> float:
    start = time.perf_counter()
    tensor = ps.empty(nbytes, dtype=torch.uint8, place=place, huge=huge)  # type: ignore[arg-type]
    elapsed = time.perf_counter() - start
    del tensor
    return elapsed


def bench_touch(nbytes: int, repeats: int, place: ps.Node) -> dict[str, object]:
    """Measure the variants in turn, so that a slow moment of the machine affects them all."""
    threads = len(System().nearest_cpus(place.id))
    arms: dict[str, Callable[[], float]] = {
        "plain_4k": lambda: touch_plain(nbytes, threads, huge=False),
        "placed_4k": lambda: touch_placed(nbytes, huge=None, place=place),
        "plain_thp": lambda: touch_plain(nbytes, threads, huge=True),
        "placed_thp": lambda: touch_placed(nbytes, huge="thp", place=place),
    }
    for arm in arms.values():
        arm()  # the first touch of memory on a virtual machine is slower than any later one
    samples_of: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            samples_of[name].append(arm())
    rates = {
        name: percentiles([nbytes / s for s in samples]) for name, samples in samples_of.items()
    }
    ratio = {
        kind: rates[f"placed_{kind}"]["p50"] / rates[f"plain_{kind}"]["p50"]
        for kind in ("4k", "thp")
    }
    return {"nbytes": nbytes, "threads": threads, "bytes_per_second": rates, "ratio": ratio}


def bench_waste(place: ps.Node) -> dict[str, int]:
    worst_tensor = 0
    for nbytes in (1, PAGE, PAGE + 1, MiB + 5, 2 * MiB + 1, 100 * MiB + 4097):
        tensor = ps.empty(nbytes, dtype=torch.uint8, place=place)
        region = _native.Region.at(tensor.data_ptr())
        assert region is not None
        worst_tensor = max(worst_tensor, region.mapped_nbytes - nbytes)
    arena = ps.Arena(64 * MiB, place)
    blocks = [arena.take(nbytes) for nbytes in range(1, 2000, 37)]
    return {
        "tensor_worst_bytes": worst_tensor,
        "arena_worst_bytes_per_block": -(-arena.stats.padding // len(blocks)),
        "page_bytes": PAGE,
    }


def bench_where(nbytes: int, repeats: int, place: ps.Node) -> dict[str, object]:
    timings: dict[str, object] = {"nbytes": nbytes}
    for name, huge in (("4k", None), ("thp", "thp")):
        tensor = ps.empty(nbytes, dtype=torch.uint8, place=place, huge=huge)  # type: ignore[arg-type]
        samples = []
        for _ in range(repeats):
            samples.append(timed(lambda t=tensor: ps.where(t)))  # type: ignore[misc]
        residency = ps.where(tensor)
        assert residency.unmapped == 0
        assert sum(residency.pages.values()) * PAGE == nbytes
        timings[f"seconds_{name}"] = percentiles(samples)
        del tensor
        gc.collect()
    return timings


def show(results: dict[str, dict[str, object]]) -> None:
    touch = results["touch"]
    for name, rate in touch["bytes_per_second"].items():  # type: ignore[attr-defined]
        print(f"{name:11} {rate['p50'] / 1e9:6.2f} GB/s  (p20 {rate['p20'] / 1e9:.2f},"
              f" p80 {rate['p80'] / 1e9:.2f})")  # fmt: skip
    print(f"ratio to plain: {touch['ratio']}")
    print(f"waste: {results['waste']}")
    for name in ("4k", "thp"):
        samples_of = results["where"][f"seconds_{name}"]["p50"]  # type: ignore[index]
        nbytes = results["where"]["nbytes"]
        print(f"where on {format_bytes(nbytes)}, {name}: {samples_of * 1e3:.1f} ms")  # type: ignore[arg-type]
    for name, value in results.get("gpu", {}).items():
        print(f"gpu {name}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nbytes", type=parse_bytes, default=4 * GiB)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--save", action="store_true", help="write a results file to bench/results/"
    )
    options = parser.parse_args()
    place = ps.Node(System().allowed_nodes()[0])
    print(f"{options.nbytes} bytes, {len(os.sched_getaffinity(0))} CPUs, {place}")
    results = {
        "touch": bench_touch(options.nbytes, options.repeats, place),
        "waste": bench_waste(place),
        "where": bench_where(options.nbytes, options.repeats, place),
    }
    if torch.cuda.is_available():
        results["gpu"] = bench_copies.run(place, options.repeats)
    show(results)
    if options.save:
        print(save("placement", results))


if __name__ == "__main__":
    main()
