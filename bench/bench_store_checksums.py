"""Measure what the checksums of the NVMe store cost: the ratio with and without them, in one run.

    python bench/bench_store_checksums.py --path /mnt/nvme0 [--seconds 60] [--save]
    python bench/bench_store_checksums.py --path /mnt/nvme0 --gpu --save  # under 90 seconds

There are three parts. `crc` is the speed of CRC-32C on one core, from the cache and from memory.
`store` writes, reads and does both at once, on one file, with and without checksums in turns.
`step` takes training steps with the optimizer states on NVMe, in one engine, with and without
checksums in turns. A ratio above 1 is the cost of checksums. CPU time is that of all threads of the
process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from bench import certificate
from bench.bench_storage import cpu_seconds, without_checksums
from bench.shapes import SHAPES, config_of
from penstock import _native
from penstock.engine.prepare import prepare
from penstock.memory.arena import Arena
from penstock.storage.benchmark import PATTERNS, Pattern, StorageBench
from penstock.storage.engines import choose_engine
from penstock.storage.store import Store
from penstock.units import KiB, MiB, format_bytes, parse_bytes

PARTS = ("crc", "store", "step")
UNIT = 64 * KiB
GPU = {
    "shape": "medium", "hbm": "3GiB", "dram": "512MiB", "batch": 8, "context": 1024, "steps": 1,
    "seconds": 15.0,
}  # fmt: skip
"""Defaults with `--gpu`: 2 GiB of states on NVMe, and little to compute."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--path", default=".", help="a directory on the disk to measure")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=30, help="time of `store` and of `step`")
    parser.add_argument("--nbytes", type=parse_bytes, default=512 * MiB, help="size of `store`")
    parser.add_argument("--gpu", action="store_true", help="train on a GPU, in under 90 seconds")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--hbm", default="11MiB")
    parser.add_argument("--dram", default="2MiB")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="steps of one sample")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.gpu:
        parser.set_defaults(**GPU)
        args = parser.parse_args()
    return args


