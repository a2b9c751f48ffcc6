"""Tiny models, data and arguments for tests of trainers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from penstock.integrations import PenstockConfig
from tests.support.engines import tiny_config

SMALL = PenstockConfig(hbm="64MiB", dram="64MiB", self_check=False, show_plan=False)
"""Budgets in which a tiny model streams."""

TIMES = ("runtime", "per_second", "preparation_time")
"""Parts of names of logged values that are times."""


def tiny_model(family: str = "llama", **changes: Any) -> Any:
    """Return a new model in fp32, with the same weights in every call."""
    config = tiny_config(family, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def examples(count: int, seed: int = 1, longest: int = 40) -> list[dict[str, list[int]]]:
    """Return examples of different lengths, whose first third is not trained."""
    drawn = random.Random(seed)
    found = []
    for _ in range(count):
        ids = [drawn.randrange(3, 260) for _ in range(drawn.randrange(3, longest))]
        found.append({"input_ids": ids, "labels": [-100] * (len(ids) // 3) + ids[len(ids) // 3 :]})
    return found


def pad(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad examples on the right to the longest of them."""
    longest = max(len(each["input_ids"]) for each in batch)

    def column(name: str, padding: int) -> torch.Tensor:
        rows = [each[name] + [padding] * (longest - len(each[name])) for each in batch]
        return torch.tensor(rows)

    mask = [[1] * len(e["input_ids"]) + [0] * (longest - len(e["input_ids"])) for e in batch]
    return {
        "input_ids": column("input_ids", 0),
        "labels": column("labels", -100),
        "attention_mask": torch.tensor(mask),
    }


def arguments(out: Path, **changes: Any) -> transformers.TrainingArguments:
    """Return arguments with accumulation, clipping that is active, a schedule and weight decay."""
    common: dict[str, Any] = {
        "output_dir": str(out), "per_device_train_batch_size": 3, "gradient_accumulation_steps": 4,
        "max_steps": 6, "learning_rate": 3e-3, "lr_scheduler_type": "cosine", "warmup_steps": 3,
        "weight_decay": 0.1, "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 7,
    }  # fmt: skip
    return transformers.TrainingArguments(**(common | changes))


def compare_logs(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float = 1e-5
) -> None:
    """Raise AssertionError unless both logs have the same values, apart from times."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        names = {name for name in mine if not any(time in name for time in TIMES)}
        assert names == {name for name in other if not any(time in name for time in TIMES)}
        for name in names:
            assert abs(mine[name] - other[name]) <= tolerance * abs(other[name]), (
                name,
                mine,
                other,
            )


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two models' parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)
