"""Measure the optimizer sweep in GPU memory, relative to the bandwidth of a device copy.

    python bench/bench_device_sweep.py                     # 500 M parameters
    python bench/bench_device_sweep.py --params 1000000 --rounds 3

Every round times each variant once; ratios are taken within a round. The bytes are those that the
format must move: each role is read once and, except for the gradient, written once. The upper bound
is a copy that moves as many bytes as the exact sweep. Before anything is timed, steps of every
format are compared with the host's, bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.certificate import percentiles, save
from penstock.optim import device_sweep, rules, sweep
from penstock.optim.device_backend import choose_backend
from penstock.optim.formats import StateFormat, num_blocks
from penstock.optim.sweep import Segment

BY = rules.adamw(step=5, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
FORMATS = {"exact": "fp32", "bf16": "bf16", "int8": "int8"}


def segment(numel: int, moments: str, device: str) -> Segment:
    """Make a segment with bf16 weights and gradients of realistic magnitude."""
    draw = torch.Generator(device).manual_seed(numel)

    def normal(scale: float) -> torch.Tensor:
        out = torch.empty(numel, dtype=torch.bfloat16, device=device)
        return out.normal_(0, scale, generator=draw)

    parts: dict[str, Any] = {"weight": normal(0.02), "grad": normal(1e-3)}
    parts["rest"] = torch.zeros(numel, dtype=torch.int16, device=device)
    stored = StateFormat(moments=moments).moment_dtype  # type: ignore[arg-type]
    for role in ("first", "second"):
        parts[role] = torch.zeros(numel, dtype=stored, device=device)
        if moments == "int8":
            blocks = num_blocks(numel)
            parts[f"{role}_base"] = torch.zeros(blocks, dtype=torch.int16, device=device)
    return Segment(name="bench", by=BY, key=7, **parts)


def traffic(moments: str, numel: int) -> int:
    """Return the bytes that one step reads and writes."""
    stored = sum(StateFormat(moments=moments).nbytes(numel).values())  # type: ignore[arg-type]
    return 2 * stored + 2 * numel


def check(moments: str) -> None:
    """Exit unless three steps on the GPU and on the host agree in every bit."""
    there = segment(100_003, moments, "cuda")
    roles = ("weight", "rest", "first", "second", "first_base", "second_base", "grad")
    found = {role: getattr(there, role) for role in roles}
    parts = {role: None if t is None else t.cpu() for role, t in found.items()}
    here = Segment(name="host", by=BY, key=7, **parts)
    for _ in range(3):
        device_sweep.start("adamw", [there]).wait()
        sweep.start("adamw", [here]).wait()
    for role, tensor in found.items():
        if tensor is not None and not torch.equal(
            tensor.cpu().view(torch.uint8), parts[role].view(torch.uint8)
        ):
            raise SystemExit(f"{moments} moments: {role} differs from the host's result")
    stats = device_sweep.grad_stats(there.grad), sweep.grad_stats(here.grad)
    if stats[0] != stats[1]:
        raise SystemExit(f"grad_stats differ: {stats}")


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds between two events recorded around the work.

    The GPU first sleeps for about a millisecond while the host launches the work, so that the time
    of the GPU's work is measured and not the time of launching it.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def arms(numel: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the function to time and the bytes that it moves, for each variant."""
    half = traffic("fp32", numel) // 2
    source, target = (torch.empty(half, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_(0, 255)
    found: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: target.copy_(source), 2 * half)
    }
    for name, moments in FORMATS.items():
        state = segment(numel, moments, "cuda")
        found[name] = (
            lambda state=state: device_sweep.start("adamw", [state]),
            traffic(moments, numel),
        )
    grad = segment(numel, "fp32", "cuda").grad
    found["grad_stats"] = (lambda: device_sweep.start_stats([grad]), 2 * numel)
    many = [segment(numel // 300, "fp32", "cuda") for _ in range(300)]
    found["exact, 300 segments"] = (
        lambda: device_sweep.start("adamw", many),
        300 * traffic("fp32", numel // 300),
    )
    found["torch fused, fp32"] = (fused(numel), 28 * numel)
    return found


def fused(numel: int) -> Callable[[], object]:
    """Return a step of torch's fused AdamW on fp32 weights. It writes no bf16 weights."""
    param = torch.nn.Parameter(torch.randn(numel, device="cuda") * 0.02)
    param.grad = torch.randn(numel, device="cuda") * 1e-3
    return torch.optim.AdamW([param], lr=1e-4, weight_decay=0.01, fused=True).step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=500_000_000)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    for moments in FORMATS.values():
        check(moments)
    work = arms(args.params)
    for run, _ in work.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(args.rounds):
        for name, (run, _) in work.items():
            times[name].append(seconds(run))
    results: dict[str, Any] = {"params": args.params, "engine": choose_backend(), "arms": {}}
    copies = [work["copy"][1] / t for t in times["copy"]]
    for name, (_, nbytes) in work.items():
        rates = [nbytes / t for t in times[name]]
        share = statistics.median(r / c for r, c in zip(rates, copies, strict=True))
        results["arms"][name] = {
            "bytes": nbytes,
            "seconds": percentiles(times[name]),
            "gb_per_second": percentiles([r / 1e9 for r in rates]),
            "share_of_copy": share,
        }
        print(f"{name:22} {statistics.median(rates) / 1e9:8.0f} GB/s  {share:6.3f} of the copy")
    print(save("device_sweep", results))


if __name__ == "__main__":
    main()
