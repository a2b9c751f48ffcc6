"""Measure the optimizer sweep against torch, DeepSpeed and memory bandwidth, all in one run.

    python bench/bench_sweep.py                       # 100 M and 500 M parameters, all CPUs
    python bench/bench_sweep.py --params 1000000 --rounds 2

Every round times each arm once, so that other load affects all of them; ratios are taken within a
round and their median is reported. The process sleeps before each arm, because OpenMP's threads
keep spinning for some milliseconds after an operation of torch and would slow down the next arm.
DeepSpeed is measured if it can be imported.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.certificate import percentiles, save
from bench.measuring import timed
from penstock import _native, empty
from penstock.optim.rules import Coefficients
from penstock.optim.sweep import LEAF, Pool, grad_stats
from penstock.optim.sweep_benchmark import TRAFFIC, SweepBuffers

Arm = Callable[[], float]
REST = 0.05
"""Seconds to sleep before each arm, until the threads of the previous one sleep."""

SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def placed(numel: int, dtype: torch.dtype, scale: float = 0.0) -> torch.Tensor:
    """Allocate a tensor with huge pages, as the sweep does, for all arms."""
    tensor = empty(numel, dtype=dtype)
    sample = torch.randn(min(numel, 1 << 20)).mul_(scale).to(dtype)
    for part in tensor.split(1 << 20):
        part.copy_(sample[: part.numel()])
    return tensor


def peak_growth(work: Callable[[], object]) -> int | None:
    """Return the growth of the peak resident memory in bytes, or None if it cannot be reset."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


# Arms. Each is a function that runs once and returns the seconds.


def ceiling_arm(bed: SweepBuffers, pool: Pool) -> Arm:
    """Return an arm with the reads and writes of the exact format, but without its arithmetic.

    It runs two passes, of which the second undoes the first.
    """
    segment = _native.Segment(
        count=bed.numel,
        first_index=0,
        key=0,
        grad=bed.grad.data_ptr(),
        weight=bed.weight.data_ptr(),
        rest=bed.low.data_ptr(),
        first=bed.moment[0].data_ptr(),
        second=bed.moment[1].data_ptr(),
        first_bases=0,
        second_bases=0,
        by=Coefficients().native(),
    )

    def once() -> float:
        return timed(lambda: pool.native.mix([segment], _native.GradType.bf16).wait())

    return lambda: (once() + once()) / 2


def in_place_arm(tensor: torch.Tensor, pool: Pool) -> Arm:
    """Return another upper bound: multiply one long array in place."""
    return lambda: timed(lambda: tensor.mul_(1.0))


def torch_arm(master: torch.Tensor, grad: torch.Tensor, moments: list[torch.Tensor]) -> Arm:
    master.grad = grad
    optimizer = torch.optim.AdamW([master], fused=True, **SETTINGS)
    optimizer.state[master] = {
        "step": torch.tensor(0.0),
        "exp_avg": moments[0],
        "exp_avg_sq": moments[1],
    }
    return lambda: timed(optimizer.step)


