"""Fine-tune a small model with transformers' Trainer and Penstock's engine, without a GPU.

    python examples/trainer.py

The lines marked with (1), (2) and (3) are those that change in a script that uses `Trainer`.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from penstock.integrations import PenstockConfig, PenstockTrainer  # (1)

TEXT = "Water runs down the pipe to the turbine. "


def examples(count: int) -> list[dict[str, list[int]]]:
    """Return texts of different lengths as bytes; every byte is a token."""
    texts = [(TEXT * 3)[start : start + 40 + start % 30] for start in range(count)]
    return [{"input_ids": list(text.encode()), "labels": list(text.encode())} for text in texts]


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad on the right; padding has the label -100."""
    longest = max(len(each["input_ids"]) for each in batch)
    gaps = [longest - len(each["input_ids"]) for each in batch]
    pairs = list(zip(batch, gaps, strict=True))
    return {
        "input_ids": torch.tensor([each["input_ids"] + [0] * gap for each, gap in pairs]),
        "labels": torch.tensor([each["labels"] + [-100] * gap for each, gap in pairs]),
        "attention_mask": torch.tensor([[1] * len(each["labels"]) + [0] * g for each, g in pairs]),
    }


def main() -> None:
    """Train for a few steps, and let the trained model continue a text."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    out = tempfile.mkdtemp(prefix="penstock-trainer-")
    arguments = TrainingArguments(
        output_dir=out, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=100,
        learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=4, logging_steps=10,
        save_steps=50, report_to=[], use_cpu=True,
    )  # fmt: skip
    trainer = PenstockTrainer(  # (2)
        LlamaForCausalLM(config),
        arguments,
        data_collator=collate,
        train_dataset=examples(64),
        eval_dataset=examples(8),
        penstock=PenstockConfig(hbm="64MiB", dram="256MiB"),  # (3)
    )
    trainer.train()
    print(trainer.evaluate())
    start = torch.tensor([list(b"Water runs")])
    text = trainer.model.generate(start, max_new_tokens=30, do_sample=False)[0]
    print(bytes(text.tolist()).decode(errors="replace"))
    print(f"checkpoints and the model are in {out}")


if __name__ == "__main__":
    main()
