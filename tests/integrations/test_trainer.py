"""PenstockTrainer in place of transformers' Trainer: the same losses, logs, events and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import Trainer, TrainerCallback

from penstock.errors import BatchError, EngineError, SettingsError
from penstock.integrations import PenstockConfig, PenstockTrainer, PenstockTrainerMixin
from tests.support.trainers import (
    SMALL,
    arguments,
    compare_logs,
    examples,
    largest_difference,
    pad,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = examples(41)


def trainers(out: Path, family: str = "llama", penstock: PenstockConfig = SMALL,
             more: Mapping[str, Any] | None = None, **changes: Any) -> tuple[Any, Any]:  # fmt: skip
    """Return both trainers, for the same model, data and arguments."""
    made: list[Any] = []
    for kind, extra in ((Trainer, {}), (PenstockTrainer, {"penstock": penstock})):
        common: dict[str, Any] = {"data_collator": pad, "train_dataset": DATA, **(more or {})}
        args = arguments(out / kind.__name__, **changes)
        made.append(kind(tiny_model(family), args, **common, **extra))
    return made[0], made[1]


def check_equal(theirs: Any, ours: Any) -> None:
    """Train with both, and compare all that is logged and the trained weights."""
    for trainer in (theirs, ours):
        transformers.set_seed(trainer.args.seed)  # as the constructor did before the other one ran
        trainer.train()
    compare_logs(ours.state.log_history, theirs.state.log_history)
    assert largest_difference(ours.model, theirs.model) < 1e-5


CASES: dict[str, dict[str, Any]] = {
    # 41 examples: the last of 14 micro-batches of an epoch is smaller, its window incomplete
    "accumulation, clipping, cosine, decay, incomplete window": {"max_steps": 50},
    "one micro-batch, no clipping": {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0},
    "epochs": {"max_steps": -1, "num_train_epochs": 2, "lr_scheduler_type": "linear"},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "betas, epsilon, adamw_torch": {
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-6,
        "optim": "adamw_torch",
    },
    "polynomial": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
    "constant with warmup": {"lr_scheduler_type": "constant_with_warmup"},
    "sampling by length": {"train_sampling_strategy": "group_by_length"},
    "logs every third step": {"logging_steps": 3},
    "tokens seen": {"include_num_input_tokens_seen": "all"},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.1},
}


BY_DEFAULT = 4
"""Number of cases that are not marked `long`."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.long] if number >= BY_DEFAULT else [])
        for number, case in enumerate(CASES)
    ],
)
def test_losses_and_weights_are_those_of_trainer(case: str, tmp_path: Path) -> None:
    check_equal(*trainers(tmp_path, **CASES[case]))


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(f, marks=pytest.mark.long) for f in ("qwen3", "gemma3"))]
)
def test_families_and_packed_rows(family: str, tmp_path: Path) -> None:
    check_equal(*trainers(tmp_path, family, replace(SMALL, pack=True)))


