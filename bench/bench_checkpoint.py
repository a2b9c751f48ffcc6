"""Saving and loading a model of a given shape, beside what the disk does with plain files.

    python bench/bench_checkpoint.py --shape 3b --path /mnt/nvme --hbm 24GiB --dram 40GiB --save

Writes weights and optimizer states as `penstock train` does, reads them back, and starts a new
engine from the weights alone, as a fine-tuning does. The yardstick writes and reads as many bytes
of weights, with O_DIRECT and 16 requests of 4 MiB under way. Pages are dropped before every read;
states are zeroed while weights are loaded, and take `clear_seconds` alone.
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
from bench.bench_engine import repeat_weights
from bench.shapes import SHAPES, config_of
from penstock.engine.prepare import prepare
from penstock.machine.presets import preset
from penstock.roles import STATE
from penstock.units import MiB, format_rate

REQUEST = 4 * MiB


def timed(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def forget(folder: Path) -> None:
    """Out of the page cache, so that the disk is read."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def plain(path: Path, nbytes: int) -> dict[str, float]:
    """Bytes a second of the disk itself, through a store."""
    count = max(1, min(nbytes, 4 << 30) // REQUEST)
    with ps.Store.create(str(path), (count + 1) * REQUEST) as store:
        extent = store.allocate(count * REQUEST, name="plain")
        block = ps.Arena(16 * REQUEST).tensor((16, REQUEST), torch.uint8).numpy()

        def move(start: Callable[..., Any]) -> None:
            under_way: list[Any] = []
            for number in range(count):
                if len(under_way) == 16:
                    under_way.pop(0).wait()
                under_way.append(start(extent, block[number % 16], offset=number * REQUEST))
            for ticket in under_way:
                ticket.wait()

        return {
            "write": count * REQUEST / timed(lambda: move(store.start_write)),
            "read": count * REQUEST / timed(lambda: move(store.start_read)),
        }


def engine_of(source: Path, chosen: argparse.Namespace, init: Any) -> Any:
    budget = {"hbm": chosen.hbm, "dram": chosen.dram, "nvme": []}
    machine = preset(chosen.machine) if chosen.machine else None
    return prepare(
        source, budget=budget, machine=machine, context=chosen.context, batch=1, init=init,
        moments=chosen.moments, optimizer={"lr": 1e-5},
    )  # fmt: skip


def clear(engine: Any) -> None:
    """What loading does beside reading: states begin at zero."""
    for block in range(len(engine.inventory.blocks)):
        for role in STATE:
            engine.access.clear(block, role)


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config_of(chosen.shape, chosen.context).save_pretrained(folder / "config")
    out = folder / "out"
    out.mkdir()
    found: dict[str, Any] = {}
    with engine_of(folder / "config", chosen, "random") as engine:
        found["save_seconds"] = timed(lambda: engine.write(out))
        shutil.copy(folder / "config" / "config.json", out)
        weights, states = (sum(p.stat().st_size for p in out.glob(f"{stem}*.safetensors"))
                           for stem in ("model", "optimizer"))  # fmt: skip
        forget(out)
        found["resume_seconds"] = timed(lambda: engine.read(out))
        forget(out)
        found["load_seconds"] = timed(lambda: engine.files.read_weights(out))
        found["clear_seconds"] = timed(lambda: clear(engine))
    forget(out)
    began = time.perf_counter()
    with engine_of(out, chosen, "pretrained"):
        found["start_up_seconds"] = time.perf_counter() - began
    shutil.rmtree(out)
    disk = plain(folder, weights)
    found |= {
        "weights_nbytes": weights, "states_nbytes": states, "disk": disk,
        "save": (weights + states) / found["save_seconds"],
        "resume": (weights + states) / found["resume_seconds"],
        "load": weights / found["load_seconds"],
    }  # fmt: skip
    for what, of in (("save", "write"), ("resume", "read"), ("load", "read")):
        found[f"{what}_of_disk"] = found[what] / disk[of]
        print(f"{what}: {format_rate(found[what])}, {found[f'{what}_of_disk']:.2f} of the disk's "
              f"{format_rate(disk[of])}", flush=True)  # fmt: skip
    print(f"start-up from files: {found['start_up_seconds']:.1f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--path", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--hbm", default="24GiB")
    parser.add_argument("--dram", default="40GiB")
    parser.add_argument("--moments", default="fp32")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--dtype", default="bf16", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    repeat_weights(chosen)
    with tempfile.TemporaryDirectory(dir=chosen.path) as folder:
        found = measure(chosen, Path(folder))
    if chosen.save:
        print(certificate.save(f"checkpoint_{chosen.shape}", found))


if __name__ == "__main__":
    main()
