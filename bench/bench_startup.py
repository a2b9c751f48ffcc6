"""Measure the time to the end of the first step by phase: a first start, and later ones.

    python bench/bench_startup.py --shape 8b --folder /mnt/nvme/start --hbm 24GiB --save

Writes a model with repeated weights to the folder once. Then starts `--starts` processes one after
the other, with caches in the folder, which are empty before the first start if the folder is new.
Each loads the model and takes one step. Unless `--keep-cached` is given, the files are dropped from
the page cache before each start. With --save, it writes
bench/results/startup_<shape>_<hardware>_<date>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.shapes import ALL_SHAPES, config_of

PART = 1 << 22
"""Number of weights that are drawn and repeated."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=ALL_SHAPES, default="8b")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--hbm", default="24GiB")
    parser.add_argument("--dram", default="auto")
    parser.add_argument("--nvme", action="append", default=[])
    parser.add_argument("--moments", default="fp32")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--device")
    parser.add_argument("--keep-cached", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_model(config: Any, folder: Path) -> None:
    """Write a model in bf16 whose tensors repeat the same random weights."""
    import torch
    import transformers

    from penstock.checkpoint.writer import ShardWriter, TensorOut

    folder.mkdir(parents=True, exist_ok=True)
    drawn = (0.02 * torch.randn(PART, generator=torch.Generator().manual_seed(0))).bfloat16()

    def parts(elements: int) -> Iterator[torch.Tensor]:
        for low in range(0, elements, PART):
            yield drawn[: min(PART, elements - low)]

    family: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        named = family.from_config(config).named_parameters()
    tensors = [
        TensorOut(name=name, dtype=torch.bfloat16, shape=tuple(t.shape),
                  parts=partial(parts, t.numel()))
        for name, t in named
    ]  # fmt: skip
    ShardWriter(tensors).write(folder)
    config.save_pretrained(folder)  # last: a model without it is written again


def start_once(args: argparse.Namespace) -> None:
    """Load the model, take one step, and print the phases as JSON."""
    from penstock.engine.startup import StartUp

    start_up = StartUp.of_process()
    with start_up.phase("import"):
        import torch

        from penstock.engine.prepare import prepare
        from penstock.machine.presets import preset
    with prepare(
        args.folder / "model", context=args.context, batch=args.batch, moments=args.moments,
        device=args.device, machine=preset(args.machine) if args.machine else None,
        budget={"hbm": args.hbm, "dram": args.dram, "nvme": args.nvme}, start_up=start_up,
    ) as engine:  # fmt: skip
        engine.step({"input_ids": torch.ones(args.batch, args.context, dtype=torch.long)})
        tiers = {tier: usage["used"] for tier, usage in engine.tiers().items()}
    print(json.dumps({"seconds": start_up.seconds, "start_up": start_up.by_name(),
                      "tiers": tiers}), flush=True)  # fmt: skip


def drop_from_cache(folder: Path) -> None:
    """Drop the weights from the page cache."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())  # pages that are not on the disk yet stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_into_cache(folder: Path) -> None:
    """Read the weights, so that they are in the page cache."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            while file.read(1 << 24):
                pass


def main() -> None:
    args = arguments()
    if args.one:
        start_once(args)
        return
    model, caches = args.folder / "model", args.folder / "caches"
    if not (model / "config.json").exists():
        write_model(config_of(args.shape, args.context), model)
    caches.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(caches / "user"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    # Otherwise every start would compile all Python files again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    starts = []
    for number in range(args.starts):
        (read_into_cache if args.keep_cached else drop_from_cache)(model)
        ran = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--one"],
            env=environment, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        starts.append(json.loads(ran.stdout.splitlines()[-1]))
        print(f"start {number + 1}: {starts[-1]}", flush=True)
    if args.save:
        import torch  # noqa: F401  so that the results name the GPU

        from bench import certificate

        settings = {name: str(value) for name, value in vars(args).items()}
        results = {"settings": settings, "starts": starts}
        print(certificate.save(f"startup_{args.shape}", results), flush=True)


if __name__ == "__main__":
    main()
