"""A script that trains with a trainer, to be killed: `python -m tests.integrations.trainer_run`.

Arguments are the output directory, the budgets as JSON, `--resume` to continue, and `--kill STEP`
to end the process with SIGKILL after a step. With `--in-save`, it ends while the checkpoint of that
step is written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from penstock.integrations import PenstockTrainer
from tests.support.trainers import SMALL, arguments, examples, pad, tiny_model

STEPS = 9


class Kill(TrainerCallback):
    """Ends the process without a chance to clean up."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class KilledInSave(PenstockTrainer):
    """Is killed between the weights of a checkpoint and the trainer's own state."""

    kill_at = 0

    def _save_rng_state(self, output_dir: str) -> None:
        if self.state.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)


def make_trainer(out: Path, budgets: dict[str, Any], kill: int | None, in_save: bool) -> Any:
    """Return the trainer of the script. Dropout and noise draw numbers."""
    model = tiny_model("gpt2", attn_pdrop=0.0, resid_pdrop=0.1, embd_pdrop=0.1)
    args = arguments(
        out, max_steps=STEPS, save_strategy="steps", save_steps=2, neftune_noise_alpha=5.0
    )
    kind = KilledInSave if in_save else PenstockTrainer
    trainer: Any = kind(
        model, args, pad, examples(41), penstock=replace(SMALL, **budgets),
        callbacks=[Kill(None if in_save else kill)],
    )  # fmt: skip
    trainer.kill_at = kill
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("budgets", type=json.loads)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kill", type=int)
    parser.add_argument("--in-save", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    trainer = make_trainer(given.out, given.budgets, given.kill, given.in_save)
    trainer.train(resume_from_checkpoint=given.resume)
    trainer.save_model(str(given.out / "trained"))


if __name__ == "__main__":
    main()
