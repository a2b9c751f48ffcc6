"""Compare a run of `penstock train` with the same training in plain transformers.

Only the token ids of each step are taken from Penstock's run, and they are compared with the
tokenizer's. `bench/family_runs.py` runs every family and writes down what it finds.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

from penstock.data.batches import Packed
from penstock.engine.model_source import inspect_model
from penstock.engine.plan_choice import workload_for
from penstock.settings import Settings
from tests.support import engines
from tests.support.document_training import PlainRun, Schedule, train_documents
from tests.support.family_models import FAMILIES, Family, is_text, load_family, save_family
from tests.support.small_tokenizers import WORDS, small_tokenizer
from tests.train.runs import RunResult, run_command

CONTEXT, BATCH, MICRO_BATCH = 32, 3, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

PLACEMENT = ("nddd", "dndh", "hhhn", "ddnd", "nndn")
"""Where blocks store weights, optimizer states, gradients and activations, in turn."""

NOISE = 1e-5
"""Gradients below this, of a norm of at most 1, may be rounding errors. AdamW divides by their
size, so such an element may move in any direction."""

SHARE = 0.1
"""A single tensor may differ by this share of what rounding does to all of them, in the mean."""

GPU_FAMILIES = ("Llama 3", "Qwen 3", "Gemma 3", "Phi 3", "OLMo 2", "GPT-NeoX")


@dataclass(frozen=True)
class Case:
    """A family, and how it is trained."""

    family: Family
    packed: bool
    dtype: str = "fp32"
    device: str = "cpu"
    """Where the plain model is. Penstock uses a GPU if there is one."""
    budget: tuple[str, ...] = ()
    """Budgets of the run; by default, a plan that streams from DRAM and a disk."""
    schedule: Schedule = field(default_factory=Schedule)


def gpu_case(name: str, device: str = "cuda") -> Case:
    """Return a run with the defaults of a GPU: compiled layers and Penstock's kernels."""
    # Heads as wide as the attention kernels want them, and weights for which losses in bf16 are
    # exact enough to compare.
    family = FAMILIES[name]
    wide = {**family.changes, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    family = dataclasses.replace(family, changes=wide, noise=0.05)
    return Case(family, True, "bf16", device, ("--hbm", "6GiB", "--dram", "1GiB"))


@dataclass(frozen=True)
class Difference:
    """How far two runs are apart."""

    loss: float
    """Largest relative difference of a loss."""
    loss_absolute: float
    """Largest difference of a loss."""
    norm: float
    """Largest relative difference of a gradient norm."""
    weight: float
    """Largest difference of an element after the last step, in units of the learning rate."""
    tensor: str
    """The tensor with this element."""


@dataclass(frozen=True)
class Comparison:
    """Penstock's run and the plain one."""

    difference: Difference
    spread: Difference | None
    """Difference between the plain run and the same in fp64; None in other types than fp32."""
    excess: float | None
    """Largest difference of a tensor's weights, as a multiple of what rounding does to it."""
    excess_tensor: str
    """The tensor with this difference."""
    first_loss: float
    last_loss: float


def compare(case: Case, folder: Path) -> Comparison:
    """Train both ways from the same files, and compare losses, norms and weights.

    In fp32, the plain model is also trained in fp64: the difference is what rounding does.
    """
    tokenizer = small_tokenizer(None)
    model = save_family(case.family, folder / "model", vocabulary=len(tokenizer))
    tokenizer.save_pretrained(model)
    texts = make_texts(packed=case.packed)
    batches, result = _train(case, model, texts, folder)
    steps = [split_documents(batch) for batch in batches]
    assert len(steps) == case.schedule.steps
    check_documents(steps, [tokenizer.encode(text) for text in texts], tokenizer.eos_token_id)
    _check_packing(case, steps, result)
    trained = load_family(case.family, folder / "out", torch.float32)
    ours = PlainRun(
        [event["loss"] for event in result.of("step")],
        [event["grad_norm"] for event in result.of("step")],
        {name: parameter.detach() for name, parameter in trained.named_parameters()},
    )
    plain = _train_plain(case, model, steps, DTYPES[case.dtype])
    exact = _train_plain(case, model, steps, torch.float64) if case.dtype == "fp32" else None
    excess, tensor = weight_excess(ours, plain, exact) if exact else (None, "")
    return Comparison(
        difference(ours, plain, case.schedule.lr),
        difference(exact, plain, case.schedule.lr) if exact else None,
        excess,
        tensor,
        plain.losses[0],
        plain.losses[-1],
    )


def difference(run: PlainRun, plain: PlainRun, lr: float) -> Difference:
    """Return how far a run is from a plain one."""
    worst = (0.0, "")
    for name, weight in plain.weights.items():
        moved = (run.weights[name].cpu() - weight.cpu()).abs() / lr
        moved[plain.gradients[name].cpu() < NOISE] = 0.0
        worst = max(worst, (float(moved.max()), name))
    return Difference(
        max(_relative(run.losses, plain.losses)),
        max(abs(a - b) for a, b in zip(run.losses, plain.losses, strict=True)),
        max(_relative(run.norms, plain.norms)),
        *worst,
    )


def weight_excess(run: PlainRun, plain: PlainRun, exact: PlainRun) -> tuple[float, str]:
    """Return the largest difference of a tensor's weights relative to rounding, and the tensor.

    Differences are root mean squares over the tensor. Rounding is the difference of the plain run
    from itself with gradients in fp64, and the distance of two neighbouring weights in fp32. A
    tensor that rounding happens to change little may differ by a share of what it does to all.
    """
    limits = {name: _rms(exact, plain, name) for name in plain.weights}
    common = SHARE * math.sqrt(sum(limit**2 for limit in limits.values()) / len(limits))
    unit = torch.finfo(torch.float32).eps
    for name, weight in plain.weights.items():
        limits[name] += common + unit * float(weight.double().square().mean().sqrt())
    return max((_rms(run, plain, name) / limits[name], name) for name in limits)


def _rms(run: PlainRun, plain: PlainRun, name: str) -> float:
    moved = run.weights[name].cpu().double() - plain.weights[name].cpu().double()
    kept = moved[plain.gradients[name].cpu() >= NOISE]
    return float(kept.square().mean().sqrt()) if kept.numel() else 0.0


def make_texts(*, packed: bool, count: int = 50) -> list[str]:
    """Return texts of which several fit into a row, or each of which needs more than half of it.

    A third of the long ones is longer than a row and will be truncated.
    """
    words, drawn = WORDS.split(), random.Random(3)
    lengths = (2, 14) if packed else (16, 34)
    return [" ".join(drawn.choices(words, k=drawn.randint(*lengths))) for _ in range(count)]


def split_documents(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the token ids of the documents in a batch, without padding."""
    documents = []
    for ids, labels, positions in zip(
        batch["input_ids"], batch["labels"], batch["position_ids"], strict=True
    ):
        bounds = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for low, high in itertools.pairwise(bounds):
            trained = labels[low + 1 : high] != -100
            if trained.any():
                assert trained.all()
                documents.append(ids[low:high])
    return documents


def check_documents(
    steps: Sequence[Sequence[torch.Tensor]], texts: Sequence[Sequence[int]], end: int
) -> None:
    """Check that the documents of the first epoch are the texts, each once."""
    wanted = sorted([*text, end][:CONTEXT] for text in texts)
    documents = [document.tolist() for step in steps for document in step]
    assert len(documents) >= len(wanted), "the run is shorter than an epoch"
    assert sorted(documents[: len(wanted)]) == wanted


def _check_packing(case: Case, steps: Sequence[Sequence[torch.Tensor]], result: RunResult) -> None:
    """Check that rows had several documents, unless the model does not allow it."""
    most = max(len(documents) for documents in steps)
    if case.packed and "one document per sequence" not in result.errors:
        assert most > 2 * BATCH
    else:
        assert most == BATCH


def _train_plain(
    case: Case, model: Path, steps: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype
) -> PlainRun:
    loaded = load_family(case.family, model, DTYPES[case.dtype]).to(case.device, dtype)
    # Only its multimodal model asks for it: no token is an image.
    inputs = {"token_type_ids": 0} if case.family.kind == "gemma3" else None
    return train_documents(
        loaded, steps, case.schedule, frozen=lambda name: not is_text(name), inputs=inputs
    )


def _train(
    case: Case, model: Path, texts: list[str], folder: Path
) -> tuple[list[dict[str, torch.Tensor]], RunResult]:
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    schedule = case.schedule
    values = {
        "context": CONTEXT, "batch": BATCH, "micro_batch": MICRO_BATCH, "dtype": case.dtype,
        "steps": schedule.steps, "warmup": schedule.warmup, "lr": schedule.lr,
        "weight_decay": schedule.weight_decay, "clip": schedule.clip, "overlong": "truncate",
    }  # fmt: skip
    budget = case.budget or ("--plan", str(_make_plan(model, values, folder)))
    flags = [part for name, value in values.items() for part in (_flag(name), str(value))]
    files = ["--data", str(data), "--out", str(folder / "out"), "--cache", str(folder / "cache")]
    with _recorded_batches() as batches:
        result = run_command(["train", str(model), *files, *flags, *budget, "--json"])
    assert result.code == 0, result.errors
    return batches, result


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _make_plan(model: Path, values: dict[str, object], folder: Path) -> Path:
    """Write a plan that keeps blocks in DRAM and on a disk."""
    settings = Settings.of(values)
    _, inventory = inspect_model(model, settings)
    work = workload_for(inventory, settings, compiled=False)
    rows = [PLACEMENT[i % len(PLACEMENT)] for i in range(len(inventory.blocks))]
    disk, path = folder / "disk", folder / "plan.json"
    disk.mkdir()
    engines.make_plan_of(inventory, work, rows, disk=disk).save(path)
    return path


@contextmanager
def _recorded_batches() -> Iterator[list[dict[str, torch.Tensor]]]:
    batches = []
    assemble = Packed.assemble

    def record(self: Packed, numbers: object) -> dict[str, torch.Tensor]:
        batches.append(assemble(self, numbers))
        return {name: tensor.clone() for name, tensor in batches[-1].items()}

    with mock.patch.object(Packed, "assemble", record):
        yield batches


def _relative(ours: Sequence[float], plain: Sequence[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(ours, plain, strict=True)]
