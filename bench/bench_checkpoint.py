"""Measure saving and loading a model, relative to the bandwidth of the disk.

    python bench/bench_checkpoint.py --shape 3b --path /mnt/nvme --hbm 24GiB --dram 40GiB --save

Writes weights and optimizer states as `penstock train` does, reads them back, and starts a new
engine from the weights alone, as fine-tuning does. The baseline writes and reads the same number of
bytes with O_DIRECT and 16 requests of 4 MiB in flight. The page cache is dropped before every read.
Loading weights also zeroes the optimizer states, which takes `clear_seconds` on its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import penstock as ps
from bench import certificate
from bench.measuring import timed
from bench.repeated_weights import repeat_weights
from bench.shapes import SHAPES, config_of
from penstock.engine.prepare import prepare
from penstock.machine.presets import preset
from penstock.roles import STATE
from penstock.units import MiB, format_rate

REQUEST = 4 * MiB


def drop_page_cache(folder: Path) -> None:
    """Drop the files from the page cache, so that the disk is read."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def disk_rates(path: Path, nbytes: int) -> dict[str, float]:
    """Measure the bandwidth of the disk itself, through a store, in bytes per second."""
    count = max(1, min(nbytes, 4 << 30) // REQUEST)
    with ps.Store.create(str(path), (count + 1) * REQUEST) as store:
        extent = store.allocate(count * REQUEST, name="plain")
        block = ps.Arena(16 * REQUEST).tensor((16, REQUEST), torch.uint8).numpy()

        def move(start: Callable[..., Any]) -> None:
            in_flight: list[Any] = []
            for number in range(count):
                if len(in_flight) == 16:
                    in_flight.pop(0).wait()
                in_flight.append(start(extent, block[number % 16], offset=number * REQUEST))
            for ticket in in_flight:
                ticket.wait()

        return {
            "write": count * REQUEST / timed(lambda: move(store.start_write)),
            "read": count * REQUEST / timed(lambda: move(store.start_read)),
        }


def engine_of(source: Path, args: argparse.Namespace, init: Any) -> Any:
    budget = {"hbm": args.hbm, "dram": args.dram, "nvme": []}
    machine = preset(args.machine) if args.machine else None
    return prepare(
        source, budget=budget, machine=machine, context=args.context, batch=1, init=init,
        moments=args.moments, optimizer={"lr": 1e-5},
    )  # fmt: skip


def clear(engine: Any) -> None:
    """Zero the optimizer states, as loading weights does."""
    for block in range(len(engine.inventory.blocks)):
        for role in STATE:
            engine.access.clear(block, role)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config_of(args.shape, args.context).save_pretrained(folder / "config")
    out = folder / "out"
    out.mkdir()
    results: dict[str, Any] = {}
    with engine_of(folder / "config", args, "random") as engine:
        results["save_seconds"] = timed(lambda: engine.write(out))
        shutil.copy(folder / "config" / "config.json", out)
        weights, states = (sum(p.stat().st_size for p in out.glob(f"{stem}*.safetensors"))
                           for stem in ("model", "optimizer"))  # fmt: skip
        drop_page_cache(out)
        results["resume_seconds"] = timed(lambda: engine.read(out))
        drop_page_cache(out)
        results["load_seconds"] = timed(lambda: engine.files.read_weights(out))
        results["clear_seconds"] = timed(lambda: clear(engine))
    drop_page_cache(out)
    began = time.perf_counter()
    with engine_of(out, args, "pretrained"):
        results["start_up_seconds"] = time.perf_counter() - began
    shutil.rmtree(out)
    disk = disk_rates(folder, weights)
    results |= {
        "weights_nbytes": weights, "states_nbytes": states, "disk": disk,
        "save": (weights + states) / results["save_seconds"],
        "resume": (weights + states) / results["resume_seconds"],
        "load": weights / results["load_seconds"],
    }  # fmt: skip
    for operation, direction in (("save", "write"), ("resume", "read"), ("load", "read")):
        results[f"{operation}_of_disk"] = results[operation] / disk[direction]
        share = results[f"{operation}_of_disk"]
        rates = f"{format_rate(results[operation])}, {share:.2f} of the disk's"
        print(f"{operation}: {rates} {format_rate(disk[direction])}", flush=True)
    print(f"start-up from files: {results['start_up_seconds']:.1f} s", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--path", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--hbm", default="24GiB")
    parser.add_argument("--dram", default="40GiB")
    parser.add_argument("--moments", default="fp32")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    repeat_weights(torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        results = measure(args, Path(folder))
    if args.save:
        print(certificate.save(f"checkpoint_{args.shape}", results))


if __name__ == "__main__":
    main()
