"""Compare loss curves of a small language model with exact and compressed moments, over seeds.

The model is a byte-level GPT, trained on Python's standard library, which every machine with Python
has. All arms of a seed use the same files, initial weights and batches, so that they differ only in
the optimizer. Weights are bf16 in every arm: Penstock's optimizer updates them in place through the
split master weights, while the arms with torch's optimizer keep separate fp32 master weights and
copy them after each step.

`nearest` is `bf16` without stochastic rounding. `twin` shows the noise: training is chaotic, and
one bit of one initial weight changes every loss some hundred steps later. docs/convergence.md has
the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.certificate import save
from penstock.optim import AdamW
from penstock.optim.formats import Moments
from penstock.optim.sweep import Pool

ARMS = ("torch", "fp32", "bf16", "int8", "nearest", "twin")
"""torch.optim.AdamW; Penstock's with three formats of moments; torch's with moments rounded to
bf16; and torch's with one initial weight changed by one bit."""

HELD_OUT_EVERY = 20
"""One file out of this many is held out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Model, data and hyperparameters, which all arms share."""

    steps: int = 2000
    batch: int = 8
    context: int = 64
    width: int = 96
    layers: int = 4
    heads: int = 4
    lr: float = 1e-3
    warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1
    max_norm: float = 1.0
    look_every: int = 50
    """Number of steps between two points of a curve."""

    def rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


# Text


def read_text() -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return the training bytes, the held-out bytes and a digest of both."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = b"".join(p.read_bytes() for p in files[::HELD_OUT_EVERY])
    learned = b"".join(p.read_bytes() for i, p in enumerate(files) if i % HELD_OUT_EVERY)
    digest = hashlib.sha256(learned + held_out).hexdigest()
    parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (learned, held_out)]
    return parts[0], parts[1], digest


def batches(text: torch.Tensor, study: Study, seed: int) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    span = torch.arange(study.context + 1)
    while True:
        at = torch.randint(text.numel() - study.context - 1, (study.batch, 1), generator=draw)
        yield text[at + span].long()


# Model: bf16 weights and fp32 computation, so that gradients are bf16


