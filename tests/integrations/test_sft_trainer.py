"""PenstockSFTTrainer in place of TRL's SFTTrainer: the same losses and the same logs."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.errors import EngineError, SettingsError
from tests.support.small_tokenizers import MARKED, small_tokenizer
from tests.support.trainers import SMALL, compare_logs, largest_difference, tiny_model

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of TRL, about its own options
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

WORDS = ["the", "capital", "of", "France", "is", "Paris", "two", "plus", "three", "Water", "runs"]


def chats(count: int, seed: int) -> Any:
    drawn = random.Random(seed)

    def say(role: str, longest: int) -> dict[str, str]:
        return {
            "role": role,
            "content": " ".join(drawn.choices(WORDS, k=drawn.randint(1, longest))),
        }

    return datasets.Dataset.from_list(
        [{"messages": [say("user", 6), say("assistant", 9)]} for _ in range(count)]
    )


def trainers(out: Path, peft: Any = None, **changes: Any) -> tuple[Any, Any]:
    """Return both trainers, for the same model, data and arguments."""
    from penstock.integrations import PenstockSFTTrainer

    made: list[Any] = []
    for kind, extra in ((trl.SFTTrainer, {}), (PenstockSFTTrainer, {"penstock": SMALL})):
        common: dict[str, Any] = {
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 6,
            "learning_rate": 3e-3, "lr_scheduler_type": "cosine", "weight_decay": 0.1,
            "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": [],
            "use_cpu": True, "disable_tqdm": True, "seed": 7, "max_length": 64, "bf16": False,
            "eval_strategy": "steps", "eval_steps": 3,
        }  # fmt: skip
        args = trl.SFTConfig(output_dir=str(out / kind.__name__), **(common | changes))
        tokenizer = small_tokenizer(MARKED)
        model = tiny_model(vocab_size=len(tokenizer))
        made.append(
            kind(
                model, args, train_dataset=chats(41, 0), eval_dataset=chats(7, 1),
                processing_class=tokenizer, peft_config=peft, **extra,
            )
        )  # fmt: skip
    return made[0], made[1]


def check_equal(theirs: Any, ours: Any) -> None:
    for trainer in (theirs, ours):
        trainer.train()
    compare_logs(ours.state.log_history, theirs.state.log_history)
    assert largest_difference(ours.model, theirs.model) < 1e-5
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= ours.state.log_history[0].keys()


CASES: dict[str, dict[str, Any]] = {
    "loss of the assistant's turns only, 50 steps": {
        "assistant_only_loss": True, "max_steps": 50, "eval_steps": 25,
    },
    "packing": {"packing": True},
    "padding-free": {"padding_free": True, "max_length": None},
    "whole chats": {},
    "packing across documents": {"packing": True, "packing_strategy": "wrapped"},
    "packing, padded": {"packing": True, "pad_to_multiple_of": 16},
    "DFT": {"loss_type": "dft"},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "the end of long chats": {"max_length": 32, "truncation_mode": "keep_end"},
}  # fmt: skip

BY_DEFAULT = 3
"""Number of cases that are not marked `long`."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.long] if number >= BY_DEFAULT else [])
        for number, case in enumerate(CASES)
    ],
)
def test_all_that_is_logged_is_that_of_trl(case: str, tmp_path: Path) -> None:
    check_equal(*trainers(tmp_path, **CASES[case]))


def test_a_run_continues_with_equal_bits(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    _, whole = trainers(tmp_path / "whole", **saving)
    whole.train()
    _, resumed = trainers(tmp_path / "resumed", **saving)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir, "checkpoint-2")))
    assert largest_difference(whole.model, resumed.model) == 0


def test_the_model_works_as_trl_left_it(tmp_path: Path) -> None:
    """TRL replaces the model's forward by one that can return log-probabilities."""
    theirs, ours = trainers(tmp_path, max_steps=1)
    for trainer in (theirs, ours):
        trainer.train()
    ids = torch.tensor([[3, 4, 5, 6]])
    mine, other = (t.model(ids, labels=ids, fused_lm_head=True).log_probs for t in (ours, theirs))
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_an_adapter_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    theirs, ours = trainers(
        tmp_path, config, save_strategy="steps", save_steps=3, eval_strategy="no",
        learning_rate=3e-2,
    )  # fmt: skip
    check_equal(theirs, ours)
    folders = [Path(t.args.output_dir, "checkpoint-6") for t in (theirs, ours)]
    saved = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    assert saved[0].keys() == saved[1].keys()
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, rtol=1e-4, atol=1e-5)
    assert json.loads((folders[1] / "adapter_config.json").read_text())["r"] == 4
    _, resumed = trainers(tmp_path / "again", config, eval_strategy="no", learning_rate=3e-2)
    resumed.train(resume_from_checkpoint=str(folders[1].with_name("checkpoint-3")))
    assert largest_difference(resumed.model, ours.model) == 0


def test_the_error_without_trl_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.integrations import sft_trainer

    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match="pip install trl"):
        sft_trainer._sft_trainer()


def test_offloading_of_activations_is_refused(tmp_path: Path) -> None:
    from penstock.integrations import PenstockSFTTrainer

    args = trl.SFTConfig(str(tmp_path), activation_offloading=True, use_cpu=True, bf16=False)
    with pytest.raises(SettingsError, match="activation_offloading"):
        PenstockSFTTrainer(tiny_model(), args, train_dataset=chats(4, 0))


def test_the_loss_of_another_trainer_of_trl_is_refused(tmp_path: Path) -> None:
    from penstock.integrations import PenstockTrainerMixin

    class Ours(PenstockTrainerMixin, trl.DPOTrainer):
        pass

    with pytest.raises(SettingsError, match="compute_loss: is overridden by DPOTrainer"):
        Ours(tiny_model(), args=trl.DPOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_a_callback_that_reads_weights_is_named(tmp_path: Path) -> None:
    _, ours = trainers(tmp_path)
    ours.add_callback(trl.BEMACallback(update_freq=1))
    with pytest.raises(EngineError) as caught:
        ours.train()
    assert "BEMACallback.on_train_begin" in caught.value.__notes__[0]


def test_an_iterable_dataset_is_evaluated_as_trl_evaluates_it(tmp_path: Path) -> None:
    for trainer in (both := trainers(tmp_path, eval_strategy="no", per_device_eval_batch_size=3)):
        trainer.evaluate(chats(4, 2).to_iterable_dataset())
    compare_logs(both[1].state.log_history, both[0].state.log_history)
