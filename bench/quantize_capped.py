"""Show that a model's files are quantized in bounded memory: load them under a memory limit.

    python bench/quantize_capped.py --shape 8b --limit 12GiB --save

Writes files of random bf16 weights (16 GB for 8b) into a temporary directory, and prepares an
engine for QLoRA in a child process that may not allocate more than the limit (RLIMIT_DATA), on the
CPU. With --save, writes bench/results/quantize_capped_<shape>_<hardware>_<date>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from bench.shapes import SHAPES, config_of
from penstock.units import format_bytes, parse_bytes

PART = 1 << 24
"""Number of random weights that are repeated."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--limit", default="12GiB")
    parser.add_argument("--quantize", default="nf4")
    parser.add_argument("--folder", type=Path, help="where to write the model's files")
    parser.add_argument("--steps", type=int, default=1, help="0: only load; CPUs compute 8B slowly")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true")
    return parser.parse_args()


def write_model(folder: Path, config: Any) -> int:
    """Write the files of a model, one for each block; return their size in bytes."""
    from safetensors.torch import save_file

    from penstock.model.survey import survey_config

    config.save_pretrained(folder)
    drawn = (0.02 * torch.randn(PART)).to(torch.bfloat16)
    files: dict[str, str] = {}
    for number, block in enumerate(survey_config(config, name="model").blocks):
        tensors = {
            t.name: drawn.repeat(-(-t.elements // PART))[: t.elements].view(t.shape).clone()
            for t in block.tensors
        }
        if tensors:
            name = f"model-{number:05}.safetensors"
            save_file(tensors, folder / name, {"format": "pt"})
            files |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def prepare_capped(args: argparse.Namespace) -> None:
    """Prepare an engine under the limit, and print what it needed."""
    from penstock.engine.prepare import prepare
    from penstock.plan.budget import Budget
    from penstock.tiers import Tier

    limit = parse_bytes(args.limit)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    budget = Budget(hbm=limit // 3, dram=limit // 2)
    began = time.perf_counter()
    with prepare(
        args.child, lora="r=16,alpha=32", quantize=args.quantize, context=64, batch=1,
        budget=budget, device="cpu", self_check=False,
    ) as engine:  # fmt: skip
        seconds = time.perf_counter() - began
        planned = sum(engine.plan.peak(tier) for tier in (Tier.HBM, Tier.DRAM))
        batch = {"input_ids": torch.arange(64)[None]}
        losses = [float(engine.step(batch)) for _ in range(args.steps)]
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line)
    print(json.dumps({"seconds": seconds, "planned": planned, "peak": peak, "losses": losses}))


def main() -> None:
    args = arguments()
    if args.child:
        prepare_capped(args)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        nbytes = write_model(Path(folder), config_of(args.shape, 4096))
        command = [sys.executable, __file__, "--child", folder, "--limit", args.limit]
        command += ["--quantize", args.quantize, "--steps", str(args.steps)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    found = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{format_bytes(nbytes)} of files, limit {args.limit}: planned "
        f"{format_bytes(found['planned'])}, peak of the process {format_bytes(found['peak'])}, "
        f"ready after {found['seconds']:.1f} s, losses {found['losses']}"
    )
    if args.save:
        certificate.save(
            f"quantize_capped_{args.shape}", found | {"files": nbytes, "limit": args.limit}
        )


if __name__ == "__main__":
    main()
