"""The store against the best that fio does: same file, block size and depth, in turns, in one run.

    python bench/bench_storage.py --path /mnt/nvme0 [--device] [--nbytes 1GiB] [--passes 8]

Prints rates and ratios for both engines, reading, writing and the sweep's mix, with what the CPU,
the page cache and the process's memory had to give; writes bench/results/storage_<hardware>_<date>.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from certificate import commit, hardware
from deepspeed_aio import DeepSpeedAio
from fio import WAYS, find_fio, fio_version, huge_pages, run_fio
from footprint import cached_nbytes, cpu_seconds, resident
from storage_rows import Memory, Row, percentiles, spread, typical

from penstock import _native
from penstock.storage.benchmark import PATTERNS, StorageBench
from penstock.storage.engines import choose_engine
from penstock.storage.header import DATA_OFFSET
from penstock.storage.store import Store, StoreOptions
from penstock.units import KiB, MiB, format_bytes, parse_bytes

REPO = Path(__file__).parents[1]
CHUNK = 8 * MiB
LANES = 4


def main() -> None:
    chosen = arguments()
    if find_fio() is None:
        sys.exit("fio is not installed: apt install fio")
    rows: list[Row] = []
    memories: list[Memory] = []
    targets = [("file", chosen.path)]
    with contextlib.ExitStack() as ending:
        chosen.huge = ending.enter_context(huge_pages(max(chosen.requests), chosen.depth))
        if not chosen.no_loop and os.geteuid() == 0:
            targets.append(("loop", ending.enter_context(loop_over(chosen.path, chosen.nbytes))))
        for target, path in targets:
            for request in chosen.requests:
                made, memory = measure(target, path, request, chosen)
                rows += made
                memories.append(memory)
                show(made, memory)
    save(rows, memories, best(rows), chosen)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--path", default=".", help="a directory on the disk to be measured")
    parser.add_argument("--nbytes", type=parse_bytes, default=parse_bytes("1GiB"))
    parser.add_argument("--requests", type=lambda s: [parse_bytes(p) for p in s.split(",")],
                        default=[256 * KiB, 1 * MiB, 4 * MiB])  # fmt: skip
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--no-loop", action="store_true")
    parser.add_argument("--deepspeed", help="a folder with DeepSpeed and what it imports")
    parser.add_argument("--hardware", default="", help="for the name of the results file")
    return parser.parse_args()


@contextlib.contextmanager
def loop_over(path: str, nbytes: int) -> Iterator[str]:
    """A raw device over a file on the same disk, written first: holes read too fast."""
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
    target: str, path: str, request: int, chosen: argparse.Namespace
) -> tuple[list[Row], Memory]:
    """Both engines, with and without checksums, and fio, turn by turn on one file: a change in what
    else the machine does, or in where the file lies, meets all of them."""
    engines = list(dict.fromkeys([choose_engine().name, "threads"]))
    rows = {(e, p): Row(target, e, p, request, chosen.depth) for e in engines for p in PATTERNS}
    options = StoreOptions(request_nbytes=request, depth=chosen.depth)
    memory = Memory(target, 0, 0)
    # Twice the depth under way, or the queue would never be as deep as fio's.
    chunk = max(CHUNK, 2 * chosen.depth * request // LANES)
    for engine in engines:
        with (
            Store.create(path, chosen.nbytes, engine=engine, verify=True, options=options) as store,
            deepspeed(chosen, target, request, chunk) as aio,
        ):
            bench = StorageBench(store, chosen.nbytes, chunk=chunk, lanes=LANES)
            bench.run("write")  # the first write of new space pays for its metadata
            before = resident()
            for turn in range(chosen.passes):
                for pattern in PATTERNS:
                    one_turn(rows[engine, pattern], store, bench, turn, huge=chosen.huge)
                    if aio is not None:
                        deepspeed_pass(rows[engine, pattern], store, bench, aio)
            memory.grown_nbytes = max(memory.grown_nbytes, resident() - before)
            if target == "file":
                cached = cached_nbytes(store.volumes[0].data_path)
                memory.cached_nbytes = max(memory.cached_nbytes, cached)
    return list(rows.values()), memory


@contextlib.contextmanager
def deepspeed(
    chosen: argparse.Namespace, target: str, request: int, chunk: int
) -> Iterator[DeepSpeedAio | None]:
    """On files only: a raw device has no length for it, and an assertion of its own ends it."""
    if chosen.deepspeed is None or target != "file":
        yield None
        return
    with DeepSpeedAio(chosen.deepspeed, request=request, depth=chosen.depth, chunk=chunk) as aio:
        yield aio


def deepspeed_pass(row: Row, store: Store, bench: StorageBench, aio: DeepSpeedAio) -> None:
    path = store.volumes[0].data_path
    row.deepspeed.append(aio.run(row.pattern, path, DATA_OFFSET, bench.nbytes))


def one_turn(row: Row, store: Store, bench: StorageBench, turn: int, *, huge: bool) -> None:
    """Everybody once. Who comes first changes: what ran before may still trouble the disk."""
    ours = [partial(one_pass, row, store, bench, verify=verify) for verify in (False, True)]
    yard = [partial(fio_pass, row, store, bench, way, huge=huge) for way in WAYS]
    ours = ours[:: -1 if turn & 1 else 1]
    for runs in [yard, ours] if turn & 2 else [ours, yard]:
        if runs is ours and row.pattern != "write":
            bench.run("write")  # over what fio wrote, which has no checksums
            bench.run(row.pattern)  # type: ignore[arg-type]  # what the disk still does for writes
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
    """The same store, file and extents as if made with verify=False; see StorageBench's lanes."""
    kept = store._checksums
    store._checksums = dict.fromkeys(kept)
    yield
    store._checksums = kept