def deepspeed_arm(
    master: torch.Tensor, grad: torch.Tensor, moments: list[torch.Tensor], weight: torch.Tensor
) -> Arm | None:
    """Return DeepSpeed's three passes: unscale the fp32 gradient, step, cast to bf16."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        master.grad = grad
        optimizer = DeepSpeedCPUAdam([master], adamw_mode=True, **SETTINGS)
    except Exception as missing:
        print(f"DeepSpeed is not measured: {type(missing).__name__}: {missing}")
        return None
    optimizer.state[master] = {"step": 0, "exp_avg": moments[0], "exp_avg_sq": moments[1]}

    def three_passes() -> None:
        grad.mul_(1.0)
        optimizer.step()
        weight.copy_(master)

    return lambda: timed(three_passes)


def run_rounds(
    arms: dict[str, Arm], rounds: int, wake: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm()  # warm-up: pages, lazily built state, branch predictors
    for _ in range(rounds):
        for name, arm in arms.items():
            time.sleep(REST)
            wake()
            seconds[name].append(arm())
    return seconds


def figures(seconds: dict[str, list[float]], numel: int, traffic: dict[str, float]) -> dict:
    rows = {}
    for name, samples in seconds.items():
        per = [s / numel * 1e9 for s in samples]
        rows[name] = {"ns_per_parameter": percentiles(per)}
        if name in traffic:
            rows[name]["bytes_per_parameter"] = traffic[name]
            rows[name]["gb_per_s_p50"] = traffic[name] / statistics.median(per)
    return rows


def ratio(seconds: dict[str, list[float]], fast: str, slow: str) -> dict[str, float]:
    """Return how many times faster `fast` is than `slow`, as percentiles over rounds."""
    return percentiles([b / a for a, b in zip(seconds[fast], seconds[slow], strict=True)])


def exact_phase(numel: int, pool: Pool, rounds: int) -> dict:
    """Measure everything that has fp32 moments."""
    bed = SweepBuffers(numel, "fp32")
    master = placed(numel, torch.float32, 0.02).requires_grad_()
    grad = placed(numel, torch.float32, 1e-3)
    arms: dict[str, Arm] = {
        "ceiling": ceiling_arm(bed, pool),
        "in_place": in_place_arm(grad, pool),
        "exact": lambda: bed.step(pool),
        "exact_with_stats": lambda: bed.step(pool, stats=True),
        "torch_fused": torch_arm(master, grad, bed.moment),
    }
    with torch.no_grad():
        if (deepspeed := deepspeed_arm(master, grad, bed.moment, bed.weight)) is not None:
            arms["deepspeed_three_passes"] = deepspeed
        seconds = run_rounds(arms, rounds)
    traffic = {"ceiling": 26.0, "in_place": 8.0, "exact": 26.0, "exact_with_stats": 26.0}
    traffic |= {"torch_fused": 28.0, "deepspeed_three_passes": 42.0}
    ratios = {
        "exact_of_ceiling": ratio(seconds, "exact", "ceiling"),
        "exact_over_torch_fused": ratio(seconds, "exact", "torch_fused"),
    }
    if deepspeed is not None:
        ratios["exact_over_deepspeed"] = ratio(seconds, "exact", "deepspeed_three_passes")
    return {"arms": figures(seconds, numel, traffic), "ratios": ratios}


def compressed_phase(numel: int, pool: Pool, rounds: int) -> dict:
    beds = {m: SweepBuffers(numel, m) for m in ("bf16", "int8")}
    seconds = run_rounds({m: lambda b=b: b.step(pool) for m, b in beds.items()}, rounds)
    return {"arms": figures(seconds, numel, dict(TRAFFIC)), "ratios": {}}


def stats_phase(numel: int, pool: Pool, rounds: int) -> dict:
    grad = placed(numel, torch.float32, 1e-3)
    short = placed(numel, torch.bfloat16, 1e-3)
    cpus = sorted(pool.cpus)

    def read(tensor: torch.Tensor) -> float:
        at, nbytes, op = tensor.data_ptr(), tensor.nbytes, _native.StreamOp.read
        return _native.stream(op, 0, at, nbytes, pool.threads, cpus, 1)[0]

    def peers_check() -> None:
        bool(torch.isinf(grad).any()) or bool(torch.isnan(grad).any())

    arms: dict[str, Arm] = {
        "read_fp32": lambda: read(grad),
        "stats_fp32": lambda: timed(lambda: grad_stats(grad, pool=pool)),
        "read_bf16": lambda: read(short),
        "stats_bf16": lambda: timed(lambda: grad_stats(short, pool=pool)),
        "isinf_or_isnan_fp32": lambda: timed(peers_check),
    }
    # The time of a read starts when its threads are running, so the pool must be awake too.
    leaf = short[:LEAF]
    seconds = run_rounds(arms, rounds, wake=lambda: grad_stats(leaf, pool=pool))
    traffic = {"read_fp32": 4.0, "stats_fp32": 4.0, "read_bf16": 2.0, "stats_bf16": 2.0}
    ratios = {
        "stats_fp32_of_read": ratio(seconds, "stats_fp32", "read_fp32"),
        "stats_bf16_of_read": ratio(seconds, "stats_bf16", "read_bf16"),
        "stats_fp32_over_isinf_isnan": ratio(seconds, "stats_fp32", "isinf_or_isnan_fp32"),
    }
    starts = {"awake": start_seconds(leaf, pool, 0.0), "asleep": start_seconds(leaf, pool, REST)}
    extra = {
        "grad_stats": peak_growth(lambda: grad_stats(grad, pool=pool)),
        "isinf_or_isnan": peak_growth(peers_check),
    }
    arms_of = figures(seconds, numel, traffic)
    return {"arms": arms_of, "ratios": ratios, "extra_bytes": extra, "start_seconds": starts}


def start_seconds(leaf: torch.Tensor, pool: Pool, rest: float) -> dict[str, float]:
    """Time a job of one leaf after the threads have been idle for `rest` seconds."""
    samples = []
    for _ in range(40):
        time.sleep(rest)
        samples.append(timed(lambda: grad_stats(leaf, pool=pool)))
    return percentiles(samples)


def show(numel: int, phase: dict) -> None:
    for name, arm in phase["arms"].items():
        ns = arm["ns_per_parameter"]
        rate = f"{arm['gb_per_s_p50']:7.1f} GB/s" if "gb_per_s_p50" in arm else ""
        spread = f"({ns['p20']:.3f} to {ns['p80']:.3f})"
        print(f"{numel / 1e6:6.0f} M  {name:24} {ns['p50']:7.3f} ns/param {spread:18} {rate}")
    for name, of in phase["ratios"].items():
        print(
            f"{numel / 1e6:6.0f} M  {name:28} {of['p50']:.2f} ({of['p20']:.2f} to {of['p80']:.2f})"
        )
    for name, nbytes in phase.get("extra_bytes", {}).items():
        print(f"{numel / 1e6:6.0f} M  extra bytes of {name}: {nbytes}")
    for name, seconds in phase.get("start_seconds", {}).items():
        print(f"{numel / 1e6:6.0f} M  a small job, threads {name}: {seconds['p50'] * 1e6:.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, nargs="+", default=[100_000_000, 500_000_000])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=None, help="directory of the results file")
    args = parser.parse_args()
    pool = Pool(args.threads)
    torch.set_num_threads(pool.threads)
    results: dict = {"threads": pool.threads, "isa": _native.isa_name(), "sizes": {}}
    for numel in args.params:
        done = {}
        for phase in (exact_phase, compressed_phase, stats_phase):
            done[phase.__name__] = phase(numel, pool, args.rounds)
            show(numel, done[phase.__name__])
            gc.collect()
        results["sizes"][str(numel)] = done
    print(save("sweep", results, directory=args.out))


if __name__ == "__main__":
    main()