def measure_crc() -> dict[str, Any]:
    """Measure each variant of CRC-32C, unit by unit, in GB/s on one core."""
    big = np.frombuffer(random.Random(0).randbytes(MiB) * 256, np.uint8)
    rates: dict[str, Any] = {}
    for variant in _native.crc32c_variants():
        # The table is ten times slower and needs fewer bytes.
        share = 8 if variant == "table" else 1
        for name, data, repeat in (("cache", big[: 8 * UNIT], 128), ("memory", big, 1)):
            units = [memoryview(data[at : at + UNIT]) for at in range(0, len(data), UNIT)]
            units = units * (repeat // share) if repeat > 1 else units[: len(units) // share]
            samples = []
            for _ in range(9):
                began = time.thread_time()  # other load on the machine does not count
                for unit in units:
                    _native.crc32c(unit, 0, variant)
                samples.append(len(units) * UNIT / (time.thread_time() - began) / 1e9)
            rates[f"{variant} {name}"] = certificate.percentiles(samples)
            print(f"crc   {variant:12} from {name:7} {show(rates[f'{variant} {name}'])} GB/s")
    return rates


class Turns:
    """Samples of a task with and without checksums, which take turns.

    `prepare` is called before each sample with checksums, and is not measured.
    """

    def __init__(self, prepare: Callable[[], object] = lambda: None) -> None:
        self._prepare = prepare
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.cpu: dict[bool, list[float]] = {True: [], False: []}

    def take(self, run: Callable[[bool], object]) -> None:
        """Take one sample of each. The order changes, as the disk may be busy with the last."""
        first = len(self.seconds[True]) % 2 == 0
        for verify in (first, not first):
            if verify:
                self._prepare()
            used, began = cpu_seconds(), time.perf_counter()
            run(verify)
            self.seconds[verify].append(time.perf_counter() - began)
            self.cpu[verify].append(cpu_seconds() - used)

    def result(self, nbytes: int) -> dict[str, Any]:
        """Return ratios within each pair, rates in GB/s, and CPU seconds per GB."""

        def ratios(samples: dict[bool, list[float]]) -> dict[str, float]:
            pairs = zip(samples[True], samples[False], strict=True)
            return certificate.percentiles([on / off for on, off in pairs])

        rates = {
            name: certificate.percentiles([nbytes / s / 1e9 for s in self.seconds[verify]])
            for name, verify in (("with", True), ("without", False))
        }
        extra = sum(self.cpu[True]) - sum(self.cpu[False])
        return {
            "ratio": ratios(self.seconds), "cpu_ratio": ratios(self.cpu),
            "gb_per_second": rates, "seconds": self.seconds, "cpu_seconds": self.cpu,
            "extra_cpu_seconds_per_gb": extra / len(self.cpu[True]) / nbytes * 1e9,
        }  # fmt: skip


def store_pass(store: Store, bench: StorageBench, pattern: Pattern, verify: bool) -> None:
    # Every extent holds the same bytes, so a pass without checksums leaves the old ones valid.
    with contextlib.nullcontext() if verify else without_checksums(store):
        bench.run(pattern)


def measure_store(args: argparse.Namespace) -> dict[str, Any]:
    engines = list(dict.fromkeys([choose_engine().name, "threads"]))
    results: dict[str, Any] = {}
    for engine in engines:
        with Store.create(args.path, args.nbytes, engine=engine) as store:
            bench = StorageBench(store, args.nbytes, chunk=16 * MiB)
            bench.run("write")  # the first write to new space also writes metadata
            turns = {pattern: Turns() for pattern in PATTERNS}
            end = time.monotonic() + args.seconds / len(engines)
            while time.monotonic() < end or len(turns["read"].seconds[True]) < 4:
                for pattern in PATTERNS:
                    turns[pattern].take(partial(store_pass, store, bench, pattern))
        for pattern in PATTERNS:
            moved = bench.nbytes * (2 if pattern == "mixed" else 1)
            row = results[f"{engine} {pattern}"] = turns[pattern].result(moved)
            print_row(f"store {engine:9} {pattern:6}", row)
    return results


@contextlib.contextmanager
def engine_of(args: argparse.Namespace, path: Path) -> Iterator[Any]:
    """Prepare an engine that keeps optimizer states on NVMe."""
    config = config_of(args.shape, args.context)
    config.save_pretrained(path / "model")
    (path / "disk").mkdir()
    engine = prepare(
        path / "model",
        budget={"hbm": args.hbm, "dram": args.dram, "nvme": [f"{path / 'disk'}:24GiB"]},
        context=args.context,
        batch=args.batch,
        micro_batch=args.batch,
        init="random",
        optimizer={"lr": 1e-5},
        device="cuda" if args.gpu else "cpu",
        # Nothing that takes time before the first step: the steps differ only in checksums.
        self_check=False,
        compiled=False,
        rehearse=False,
    )
    with contextlib.closing(engine):
        yield engine


class StepBench:
    """Training steps of one engine, whose checksums are switched off and on again."""

    def __init__(self, engine: Any, args: argparse.Namespace) -> None:
        vocabulary = config_of(args.shape, args.context).vocab_size
        self._engine, self._steps = engine, args.steps
        self._batch = {"input_ids": torch.randint(0, vocabulary, (args.batch, args.context))}
        self.store: Store = engine._memory.store
        self._buffer = Arena(16 * MiB).take(16 * MiB, align=self.store.alignment)
        self._valid = True
        """Whether the checksums are those of the bytes on disk."""

    def run(self, verify: bool) -> None:
        with contextlib.nullcontext() if verify else without_checksums(self.store):
            for _ in range(self._steps):
                self._engine.step(self._batch)
            self._engine.finish()
        self._valid = self._valid and verify

    def renew_checksums(self) -> None:
        """Write everything once more, with checksums, if steps without checksums have changed it.

        This takes as long as a step, and is not measured.
        """
        if self._valid:
            return
        for extent in self.store._extents.values():
            for start in range(0, extent.stored_nbytes, 16 * MiB):
                part = min(16 * MiB, extent.stored_nbytes - start)
                with without_checksums(self.store):
                    self.store.start_read(extent, self._buffer, offset=start, nbytes=part).wait()
                self.store.start_write(extent, self._buffer, offset=start, nbytes=part).wait()
        self._valid = True


def measure_step(args: argparse.Namespace) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(dir=args.path) as folder,
        engine_of(args, Path(folder)) as engine,
    ):
        bench = StepBench(engine, args)
        bench.run(True)  # the first steps allocate and compile
        before = bench.store.stats
        bench.run(True)
        after = bench.store.stats
        moved = after.read_nbytes + after.written_nbytes
        moved -= before.read_nbytes + before.written_nbytes
        turns, end = Turns(bench.renew_checksums), time.monotonic() + args.seconds
        while time.monotonic() < end or len(turns.seconds[True]) < 4:
            turns.take(bench.run)
        row = turns.result(moved)
    row |= {"nbytes_per_step": moved / args.steps, "settings": vars(args)}
    print_row(f"step  {args.shape} {args.batch}x{args.context}", row)
    print(f"      {format_bytes(moved // args.steps)} to and from NVMe per step")
    return row


def print_row(name: str, row: dict[str, Any]) -> None:
    rates = row["gb_per_second"]
    print(
        f"{name:24} with / without: {show(row['ratio'], 3)} of the time, "
        f"{show(row['cpu_ratio'], 3)} of the CPU time;"
        f" {show(rates['with'])} against {show(rates['without'])} GB/s;"
        f" {row['extra_cpu_seconds_per_gb']:.3f} s of CPU time per GB",
        flush=True,
    )


def show(values: dict[str, float], digits: int = 1) -> str:
    """Format the median, and the 20th and 80th percentile."""
    p20, p50, p80 = (f"{values[key]:.{digits}f}" for key in ("p20", "p50", "p80"))
    return f"{p50} ({p20}-{p80})"


def main() -> None:
    args = arguments()
    results: dict[str, Any] = {"load": os.getloadavg(), "variants": _native.crc32c_variants()}
    if "crc" in args.parts:
        results["crc_gb_per_second"] = measure_crc()
    if "store" in args.parts:
        results["store"] = measure_store(args)
    if "step" in args.parts:
        results["step"] = measure_step(args)
    if args.save:
        print(certificate.save("store_checksums", results))


if __name__ == "__main__":
    main()
