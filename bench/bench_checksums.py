"""Measure what checksums add to saving and resuming a checkpoint.

    python bench/bench_checksums.py --nbytes 1GiB --rounds 11 --path /mnt/nvme --save

Writes tensors as a save does, and reads them with eight threads as a resume does, with and without
checksums in turn. Ratios are taken within each round. Reads and writes bypass the page cache where
the file system allows it. CPU seconds do not depend on the disk, nor on what else runs.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench import certificate
from penstock import _native
from penstock.checkpoint import writer
from penstock.checkpoint.manifest import COMPLETE, Manifest, write_manifest
from penstock.checkpoint.model_weights import thread_buffer
from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.writer import ShardWriter, TensorOut
from penstock.engine.state_io import READERS
from penstock.engine.tensor_access import PART
from penstock.units import format_bytes, format_rate, parse_bytes

TENSORS = 24


@dataclass
class Samples:
    """Seconds and CPU seconds of one operation, with and without checksums."""

    plain: list[tuple[float, float]] = field(default_factory=list)
    summed: list[tuple[float, float]] = field(default_factory=list)

    def summary(self, nbytes: int) -> dict[str, object]:
        pairs = list(zip(self.summed, self.plain, strict=True))
        return {
            "seconds": certificate.percentiles([s[0] for s in self.summed]),
            "seconds_without": certificate.percentiles([p[0] for p in self.plain]),
            "ratio": certificate.percentiles([s[0] / p[0] for s, p in pairs]),
            # On a busy machine, the fastest rounds are the ones that were disturbed least.
            "ratio_of_fastest": min(self.summed)[0] / min(self.plain)[0],
            "cpu_seconds": certificate.percentiles([s[1] for s in self.summed]),
            "cpu_seconds_without": certificate.percentiles([p[1] for p in self.plain]),
            "rate": nbytes / sorted(s[0] for s in self.summed)[len(pairs) // 2],
        }


def timed(work: Callable[[], object]) -> tuple[float, float]:
    start, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - cpu


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    with patch.multiple(writer, crc32c=lambda *_: 0, combine=lambda *_: 0):
        yield


def tensors_of(nbytes: int) -> list[TensorOut]:
    """Return tensors of random bits in two types, as weights and moments are."""
    outs = []
    each = nbytes // TENSORS // 4 * 4
    for number in range(TENSORS):
        bits = torch.randint(-(2**31), 2**31 - 1, (each // 4,), dtype=torch.int32)
        values = bits if number % 2 else bits.view(torch.bfloat16)
        outs.append(
            TensorOut(name=f"layer.{number}", dtype=values.dtype, shape=tuple(values.shape),
                      parts=lambda values=values: iter(values.split(PART)))
        )  # fmt: skip
    return outs


def save(shards: ShardWriter, folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    files = shards.write(folder)
    write_manifest(folder, Manifest(step=1, files=files))


def resume(folder: Path) -> None:
    """Read all tensors as the engine does: in parts, by several threads, into thread buffers."""
    with ShardReader(folder) as reader, ThreadPoolExecutor(READERS) as threads:

        def read(name: str, low: int, high: int) -> None:
            reader.read_into(name, thread_buffer(high - low, reader.spec(name).dtype), low)

        parts = [
            threads.submit(read, name, low, min(low + PART, reader.spec(name).shape[0]))
            for name in reader.names
            for low in range(0, reader.spec(name).shape[0], PART)
        ]
        for part in parts:
            part.result()


def measure(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    shards = ShardWriter(tensors_of(args.nbytes))
    saves, resumes = Samples(), Samples()

    def run_save(summed: bool) -> None:
        with contextlib.nullcontext() if summed else without_checksums():
            (saves.summed if summed else saves.plain).append(timed(lambda: save(shards, folder)))

    def run_resume(summed: bool) -> None:
        hidden = folder / f".{COMPLETE}"
        if not summed:
            os.rename(folder / COMPLETE, hidden)
        (resumes.summed if summed else resumes.plain).append(timed(lambda: resume(folder)))
        if not summed:
            os.rename(hidden, folder / COMPLETE)

    rng = random.Random(0)
    run_save(True)  # warm up
    resume(folder)
    saves.summed.clear()
    for _ in range(args.rounds):
        order = rng.sample((True, False), 2)
        for summed in order:
            run_save(summed)
        save(shards, folder)
        for summed in order:
            run_resume(summed)
    return {
        "nbytes": shards.nbytes,
        "save": saves.summary(shards.nbytes),
        "resume": resumes.summary(shards.nbytes),
    }


def crc_rate() -> float:
    """Return how many bytes per second one thread sums, from memory."""
    data = bytearray(256 << 20)
    _native.crc32c(data)
    return len(data) / min(timed(lambda: _native.crc32c(data))[0] for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=parse_bytes, default=parse_bytes("1GiB"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--path", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        results = measure(args, Path(folder))
    results["crc32c_rate"] = rate = crc_rate()
    print(f"{format_bytes(args.nbytes)}; CRC-32C sums {format_rate(rate)} in one thread")
    for name in ("save", "resume"):
        found: dict = results[name]
        ratio = found["ratio"]
        print(
            f"{name}: {ratio['p50']:.3f} times the time without checksums (p20 {ratio['p20']:.3f}, "
            f"p80 {ratio['p80']:.3f}, fastest {found['ratio_of_fastest']:.3f}); "
            f"{format_rate(found['rate'])}; CPU seconds "
            f"{found['cpu_seconds']['p50']:.3f} and {found['cpu_seconds_without']['p50']:.3f}"
        )
    if args.save:
        print(certificate.save("checksums", results))


if __name__ == "__main__":
    main()
