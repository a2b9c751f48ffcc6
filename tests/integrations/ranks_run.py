"""A script that trains with a trainer, for torchrun: `python -m tests.integrations.ranks_run`.

Arguments are the output directory and a JSON object: `args` are training arguments, `penstock`
budgets, `model` changes of the config of a `family`. With `iterable`, the data for evaluation have
no length. It trains, evaluates and saves the model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from penstock.integrations import PenstockTrainer
from tests.support.small_tokenizers import MARKED, small_tokenizer
from tests.support.trainers import SMALL, arguments, examples, pad, tiny_model


class Notes(TrainerCallback):
    """Notes what callbacks see on each rank, and kills or fails as the test wants it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.kill, self.save_alone = options.get("kill"), options.get("save_alone")
        self.seen: list[Any] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append([state.global_step, args.process_index, state.is_world_process_zero])
        if state.global_step == self.kill and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == self.save_alone and state.is_world_process_zero:
            self.trainer.save_model()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(["save", state.global_step])


def accuracy(prediction: Any) -> dict[str, float]:
    """Return how many tokens are predicted, and their sum, which shows all logits."""
    counted = prediction.label_ids[:, 1:] != -100
    hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"hits": int((hits & counted).sum()), "sum": float(prediction.predictions.sum())}


def adapted(model: Any, rank: int) -> Any:
    """Put a LoRA adapter into a model, with other random weights on each rank."""
    import peft

    torch.manual_seed(100 + rank)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def chats(count: int, seed: int) -> Any:
    """Return chats of a few words, for TRL."""
    import datasets

    drawn, words = random.Random(seed), ["Paris", "is", "the", "capital", "of", "France", "two"]

    def say(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(drawn.choices(words, k=drawn.randint(1, 9)))}

    made = [{"messages": [say("user"), say("assistant")]} for _ in range(count)]
    return datasets.Dataset.from_list(made)


def make_sft_trainer(out: Path, options: dict[str, Any]) -> Any:
    """Return TRL's trainer with Penstock's engine."""
    import trl

    from penstock.integrations import PenstockSFTTrainer

    given = {"max_length": 64, "bf16": False, "learning_rate": 3e-3, "max_grad_norm": 0.5}
    given |= {"logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 7}
    args = trl.SFTConfig(output_dir=str(out), **(given | options["args"]))
    tokenizer = small_tokenizer(MARKED)
    return PenstockSFTTrainer(
        tiny_model(vocab_size=len(tokenizer)), args, train_dataset=chats(41, 0),
        eval_dataset=chats(7, 1), processing_class=tokenizer,
        penstock=replace(SMALL, **options["penstock"]),
    )  # fmt: skip


class Stream(torch.utils.data.IterableDataset[Any]):
    """Examples without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def make_trainer(out: Path, options: dict[str, Any]) -> Any:
    """Return the trainer that the options describe."""
    if options.get("sft"):
        return make_sft_trainer(out, options)
    model = tiny_model(options.get("family", "llama"), **options.get("model", {}))
    args = arguments(out, **options.get("args", {}))
    if options.get("lora"):
        model = adapted(model, args.process_index)
    rows = examples(options.get("examples", 41))
    if options.get("sharded"):
        rows = rows[args.process_index :: args.world_size]
    held_out: Any = examples(11, seed=2)
    return PenstockTrainer(
        model, args, pad, rows, Stream(held_out) if options.get("iterable") else held_out,
        penstock=replace(SMALL, **options.get("penstock", {})),
        compute_metrics=accuracy if options.get("metrics") else None,
    )  # fmt: skip


def train(out: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train, evaluate and save the model, and return what this process saw."""
    trainer, notes = make_trainer(out, options), Notes(options)
    trainer.add_callback(notes)
    notes.trainer, args = trainer, trainer.args
    trainer.train(resume_from_checkpoint=options.get("resume", False))
    metrics = trainer.evaluate()
    trainer.save_model(str(out / "trained"))
    sums = {name: float(p.detach().double().sum()) for name, p in trainer.model.named_parameters()}
    return {
        "log": trainer.state.log_history, "metrics": metrics, "seen": notes.seen, "sums": sums,
        "zero": trainer.is_world_process_zero(), "world": args.world_size,
        "total_flos": trainer.state.total_flos, "rank": args.process_index,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("options", type=json.loads)
    given = parser.parse_args()
    torch.set_num_threads(1)
    record = train(given.out, given.options)
    (given.out / f"rank-{record['rank']}.json").write_text(json.dumps(record))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
