"""Measure the store against the fastest fio setting: same file, block size and depth, in one run.

    python bench/bench_storage.py --path /mnt/nvme0 [--device] [--nbytes 1GiB] [--passes 8]

Prints rates and ratios of both I/O engines for reading, writing and the mix of an optimizer sweep,
and the CPU time, page cache and memory that they used. Writes
bench/results/storage_<hardware>_<date>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.certificate import commit, hardware
from bench.deepspeed_aio import DeepSpeedAio
from bench.fio import WAYS, find_fio, fio_version, huge_pages, run_fio
from penstock import _native
from penstock.storage.benchmark import PATTERNS, StorageBench
from penstock.storage.engines import choose_engine
from penstock.storage.header import DATA_OFFSET
from penstock.storage.store import Store, StoreOptions
from penstock.units import KiB, MiB, format_bytes, parse_bytes

REPO = Path(__file__).parents[1]
CHUNK = 8 * MiB
LANES = 4


@dataclass
class Row:
    """Samples of one setting, in bytes per second. The store and fio take turns."""

    target: str
    engine: str
    pattern: str
    request_nbytes: int
    depth: int
    ours: list[float] = field(default_factory=list)
    verified: list[float] = field(default_factory=list)
    verified_cpu: list[float] = field(default_factory=list)
    ours_cpu: list[float] = field(default_factory=list)
    fio: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    """Samples of each fio setting."""
    deepspeed: list[float] = field(default_factory=list)
    """Samples of DeepSpeed's aio handle, if it was measured."""
    fio_cpu: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    @property
    def best_way(self) -> str:
        return max(WAYS, key=lambda way: statistics.median(self.fio[way]))

    @property
    def verify_cost(self) -> float:
        return 1 - statistics.median(self.verified) / statistics.median(self.ours)


@dataclass
class Memory:
    """Memory that the passes over one target used."""

    target: str
    cached_nbytes: int
    """Bytes of the file in the page cache."""
    grown_nbytes: int
    """Growth of the process, without its arenas, from the first pass to the last."""


def main() -> None:
    args = arguments()
    if find_fio() is None:
        sys.exit("fio is not installed; on Debian and Ubuntu: apt install fio")
    rows: list[Row] = []
    memories: list[Memory] = []
    targets = [("file", args.path)]
    with contextlib.ExitStack() as stack:
        args.huge = stack.enter_context(huge_pages(max(args.requests), args.depth))
        if not args.no_loop and os.geteuid() == 0:
            targets.append(("loop", stack.enter_context(loop_over(args.path, args.nbytes))))
        for target, path in targets:
            for request in args.requests:
                made, memory = measure(target, path, request, args)
                rows += made
                memories.append(memory)
                show(made, memory)
    save(rows, memories, best(rows), args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--path", default=".", help="a directory on the disk to measure")
    parser.add_argument("--nbytes", type=parse_bytes, default=parse_bytes("1GiB"))
    parser.add_argument("--requests", type=lambda s: [parse_bytes(p) for p in s.split(",")],
                        default=[256 * KiB, 1 * MiB, 4 * MiB])  # fmt: skip
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--no-loop", action="store_true")
    parser.add_argument("--deepspeed", help="a directory with DeepSpeed and its dependencies")
    parser.add_argument("--hardware", default="", help="name of the hardware, for the results file")
    return parser.parse_args()


@contextlib.contextmanager
def loop_over(path: str, nbytes: int) -> Iterator[str]:
    """Attach a loop device to a file on the same disk.

    The file is written first, because reading holes would be too fast.
    """
    backing = Path(path) / f"bench-loop-{os.getpid()}"
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={backing}", "bs=4M", "oflag=direct",
         f"count={(nbytes + 64 * MiB) // (4 * MiB)}"],
        check=True, capture_output=True,
    )  # fmt: skip
    attach = ["losetup", "--direct-io=on", "-f", "--show", str(backing)]
    made = subprocess.run(attach, check=True, capture_output=True, text=True)
    try:
        yield made.stdout.strip()
    finally:
        subprocess.run(["losetup", "-d", made.stdout.strip()], check=True)
        backing.unlink()


