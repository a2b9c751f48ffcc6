"""Render the comparison as a table, and check that each arm's losses match the baseline's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.shapes import config_of

NAMES = {
    "plain": "plain torch (eager, checkpointing), everything in HBM",
    "plain-liger": "torch with compiled layers, Liger's loss and checkpointing, everything in HBM",
    "plain-liger-stored": "the same without checkpointing",
    "penstock": "**Penstock**",
    "deepspeed-zero3": "DeepSpeed ZeRO-3, parameters and optimizer on the CPU, defaults",
    "deepspeed-zero3-tuned": "the same, exact-size pinning, tuned buckets",
    "deepspeed-zero2": "DeepSpeed ZeRO-2, optimizer on the CPU",
    "deepspeed-infinity": "DeepSpeed ZeRO-Infinity, parameters and optimizer on disk",
    "deepspeed-infinity-opt": "DeepSpeed ZeRO-Infinity, optimizer on disk",
    "fsdp2": "FSDP2, CPU offload, fused CPU AdamW",
    "roundpipe-sync": "RoundPipe, synchronous",
    "roundpipe-async": "RoundPipe, its default (one step stale)",
}

SLACK = 0.05
"""Allowed difference to the baseline's losses, as a fraction of the baseline's decrease."""

NOISE = 4e-3
"""Absolute difference that is always allowed, for 16-bit kernels that sum in another order."""


def check_losses(call: dict[str, Any]) -> None:
    """Record for each arm whether its losses match the baseline's."""
    baseline = baseline_of(call).get("losses", [])
    for arm in call["arms"]:
        arm["parity"] = parity(arm.get("losses", []), baseline)


def baseline_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return plain torch, or the first arm of a call without it."""
    arms: Sequence[Mapping[str, Any]] = call["arms"]
    return next((arm for arm in arms if arm["arm"] == "plain"), arms[0] if arms else {})


def parity(losses: Sequence[float], baseline: Sequence[float]) -> str:
    """Return "same", or the first step at which the losses differ."""
    common = list(zip(losses, baseline, strict=False))
    if len(common) < 2:
        return "too few steps to say"
    allowed = SLACK * abs(baseline[0] - baseline[-1]) + NOISE
    for number, (loss, expected) in enumerate(common, 1):
        if not abs(loss - expected) <= allowed:
            return f"step {number}: {loss:.4f}, not {expected:.4f}"
    return "same"


def print_arm(arm: Mapping[str, Any]) -> None:
    """Print one line for an arm that has ended."""
    step = arm.get("steady", {}).get("p50")
    print(f"   {arm['arm']}: {arm['state']} {arm.get('problem', '')} "
          f"{'' if step is None else f'{step:.3f} s per step'} "
          f"in {arm['wall_seconds']} s", flush=True)  # fmt: skip


def markdown(results: Mapping[str, Any]) -> str:
    """Render a results file. Ratios are relative to the baseline of the same call."""
    lines = [
        "| system | step, s | relative to the baseline | tokens/s | host peak, GiB | "
        "host bytes per parameter | GPU peak, GiB | written per step, GB | losses |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    seen: set[str] = set()
    for call in results["results"]["calls"]:
        plain = baseline_of(call)
        for arm in call["arms"]:
            if arm["arm"] not in seen:
                seen.add(arm["arm"])
                lines.append(row(arm, plain.get("steady", {}).get("p50")))
    return "\n".join(lines)


def row(arm: Mapping[str, Any], baseline: float | None) -> str:
    """Render the row of one arm. `baseline` is the seconds per step of the baseline."""
    name = NAMES[arm["arm"]]
    steady = arm.get("steady") or {}
    if not steady:
        return f"| {name} | {arm['state']} {arm.get('problem', '')[:120]} | | | | | | | |"
    work, step = arm["work"], steady["p50"]
    written = arm["disk_written"][work["warm_up"] :]
    cells = [
        name,
        seconds(steady) + ("" if arm["state"] == "done" else f" ({arm['state']} later)"),
        f"{step / baseline:.2f}" if baseline else "",
        f"{work['batch'] * work['context'] / step:,.0f}",
        f"{arm['host_peak_nbytes'] / 2**30:.1f}",
        f"{arm['host_peak_nbytes'] / parameters(work['shape']):.1f}",
        f"{arm['device_allocated'] / 2**30:.1f}",
        f"{sum(written) / len(written) / 1e9:.1f}" if written else "",
        arm.get("parity", ""),
    ]
    return f"| {' | '.join(cells)} |"


def seconds(steady: Mapping[str, float]) -> str:
    """Format the 20th and 80th percentile of the step seconds."""
    low, high = f"{steady['p20']:.3g}", f"{steady['p80']:.3g}"
    return low if low == high else f"{low}-{high}"


def parameters(shape: str) -> int:
    """Return the number of parameters of a shape."""
    import torch
    import transformers

    family: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = family.from_config(config_of(shape, 4096))
    return sum(parameter.numel() for parameter in model.parameters())