def test_iterable_data_with_a_number_of_steps(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(DATA[:36])

    penstock = replace(SMALL, context=64)
    check_equal(*trainers(tmp_path, penstock=penstock, more={"train_dataset": Stream()}))


def test_iterable_data_needs_a_context(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(DATA)

    _, ours = trainers(tmp_path, more={"train_dataset": Stream()})
    with pytest.raises(SettingsError, match=r"context.*Stream, which is read only once; pass Pens"):
        ours.train()


# Evaluation.


def accuracy(prediction: Any) -> dict[str, float]:
    """Compute a metric that depends on every logit's position."""
    best = prediction.predictions.argmax(-1)[:, :-1]
    labels = prediction.label_ids[:, 1:]
    return {
        "accuracy": float((best == labels)[labels != -100].mean()),
        "largest": float(prediction.predictions[:, 0].max()),
    }


def test_evaluation_during_training(tmp_path: Path) -> None:
    check_equal(
        *trainers(
            tmp_path, eval_strategy="steps", eval_steps=2, eval_on_start=True,
            per_device_eval_batch_size=5,
            more={"eval_dataset": {"a": examples(7, 2), "b": examples(4, 3)},
                  "compute_metrics": accuracy},
        )
    )  # fmt: skip


def test_evaluate_and_predict_before_and_after_training(tmp_path: Path) -> None:
    theirs, ours = trainers(
        tmp_path, max_steps=2, more={"eval_dataset": examples(7, 2), "compute_metrics": accuracy}
    )
    for _ in range(2):
        mine, other = (t.evaluate() for t in (ours, theirs))
        assert mine["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)
        assert mine["eval_accuracy"] == other["eval_accuracy"]
        mine, other = (t.predict(examples(5, 4)) for t in (ours, theirs))
        counts = mine.label_ids != -100  # nothing is promised about padding
        np.testing.assert_allclose(
            mine.predictions[counts], other.predictions[counts], rtol=1e-4, atol=1e-5
        )
        assert (mine.label_ids == other.label_ids).all()
        assert mine.metrics["test_loss"] == pytest.approx(other.metrics["test_loss"], rel=1e-5)
        theirs.train()
        ours.train()
        ours.model(torch.tensor([[1, 2, 3]]))  # has its weights


def test_prediction_without_labels(tmp_path: Path) -> None:
    theirs, ours = trainers(tmp_path)
    test = [{"input_ids": e["input_ids"][:3]} for e in examples(5, 4)]
    for trainer in (theirs, ours):
        trainer.data_collator = transformers.default_data_collator
    mine, other = (t.predict(test) for t in (ours, theirs))
    np.testing.assert_allclose(mine.predictions, other.predictions, atol=1e-5)
    assert mine.label_ids is None


def test_a_batch_without_trained_tokens_has_no_loss(tmp_path: Path) -> None:
    data = [{"input_ids": [3, 4, 5], "labels": [-100] * 3}]
    theirs, ours = trainers(tmp_path, more={"eval_dataset": data})
    assert np.isnan(theirs.evaluate()["eval_loss"])
    assert np.isnan(ours.evaluate()["eval_loss"])


# Events.


class Recorder(TrainerCallback):
    """Lists the events with the step, the learning rate and whether gradients are accumulated."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = kwargs.get("optimizer")
            rate = None if optimizer is None else optimizer.param_groups[0]["lr"]
            self.events.append((name, state.global_step, rate))

        return note


def test_callbacks_are_called_in_the_same_order(tmp_path: Path) -> None:
    recorders = []
    for trainer in trainers(
        tmp_path, max_steps=-1, num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch",
        more={"eval_dataset": examples(5, 2)},
    ):  # fmt: skip
        recorders.append(Recorder())
        trainer.add_callback(recorders[-1])
        trainer.train()
    assert recorders[0].events == recorders[1].events
    kinds = {name for name, _, _ in recorders[1].events}
    assert kinds >= {"on_train_begin", "on_pre_optimizer_step", "on_optimizer_step",
                     "on_substep_end", "on_step_end", "on_log", "on_evaluate", "on_save",
                     "on_epoch_end", "on_train_end"}  # fmt: skip


def test_a_callback_that_stops_the_run(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 3

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["model"](torch.tensor([[1, 2]]))  # has its weights

    check_equal(*trainers(tmp_path, more={"callbacks": [Stop()]}))


def test_a_model_that_is_called_during_training_says_what_to_do(tmp_path: Path) -> None:
    class Call(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["model"](torch.tensor([[1, 2]]))

    _, ours = trainers(tmp_path, more={"callbacks": [Call()]})
    with pytest.raises(EngineError, match="the weights as they are now"):
        ours.train()
    ours.model(torch.tensor([[1, 2]]))  # the engine has given the weights back


def test_early_stopping_and_the_best_model(tmp_path: Path) -> None:
    class Worse(TrainerCallback):
        """Makes the second evaluation the best one."""

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["metrics"]["eval_quality"] = -abs(state.global_step - 2)

    both = trainers(
        tmp_path, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="quality",
        greater_is_better=True, max_steps=8,
        more={"eval_dataset": examples(5, 2),
              "callbacks": [Worse(), transformers.EarlyStoppingCallback(3)]},
    )  # fmt: skip
    check_equal(*both)
    assert both[1].state.global_step == 5
    assert both[1].state.best_global_step == 2
    kept = [sorted(p.name for p in Path(t.args.output_dir).iterdir()) for t in both]
    assert kept[0] == kept[1] == ["checkpoint-2"]


# Saving.


def test_the_saved_model_is_the_trained_one(tmp_path: Path) -> None:
    class Save(TrainerCallback):
        trainer: Any

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                for _ in range(2):  # the second one replaces the first
                    self.trainer.save_model(str(tmp_path / "during"))

    theirs, ours = trainers(tmp_path, max_steps=2, more={"callbacks": [save := Save()]})
    for trainer in (theirs, ours):
        save.trainer = trainer
        trainer.train()
        trainer.save_model(str(tmp_path / "after"))
        for folder in ("during", "after"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            assert largest_difference(loaded, trainer.model) == 0
            assert (tmp_path / folder / "training_args.bin").exists()


def test_checkpoints_have_the_names_that_trainer_gives_them(tmp_path: Path) -> None:
    both = trainers(tmp_path, save_strategy="steps", save_steps=2, save_total_limit=2)
    for trainer in both:
        trainer.train()
    names = [sorted(p.name for p in Path(t.args.output_dir).iterdir()) for t in both]
    assert names[0] == names[1] == ["checkpoint-4", "checkpoint-6"]
    theirs, ours = (
        {p.name for p in Path(t.args.output_dir, "checkpoint-6").iterdir()} for t in both
    )
    assert theirs - ours == {"optimizer.pt"}
    assert ours - theirs == {"optimizer.safetensors", "training_state.json", "complete.json"}
    state = json.loads(Path(both[1].args.output_dir, "checkpoint-6/trainer_state.json").read_text())
    assert state["global_step"] == 6


def test_the_folder_that_is_pushed_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: dict[str, list[str]] = {}

    def upload(*, folder_path: str, **_: Any) -> Any:
        pushed[folder_path] = sorted(path.name for path in Path(folder_path).iterdir())
        return SimpleNamespace(is_done=lambda: True, done=lambda: True, result=lambda: None)

    hub = SimpleNamespace(
        create_repo=lambda *_, **__: SimpleNamespace(repo_id="me/model"), upload_folder=upload
    )
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    both = trainers(
        tmp_path, max_steps=2, save_strategy="steps", save_steps=2, push_to_hub=True,
        hub_model_id="me/model",
    )  # fmt: skip
    for trainer in both:
        trainer.train()
    theirs, ours = (pushed[trainer.args.output_dir] for trainer in both)
    assert ours == theirs
    assert "model.safetensors" in ours


def test_a_skipped_step_leaves_the_learning_rate(tmp_path: Path) -> None:
    rates = []

    class Overflow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append((ours.engine.skipped, kwargs["optimizer"].param_groups[0]["lr"]))
            ours.engine.scale.value = 2.0**40  # no gradient in fp16 survives it

    _, ours = trainers(
        tmp_path, penstock=replace(SMALL, dtype="fp16"), max_steps=3, warmup_steps=0,
        more={"callbacks": [Overflow()]},
    )  # fmt: skip
    ours.train()
    assert [skipped for skipped, _ in rates] == [False, True, True]
    assert rates[0][1] == rates[1][1] == rates[2][1] < ours.args.learning_rate


# Arguments that cannot be followed.


def test_an_own_loss_names_the_other_path(tmp_path: Path) -> None:
    class Own(PenstockTrainer):
        def compute_loss(self, *_: Any, **__: Any) -> Any: ...

    with pytest.raises(SettingsError, match=r"compute_loss: is overridden by Own.*penstock.stream"):
        Own(tiny_model(), arguments(tmp_path), train_dataset=DATA)
    with pytest.raises(SettingsError, match=r"compute_loss_func.*penstock.stream"):
        PenstockTrainer(tiny_model(), arguments(tmp_path), compute_loss_func=lambda *_: None)


def test_a_mixin_for_a_trainer_of_your_own(tmp_path: Path) -> None:
    class Mine(Trainer):
        seen = 0

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            self.seen += 1
            super().log(logs, start_time)

    class Ours(PenstockTrainerMixin, Mine):
        pass

    trainer = Ours(tiny_model(), arguments(tmp_path, max_steps=2), pad, DATA, penstock=SMALL)
    trainer.train()
    assert trainer.seen == 3


def test_an_optimizer_of_your_own_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingsError, match=r"optimizers: cannot be passed.*learning_rate"):
        PenstockTrainer(model, arguments(tmp_path), optimizers=(own, None))


REFUSED = {
    "fsdp": {"fsdp": "full_shard"},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "use_liger_kernel": {"use_liger_kernel": True},
    "debug": {"debug": [transformers.debug_utils.DebugOption.UNDERFLOW_OVERFLOW]},
    "optim": {"optim": "adafactor"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_penstock_cannot_follow(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    for field, value in REFUSED[name].items():
        setattr(args, field, value)
    with pytest.raises(SettingsError) as found:
        PenstockTrainer(tiny_model(), args, pad, DATA, penstock=SMALL)
    assert found.value.field == name


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.deepspeed = "ds_config.json"
    with pytest.raises(SettingsError, match="deepspeed: is another engine"):
        PenstockTrainer(tiny_model(), args, pad, DATA)


def test_several_visible_gpus_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(SettingsError, match="CUDA_VISIBLE_DEVICES=0"):
        PenstockTrainer(tiny_model(), args, pad, DATA)


def new_model() -> Any:
    """Return a model; Trainer calls this without arguments."""
    return tiny_model()


def test_a_search_for_hyperparameters_is_refused(tmp_path: Path) -> None:
    trainer = PenstockTrainer(None, arguments(tmp_path), pad, DATA, model_init=new_model)
    with pytest.raises(SettingsError, match="hyperparameter_search: is not supported"):
        trainer.hyperparameter_search()


def test_a_function_that_makes_the_model(tmp_path: Path) -> None:
    check_equal(
        *(
            kind(None, arguments(tmp_path), pad, DATA, model_init=new_model, **extra)
            for kind, extra in ((Trainer, {}), (PenstockTrainer, {"penstock": SMALL}))
        )
    )


@pytest.mark.parametrize("enabled_by", ["arguments", "model"])
def test_gradient_checkpointing_is_switched_off(enabled_by: str, tmp_path: Path) -> None:
    theirs, ours = trainers(tmp_path, gradient_checkpointing=enabled_by == "arguments")
    if enabled_by == "model":
        ours.model.gradient_checkpointing_enable()
    check_equal(theirs, ours)
    assert not ours.args.gradient_checkpointing


def test_sequences_that_are_too_long(tmp_path: Path) -> None:
    _, ours = trainers(tmp_path, penstock=replace(SMALL, context=16))
    with pytest.raises(BatchError, match=r"has \d+ tokens, but memory was planned for 16.*context"):
        ours.train()


def test_labels_of_padding_must_not_count(tmp_path: Path) -> None:
    def collate(batch: Any) -> Any:
        made = pad(batch)
        made["labels"][made["attention_mask"] == 0] = 0
        return made

    _, ours = trainers(tmp_path, more={"data_collator": collate})
    with pytest.raises(BatchError, match=r"Trainer counts \d+ trained tokens.*must be -100"):
        ours.train()


def test_padding_on_the_left_is_refused(tmp_path: Path) -> None:
    def collate(batch: Any) -> Any:
        return {name: tensor.flip(1) for name, tensor in pad(batch).items()}

    _, ours = trainers(tmp_path, more={"data_collator": collate})
    with pytest.raises(BatchError, match='padding_side = "right"'):
        ours.train()


def test_batches_without_labels_are_refused(tmp_path: Path) -> None:
    def collate(batch: Any) -> Any:
        return {"input_ids": pad(batch)["input_ids"]}

    _, ours = trainers(tmp_path, more={"data_collator": collate})
    with pytest.raises(BatchError, match="no labels"):
        ours.train()


def test_what_the_model_predicted_is_noted_in_training_and_in_evaluation(tmp_path: Path) -> None:
    """A trainer of TRL logs it: the entropy and the accuracy of the predicted tokens."""
    noted: list[tuple[int, int, bool]] = []

    class Noting(PenstockTrainer):
        def _note_tokens(
            self, micro_batches: Any, window: Any, values: Any, *, training: bool
        ) -> None:
            noted.append((len(micro_batches), window.owners.shape[0], training))

    args = arguments(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2)
    trainer: Any = Noting(
        tiny_model(), args, pad, DATA[:24], eval_dataset=DATA[24:29], penstock=SMALL
    )
    trainer.train()

    assert noted == [(4, 12, True), (4, 12, True), (1, 5, False)]