def fio_pass(row: Row, store: Store, bench: StorageBench, way: str, *, huge: bool) -> None:
    yard = run_fio(
        store.volumes[0].data_path, row.pattern, way,
        nbytes=bench.nbytes, request=row.request_nbytes, depth=row.depth, huge=huge,
    )  # fmt: skip
    row.fio[way].append(yard.rate)
    row.fio_cpu[way].append(yard.cpu)


def show(rows: list[Row], memory: Memory) -> None:
    for row in rows:
        peer = f"  DeepSpeed {spread(row.deepspeed)}" if row.deepspeed else ""
        ours, fio = row.ours, row.fio[row.best_way]
        ratio = typical([ours]) / typical(list(row.fio.values()))
        print(
            f"{row.target:5} {row.engine:9} {row.pattern:6} {format_bytes(row.request_nbytes):>8}"
            f" x{row.depth}  ours {spread(ours)}  fio {spread(fio)} GB/s ({row.best_way})"
            f"  ratio {ratio:.2f}{peer}  verify costs {row.verify_cost:+.1%}"
            f"  cpu {statistics.median(row.ours_cpu):.2f}, verified "
            f"{statistics.median(row.verified_cpu):.2f}"
        )
    print(
        f"{memory.target:5} in the page cache: {format_bytes(memory.cached_nbytes)}, process grew "
        f"by {format_bytes(memory.grown_nbytes)} beyond its arenas\n"
    )


def best(rows: list[Row]) -> list[dict[str, object]]:
    """Each at its best block size, fio at its best way of doing it too."""
    print("best block size of each, ours / fio:")
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


def save(
    rows: list[Row],
    memories: list[Memory],
    best_of_each: list[dict[str, object]],
    chosen: argparse.Namespace,
) -> None:
    now = datetime.now(UTC)
    certificate = {
        "hardware": chosen.hardware or hardware()["cpu"],
        "cpus": os.cpu_count(),
        "kernel": platform.release().split("-")[0],
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join(["bench/bench_storage.py", *sys.argv[1:]]).replace(
            str(chosen.path), "PATH"
        ),
        "fio": fio_version().strip(),
        "fio_buffers": "huge pages" if chosen.huge else "small pages",
        "load": os.getloadavg(),
        "crc32c": "hardware" if _native.crc32c_is_hardware() else "table",
        "rates_unit": "bytes per second; every sample is one pass",
        "best": best_of_each,
        "rows": [asdict(row) | {"percentiles": percentiles(row)} for row in rows],
        "memory": [asdict(memory) for memory in memories],
    }
    name = (chosen.hardware or "machine").lower().replace(" ", "-")
    path = REPO / f"bench/results/storage_{name}_{now:%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(certificate, indent=1) + "\n")
    print(f"written: {path.relative_to(REPO)}")


if __name__ == "__main__":
    main()
