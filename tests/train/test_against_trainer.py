"""Losses match those of transformers' Trainer on the same tensors.

The Trainer keeps fp32 weights and computes in bf16 with autocast. Penstock computes with bf16
weights and stores their fp32 masters elsewhere. Both do the same computation with different
rounding, so losses agree within the resolution of bf16, but not to the bit. tests/equivalence
compares Penstock with a plain training loop, to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import SequentialSampler

from penstock.data import Packed, load_tokenizer, open_dataset
from penstock.train.learning_rate import LearningRateSchedule
from tests.train.runs import RESIDENT, Runs

BATCH, MICRO_BATCH = 4, 2

TOLERANCE = 0.01
"""Maximum difference of one loss, while losses fall from 6 to 2; the mean difference may be a fifth
of it. The largest difference measured is 0.0024, and the mean 0.0007."""

FLAGS = ("--lr", "3e-3", "--warmup", "10", "--weight-decay", "0.1")


class InOrder(transformers.Trainer):  # type: ignore[misc]
    """A Trainer that reads the rows in order, with Penstock's schedule."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        rate = LearningRateSchedule("cosine", 10, num_training_steps)
        self.lr_scheduler = rate.scheduler(self.optimizer, taken=0, peak=3e-3)
        return self.lr_scheduler

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def same_document(positions: torch.Tensor) -> torch.Tensor:
    """Return the attention mask of packed documents, with shape [rows, 1, T, T]."""
    documents = (positions == 0).cumsum(1)
    length = positions.shape[1]
    before = torch.ones(length, length, dtype=torch.bool).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & before)[:, None]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {**batch, "attention_mask": same_document(batch["position_ids"])}


def rows_of(packed: Packed, steps: int) -> list[dict[str, torch.Tensor]]:
    rows = []
    for batch in packed.batches(BATCH, steps=steps):
        rows += [{name: tensor[i] for name, tensor in batch.items()} for i in range(BATCH)]
    return rows


def trainer_losses(model: Path, packed: Packed, steps: int, folder: Path) -> list[float]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=BATCH // MICRO_BATCH,
        learning_rate=3e-3,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = rows_of(packed, steps)
    trainer = InOrder(plain, arguments, data_collator=collate, train_dataset=rows)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(
    ("steps", "share"), [(30, 0.8), pytest.param(100, 0.5, marks=pytest.mark.long)]
)
def test_losses_match_those_of_the_trainer(
    steps: int, share: float, runs: Runs, tmp_path: Path
) -> None:
    """The loss falls to a share of the first, so that the agreement is not that of an idle run."""
    result = runs.run(tmp_path / "out", *RESIDENT, *FLAGS, "--steps", str(steps))
    assert result.code == 0, result.errors
    ours = torch.tensor(list(result.losses.values()))
    dataset = open_dataset(str(runs.data), load_tokenizer(runs.model), cache_dir=tmp_path / "cache")
    train, _ = dataset.split(0.2)

    theirs = torch.tensor(trainer_losses(runs.model, train.pack(32), steps, tmp_path / "trainer"))

    assert len(theirs) == steps
    assert theirs[-1] < share * theirs[0]
    gap = (ours - theirs).abs()
    assert gap.max() < TOLERANCE
    assert gap.mean() < TOLERANCE / 5