class Block(torch.nn.Module):
    def __init__(self, study: Study) -> None:
        super().__init__()
        d, self.heads = study.width, study.heads
        self.attention_norm = torch.nn.Parameter(torch.ones(d))
        self.qkv = weight(3 * d, d)
        self.out = weight(d, d, scale=1 / math.sqrt(2 * study.layers))
        self.mlp_norm = torch.nn.Parameter(torch.ones(d))
        self.up = weight(4 * d, d)
        self.down = weight(d, 4 * d, scale=1 / math.sqrt(2 * study.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, d = x.shape
        inner = F.linear(normed(x, self.attention_norm), self.qkv.float())
        q, k, v = inner.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(batch, length, d), self.out.float())
        return x + F.linear(
            F.gelu(F.linear(normed(x, self.mlp_norm), self.up.float())), self.down.float()
        )


class Model(torch.nn.Module):
    def __init__(self, study: Study) -> None:
        super().__init__()
        self.embedding = weight(256, study.width, scale=math.sqrt(study.width) * 0.02)
        self.position = weight(study.context, study.width, scale=math.sqrt(study.width) * 0.02)
        self.blocks = torch.nn.ModuleList(Block(study) for _ in range(study.layers))
        self.norm = torch.nn.Parameter(torch.ones(study.width))

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Return the mean loss in nats per byte, over all bytes of a window but the first."""
        embedding = self.embedding.float()
        x = F.embedding(window[:, :-1], embedding) + self.position.float()
        for block in self.blocks:
            x = block(x)
        logits = F.linear(normed(x, self.norm), embedding)
        return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def weight(rows: int, columns: int, scale: float = 1.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(rows, columns) * (scale / math.sqrt(columns)))


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], gain.float())


# Optimizers. Each is a function that runs one step with a given learning rate.

Step = Callable[[float], None]


def groups_of(params: list[torch.Tensor], study: Study) -> list[dict[str, object]]:
    """Return parameter groups with weight decay for matrices and none for vectors."""
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": study.weight_decay},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def our_step(model: Model, study: Study, moments: Moments, seed: int) -> Step:
    groups = groups_of(list(model.parameters()), study)
    optimizer = AdamW(groups, betas=study.betas, moments=moments, seed=seed, pool=Pool(1))

    def step(lr: float) -> None:
        set_rate(optimizer, lr)
        optimizer.step()

    return step


def torch_step(model: Model, study: Study, *, nearest: bool) -> Step:
    weights = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in weights]
    optimizer = torch.optim.AdamW(groups_of(masters, study), betas=study.betas)

    def step(lr: float) -> None:
        set_rate(optimizer, lr)
        for w, master in zip(weights, masters, strict=True):
            assert w.grad is not None
            master.grad = w.grad.float()
        optimizer.step()
        with torch.no_grad():
            for w, master in zip(weights, masters, strict=True):
                w.copy_(master)
                if nearest:
                    for name in ("exp_avg", "exp_avg_sq"):
                        moment = optimizer.state[master][name]
                        moment.copy_(moment.bfloat16())

    return step


def make_step(arm: str, model: Model, study: Study, seed: int) -> Step:
    if arm in ("torch", "nearest", "twin"):
        return torch_step(model, study, nearest=arm == "nearest")
    return our_step(model, study, arm, seed)  # type: ignore[arg-type]


# Runs


@torch.no_grad()
def held_out_loss(model: Model, held_out: torch.Tensor, study: Study, windows: int) -> float:
    """Return the mean loss over evenly spaced windows, which are the same every time."""
    begins = torch.linspace(0, held_out.numel() - study.context - 1, windows).long()
    span = torch.arange(study.context + 1)
    parts = (held_out[at[:, None] + span].long() for at in begins.split(64))
    return statistics.fmean(float(model(part)) for part in parts)


def run(arm: str, seed: int, study: Study) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    texts = read_text()
    model = Model(study).bfloat16()
    if arm == "twin":
        first_row = model.embedding.data[0]
        first_row[0] = torch.nextafter(first_row[0], first_row.new_tensor(1.0))
    step = make_step(arm, model, study, seed)
    began, curve, recent = time.perf_counter(), [], []
    for i, window in zip(range(study.steps), batches(texts[0], study, seed), strict=False):
        model.zero_grad()
        loss = model(window)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), study.max_norm)
        step(study.rate(i))
        recent.append(loss.item())
        if (i + 1) % study.look_every == 0:
            curve.append(
                [i + 1, statistics.fmean(recent), held_out_loss(model, texts[1], study, 64)]
            )
            recent.clear()
    return {
        "arm": arm,
        "seed": seed,
        "held_out": held_out_loss(model, texts[1], study, 2048),
        "seconds": time.perf_counter() - began,
        "curve": [[at, round(a, 5), round(b, 5)] for at, a, b in curve],
    }


def run_one(task: tuple[str, int, Study]) -> dict[str, Any]:
    return run(*task)


# Results


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, object]]:
    """Return the held-out loss of each arm over seeds, and its difference to torch's per seed."""
    final = {(r["arm"], r["seed"]): r["held_out"] for r in runs}
    found: dict[str, dict[str, object]] = {}
    for arm in dict.fromkeys(arm for arm, _ in final):
        losses = [loss for (a, _), loss in final.items() if a == arm]
        apart = [
            loss - final["torch", seed]
            for (a, seed), loss in final.items()
            if a == arm and ("torch", seed) in final
        ]
        found[arm] = {
            "mean": statistics.fmean(losses),
            "spread": statistics.stdev(losses) if len(losses) > 1 else None,
            "from_torch": statistics.fmean(apart) if apart else None,
            "from_torch_spread": statistics.stdev(apart) if len(apart) > 1 else None,
        }
    return found


def plot(result: Path, image: Path) -> None:
    """Plot the held-out loss by step, mean and range over seeds, and its difference to torch's."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    runs = json.loads(result.read_text())["results"]["runs"]
    arms = list(dict.fromkeys(r["arm"] for r in runs))
    curves = {
        arm: torch.tensor([[point[2] for point in r["curve"]] for r in runs if r["arm"] == arm])
        for arm in arms
    }
    steps = [point[0] for point in runs[0]["curve"]]
    figure, (whole, apart) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for arm, curve in curves.items():
        for axes, value in ((whole, curve), (apart, curve - curves["torch"])):
            (line,) = axes.plot(steps, value.mean(0), label=arm, linewidth=1.2)
            low, high = value.amin(0), value.amax(0)
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    whole.set(xlabel="step", ylabel="held-out loss, nats per byte", ylim=(1.6, 3.2))
    apart.set(xlabel="step", ylabel="difference to torch, same seed", ylim=(-0.04, 0.04))
    whole.legend()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=110)


def show(found: dict[str, dict[str, object]]) -> None:
    for arm, figures in found.items():
        print(f"{arm:8}", {k: v if v is None else round(float(v), 5) for k, v in figures.items()})  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=Study().steps)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of concurrent runs, one thread each"
    )
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("RESULT", "IMAGE"))
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
    else:
        compare(Study(steps=args.steps), args.seeds, args.arms, args.jobs)


def compare(study: Study, seeds: list[int], arms: list[str], jobs: int) -> None:
    """Run every arm with every seed, and write the results after each run."""
    learned, held_out, digest = read_text()
    about = {
        "study": asdict(study),
        "parameters": sum(p.numel() for p in Model(study).parameters()),
        "text": {"learned": learned.numel(), "held_out": held_out.numel(), "sha256": digest},
    }
    task = [(arm, seed, study) for seed in seeds for arm in arms]
    runs: list[dict[str, Any]] = []
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for done in pool.imap(run_one, task):
            runs.append(done)
            print(f"seed {done['seed']} {done['arm']:8} {done['held_out']:.4f}", flush=True)
            path = save("convergence", {**about, "summary": summary(runs), "runs": runs})
    show(summary(runs))
    print(path)


if __name__ == "__main__":
    main()