def measure(
    target: str, path: str, request: int, args: argparse.Namespace
) -> tuple[list[Row], Memory]:
    """Measure both engines, with and without checksums, and fio, in turns on one file.

    Other load on the machine, or another position of the file on the disk, then affects all of
    them.
    """
    engines = list(dict.fromkeys([choose_engine().name, "threads"]))
    rows = {(e, p): Row(target, e, p, request, args.depth) for e in engines for p in PATTERNS}
    options = StoreOptions(request_nbytes=request, depth=args.depth)
    memory = Memory(target, 0, 0)
    # Submit twice the depth, or the queue would never be as deep as fio's.
    chunk = max(CHUNK, 2 * args.depth * request // LANES)
    for engine in engines:
        with (
            Store.create(path, args.nbytes, engine=engine, verify=True, options=options) as store,
            deepspeed(args, target, request, chunk) as aio,
        ):
            bench = StorageBench(store, args.nbytes, chunk=chunk, lanes=LANES)
            bench.run("write")  # the first write to new space also writes metadata
            before = resident()
            for turn in range(args.passes):
                for pattern in PATTERNS:
                    one_turn(rows[engine, pattern], store, bench, turn, huge=args.huge)
                    if aio is not None:
                        deepspeed_pass(rows[engine, pattern], store, bench, aio)
            memory.grown_nbytes = max(memory.grown_nbytes, resident() - before)
            if target == "file":
                cached = cached_nbytes(store.volumes[0].data_path)
                memory.cached_nbytes = max(memory.cached_nbytes, cached)
    return list(rows.values()), memory


@contextlib.contextmanager
def deepspeed(
    args: argparse.Namespace, target: str, request: int, chunk: int
) -> Iterator[DeepSpeedAio | None]:
    """Start DeepSpeed if it was requested and the target is a file.

    On a raw device it fails with an assertion, because the device has no file size.
    """
    if args.deepspeed is None or target != "file":
        yield None
        return
    with DeepSpeedAio(args.deepspeed, request=request, depth=args.depth, chunk=chunk) as aio:
        yield aio


def deepspeed_pass(row: Row, store: Store, bench: StorageBench, aio: DeepSpeedAio) -> None:
    path = store.volumes[0].data_path
    row.deepspeed.append(aio.run(row.pattern, path, DATA_OFFSET, bench.nbytes))


def one_turn(row: Row, store: Store, bench: StorageBench, turn: int, *, huge: bool) -> None:
    """Measure every variant once.

    The order changes from turn to turn, because the disk may still be busy with earlier work.
    """
    ours = [partial(one_pass, row, store, bench, verify=verify) for verify in (False, True)]
    fio_runs = [partial(fio_pass, row, store, bench, way, huge=huge) for way in WAYS]
    ours = ours[:: -1 if turn & 1 else 1]
    for runs in [fio_runs, ours] if turn & 2 else [ours, fio_runs]:
        if runs is ours and row.pattern != "write":
            bench.run("write")  # replaces what fio wrote, which has no checksums
            bench.run(row.pattern)  # type: ignore[arg-type]  # lets the disk finish its writes
        for run in runs:
            run()


def one_pass(row: Row, store: Store, bench: StorageBench, *, verify: bool) -> None:
    with contextlib.nullcontext() if verify else without_checksums(store):
        used, began = cpu_seconds(), time.perf_counter()
        rate = bench.run(row.pattern)  # type: ignore[arg-type]
        cpu = (cpu_seconds() - used) / (time.perf_counter() - began)
    if verify:
        row.verified.append(rate)
        row.verified_cpu.append(cpu)
    else:
        row.ours.append(rate)
        row.ours_cpu.append(cpu)


@contextlib.contextmanager
def without_checksums(store: Store) -> Iterator[None]:
    """Make the store behave as if it had been created with verify=False, with the same extents."""
    checksums = store._checksums
    store._checksums = dict.fromkeys(checksums)
    yield
    store._checksums = checksums


def fio_pass(row: Row, store: Store, bench: StorageBench, way: str, *, huge: bool) -> None:
    run = run_fio(
        store.volumes[0].data_path, row.pattern, way,
        nbytes=bench.nbytes, request=row.request_nbytes, depth=row.depth, huge=huge,
    )  # fmt: skip
    row.fio[way].append(run.rate)
    row.fio_cpu[way].append(run.cpu)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def cached_nbytes(path: str) -> int:
    """Return how many bytes of the store's data are in the page cache, according to mincore."""
    length = os.path.getsize(path)
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), length) as mapped:
        pages = (ctypes.c_ubyte * (-(-length // mmap.PAGESIZE)))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), pages)
        first = DATA_OFFSET // mmap.PAGESIZE
        return sum(page & 1 for page in pages[first:]) * mmap.PAGESIZE


def show(rows: list[Row], memory: Memory) -> None:
    for row in rows:
        peer = f"  DeepSpeed {spread(row.deepspeed)}" if row.deepspeed else ""
        ours, fio = row.ours, row.fio[row.best_way]
        ratio = typical([ours]) / typical(list(row.fio.values()))
        print(
            f"{row.target:5} {row.engine:9} {row.pattern:6} {format_bytes(row.request_nbytes):>8}"
            f" x{row.depth}  store {spread(ours)}  fio {spread(fio)} GB/s ({row.best_way})"
            f"  ratio {ratio:.2f}{peer}  verify costs {row.verify_cost:+.1%}"
            f"  cpu {statistics.median(row.ours_cpu):.2f}, verified "
            f"{statistics.median(row.verified_cpu):.2f}"
        )
    print(
        f"{memory.target:5} page cache: {format_bytes(memory.cached_nbytes)}; the process grew by "
        f"{format_bytes(memory.grown_nbytes)} in addition to its arenas\n"
    )


def best(rows: list[Row]) -> list[dict[str, object]]:
    """Compare the store and fio, each at its best block size and setting."""
    print("best block size of each, store / fio:")
    found = []
    for target, engine, pattern in dict.fromkeys((r.target, r.engine, r.pattern) for r in rows):
        same = [r for r in rows if (r.target, r.engine, r.pattern) == (target, engine, pattern)]
        ours, fio = (
            typical([r.ours for r in same]),
            typical([w for r in same for w in r.fio.values()]),
        )
        found.append({"target": target, "engine": engine, "pattern": pattern,
                      "ours": ours, "fio": fio, "ratio": ours / fio})  # fmt: skip
        print(
            f"  {target:5} {engine:9} {pattern:6} {ours / 1e9:5.2f} / {fio / 1e9:5.2f} GB/s"
            f" = {ours / fio:.2f}"
        )
    return found


def typical(settings: list[list[float]]) -> float:
    """Return the typical rate of the best setting.

    The setting is chosen by one half of the samples and its rate taken from the other half, both
    ways round: the highest of several noisy medians would overestimate all of them.
    """
    halves = []
    for chosen_by in (0, 1):
        setting = max(settings, key=lambda samples: statistics.median(samples[chosen_by::2]))
        halves.append(statistics.median(setting[1 - chosen_by :: 2]))
    return statistics.fmean(halves)


def spread(samples: list[float]) -> str:
    middle = statistics.median(samples) / 1e9
    return f"{middle:5.2f} ({min(samples) / 1e9:.2f}-{max(samples) / 1e9:.2f})"


def percentiles(row: Row) -> dict[str, list[float]]:
    """Return the 10th, 50th and 90th percentile of each list of rates."""
    lists = {"ours": row.ours, "verified": row.verified, **row.fio}
    return {
        name: [sorted(rates)[round(p * (len(rates) - 1))] for p in (0.1, 0.5, 0.9)]
        for name, rates in lists.items()
    }


def save(
    rows: list[Row],
    memories: list[Memory],
    best_of_each: list[dict[str, object]],
    args: argparse.Namespace,
) -> None:
    now = datetime.now(UTC)
    certificate = {
        "hardware": args.hardware or hardware()["cpu"],
        "cpus": os.cpu_count(),
        "kernel": platform.release().split("-")[0],
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join(["bench/bench_storage.py", *sys.argv[1:]]).replace(
            str(args.path), "PATH"
        ),
        "fio": fio_version().strip(),
        "fio_buffers": "huge pages" if args.huge else "small pages",
        "load": os.getloadavg(),
        "crc32c": "hardware" if _native.crc32c_is_hardware() else "table",
        "rates_unit": "bytes per second; every sample is one pass",
        "best": best_of_each,
        "rows": [asdict(row) | {"percentiles": percentiles(row)} for row in rows],
        "memory": [asdict(memory) for memory in memories],
    }
    name = (args.hardware or "machine").lower().replace(" ", "-")
    path = REPO / f"bench/results/storage_{name}_{now:%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(certificate, indent=1) + "\n")
    print(f"wrote {path.relative_to(REPO)}")


if __name__ == "__main__":
    main()
