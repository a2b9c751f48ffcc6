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
             more: Mapping[str, Any] | None = None, model: Any = None,
             **changes: Any) -> tuple[Any, Any]:  # fmt: skip
    """Return both trainers, for the same model, data and arguments."""
    made: list[Any] = []
    for kind, extra in ((Trainer, {}), (PenstockTrainer, {"penstock": penstock})):
        common: dict[str, Any] = {"data_collator": pad, "train_dataset": DATA, **(more or {})}
        args = arguments(out / kind.__name__, **changes)
        made.append(kind((model or tiny_model)(family), args, **common, **extra))
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


# How Trainer counts and weights tokens.


ALL_TRAINED = [{**e, "labels": e["input_ids"]} for e in examples(29)]


def own_class(_family: str) -> Any:
    """Return a model whose class says nothing about its loss, so that Trainer counts all labels."""

    class Mine(transformers.LlamaForCausalLM):
        pass

    made = tiny_model()
    own = Mine(made.config)
    own.load_state_dict(made.state_dict())
    return own


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("family", ["gpt2", "a class of your own"])
def test_labels_of_first_tokens_count_where_trainer_counts_them(
    family: str, accumulation: int, tmp_path: Path
) -> None:
    theirs, ours = trainers(
        tmp_path, family, model=tiny_model if family == "gpt2" else own_class, max_steps=3,
        gradient_accumulation_steps=accumulation, eval_strategy="steps", eval_steps=2,
        more={"train_dataset": ALL_TRAINED, "eval_dataset": ALL_TRAINED[:7]},
    )  # fmt: skip
    assert not theirs._loss_shifts_labels
    check_equal(theirs, ours)


def test_other_labels_that_trainer_counts_wrongly_are_an_error_for_these_models(
    tmp_path: Path,
) -> None:
    def collate(batch: Any) -> Any:
        made = pad(batch)
        made["labels"][made["attention_mask"] == 0] = 0
        return made

    more = {"data_collator": collate, "train_dataset": ALL_TRAINED, "eval_dataset": ALL_TRAINED}
    _, ours = trainers(tmp_path, "gpt2", more=more)
    with pytest.raises(BatchError, match=r"Trainer counts \d+ trained tokens.*must be -100"):
        ours.train()
    with pytest.raises(BatchError, match=r"Trainer counts \d+ trained tokens.*must be -100"):
        ours.evaluate()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("first", [False, True])
def test_a_step_without_trained_tokens_decays_weights_and_moments_only(
    accumulation: int, first: bool, tmp_path: Path
) -> None:
    untrained = [{**e, "labels": [-100] * len(e["labels"])} for e in DATA[:7]]
    data = untrained + DATA[7:21] if first else DATA[7:21] + untrained
    check_equal(
        *trainers(
            tmp_path, train_sampling_strategy="sequential", max_steps=-1, num_train_epochs=1,
            gradient_accumulation_steps=accumulation, learning_rate=1e-2, weight_decay=0.5,
            adam_epsilon=1e-4,
            warmup_steps=0, more={"train_dataset": data},
        )
    )  # fmt: skip


def test_one_row_of_positions_for_all_rows(tmp_path: Path) -> None:
    def collate(batch: Any) -> Any:
        made = pad(batch)
        return {**made, "position_ids": torch.arange(made["input_ids"].shape[1])[None]}

    theirs, ours = trainers(
        tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2,
        more={"data_collator": collate, "eval_dataset": examples(5, 2),
              "compute_metrics": accuracy},
    )  # fmt: skip
    check_equal(theirs, ours)


def test_documents_with_an_attention_mask_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def collate(batch: Any) -> Any:
        made = pad(batch)
        positions = (torch.arange(made["input_ids"].shape[1]) % 7).expand_as(made["input_ids"])
        labels = torch.where(positions == 0, -100, made["labels"])
        return {**made, "position_ids": positions, "labels": labels}

    _, ours = trainers(tmp_path, max_steps=2, more={"data_collator": collate})
    ours.train()
    warnings = [r for r in caplog.records if "Leave attention_mask out" in r.getMessage()]
    assert len(warnings) == 1


# The auxiliary loss of routers.


def with_auxiliary_loss(family: str) -> Any:
    return tiny_model(family, output_router_logits=True, router_aux_loss_coef=0.5)


@pytest.mark.parametrize("pack", [False, True])
def test_the_auxiliary_loss_leaves_padding_out(pack: bool, tmp_path: Path) -> None:
    theirs, ours = trainers(
        tmp_path, "mixtral", replace(SMALL, pack=pack), model=with_auxiliary_loss, max_steps=4,
        gradient_accumulation_steps=1, eval_strategy="steps", eval_steps=2,
        per_device_eval_batch_size=3, more={"eval_dataset": examples(8, 2)},
    )  # fmt: skip
    mine, other = (trainer.evaluate()["eval_loss"] for trainer in (ours, theirs))
    assert mine == pytest.approx(other, rel=1e-5)
    check_equal(theirs, ours)


@pytest.mark.parametrize(
    ("changes", "penstock", "problem"),
    [
        ({}, {}, r"^gradient_accumulation_steps: is 4.*adds up.*output_router_logits = False"),
        (
            {"gradient_accumulation_steps": 1},
            {"micro_batch": 2},
            r"^micro_batch: is 2.*PenstockConfig\(micro_batch=3\)",
        ),
        (
            {"gradient_accumulation_steps": 1, "label_smoothing_factor": 0.1},
            {},
            "^label_smoothing_factor: is 0.1, and Trainer leaves out",
        ),
        (
            {"gradient_accumulation_steps": 1, "eval_strategy": "epoch"},
            {},
            "^per_device_eval_batch_size: must be 3 or less, got a batch of 8",
        ),
    ],
)
def test_an_auxiliary_loss_that_would_differ_from_that_of_trainer(
    changes: dict[str, Any], penstock: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    _, ours = trainers(
        tmp_path, "mixtral", replace(SMALL, **penstock), model=with_auxiliary_loss,
        more={"eval_dataset": DATA[:4]}, **changes,
    )  # fmt: skip
    with pytest.raises(SettingsError, match=problem):
        ours.train()


def test_an_evaluation_batch_of_several_micro_batches_has_another_auxiliary_loss(
    tmp_path: Path,
) -> None:
    _, ours = trainers(
        tmp_path, "mixtral", model=with_auxiliary_loss, gradient_accumulation_steps=1,
        more={"eval_dataset": DATA[:4]},
    )  # fmt: skip
    with pytest.raises(SettingsError, match=r"per_device_eval_batch_size: must be 3 or less"):
        ours.evaluate()


def test_noise_on_embeddings_is_scaled_by_documents_without_padding(tmp_path: Path) -> None:
    masks: list[Any] = []

    class Note(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            compute = ours.engine.forward_backward

            def note(batch: Any, **kwargs: Any) -> Any:
                masks.append(batch.get("attention_mask"))
                return compute(batch, **kwargs)

            ours.engine.forward_backward = note

    for alpha in (5.0, None):
        _, ours = trainers(
            tmp_path, neftune_noise_alpha=alpha, max_steps=1, gradient_accumulation_steps=1,
            train_sampling_strategy="sequential", more={"callbacks": [Note()]},
        )  # fmt: skip
        ours.train()
    assert masks[0].sum(1).tolist() == [len(e["input_ids"]) for e in DATA[:3]]
    assert masks[1] is None, "where nothing depends on it, the engine gets no mask"


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


class Stream(torch.utils.data.IterableDataset[Any]):
    """A dataset without a length, whose last batch is not full."""

    def __iter__(self) -> Any:
        return iter(examples(7, 2))


@pytest.mark.parametrize(
    "dispatch", [None, pytest.param(True, marks=pytest.mark.long),
                 pytest.param(False, marks=pytest.mark.long)]
)  # fmt: skip
def test_the_last_batch_of_an_iterable_dataset_has_the_weight_of_its_examples(
    dispatch: bool | None, tmp_path: Path
) -> None:
    def count(prediction: Any) -> dict[str, float]:
        return {"losses": len(prediction.losses), "rows": len(prediction.predictions),
                "tokens": int((prediction.label_ids != -100).sum())}  # fmt: skip

    theirs, ours = trainers(
        tmp_path, penstock=replace(SMALL, context=64), per_device_eval_batch_size=5,
        include_for_metrics=["loss"], accelerator_config={"dispatch_batches": dispatch},
        more={"compute_metrics": count},
    )  # fmt: skip
    for call in ("evaluate", "predict"):
        found, expected = (getattr(t, call)(Stream()) for t in (ours, theirs))
        if call == "predict":
            assert found.predictions.shape == expected.predictions.shape
            assert (found.label_ids == expected.label_ids).all()
            found, expected = found.metrics, expected.metrics
        for name in ("loss", "losses", "rows", "tokens"):
            name = f"{'test' if call == 'predict' else 'eval'}_{name}"
            assert found[name] == pytest.approx(expected[name], rel=1e-5)


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
    with pytest.raises(EngineError, match="the weights as they are now") as caught:
        ours.train()
    assert "It was raised in Call.on_step_end." in caught.value.__notes__[0]
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


@pytest.mark.parametrize("kind", ["LoraConfig", "LoHaConfig"])
def test_checkpoints_of_adapters(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")

    def adapted(family: str) -> Any:
        torch.manual_seed(3)
        config = getattr(peft, kind)(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(tiny_model(family), config)

    both = trainers(tmp_path, model=adapted, save_strategy="steps", save_steps=6)
    check_equal(*both)
    theirs, ours = (
        {p.name: p for p in Path(t.args.output_dir, "checkpoint-6").iterdir()} for t in both
    )
    assert theirs.keys() - ours.keys() == {"optimizer.pt"}
    assert ours.keys() - theirs.keys() == {
        "optimizer.safetensors", "training_state.json", "complete.json", "base_model.json",
    }  # fmt: skip
    assert ours["README.md"].read_text() == theirs["README.md"].read_text()
    assert "README.md" in json.loads(ours["complete.json"].read_text())["files"]


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


def replacing(name: str) -> type:
    """Return a trainer of your own that overrides a method."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any: ...

    return type("Mine", (Trainer,), {name: method})


@pytest.mark.parametrize(
    "name",
    ["training_step", "prediction_step", "create_optimizer", "_get_grad_norm", "_wrap_model",
     "_save", "_load_optimizer_and_scheduler"],
)  # fmt: skip
def test_methods_that_the_mixin_would_skip_are_refused(name: str, tmp_path: Path) -> None:
    ours: Any = type("Ours", (PenstockTrainerMixin, replacing(name)), {})
    with pytest.raises(SettingsError, match=f"^{name}: is overridden by Mine, .*super"):
        ours(tiny_model(), arguments(tmp_path), train_dataset=DATA)


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("compute_loss", "penstock.stream"),
        ("compute_loss_context_manager", "set bf16 or fp16"),
        ("autocast_smart_context_manager", "set bf16 or fp16"),
        ("_prepare_inputs", "data collator"),
        ("_clip_grad_norm", "set max_grad_norm"),
    ],
)
def test_methods_that_are_never_called_are_refused(
    name: str, advice: str, above: bool, tmp_path: Path
) -> None:
    mine = replacing(name)
    bases = (PenstockTrainerMixin, mine)
    ours: Any = (
        type("Mine", (PenstockTrainer,), {name: vars(mine)[name]})
        if above
        else type("Ours", bases, {})
    )
    with pytest.raises(SettingsError, match=f"^{name}: is overridden by Mine.*{advice}"):
        ours(tiny_model(), arguments(tmp_path), train_dataset=DATA)


def test_what_is_set_on_the_trainer_is_refused_as_an_argument_is(tmp_path: Path) -> None:
    smoother = transformers.trainer_pt_utils.LabelSmoother(0.3)
    for name, value in (
        ("compute_loss_func", len), ("compute_loss", len), ("label_smoother", smoother),
        ("_clip_grad_norm", len), ("compute_loss_context_manager", len),
    ):  # fmt: skip
        _, ours = trainers(tmp_path, more={"eval_dataset": DATA[:2]})
        setattr(ours, name, value)
        for call in (ours.train, ours.evaluate):
            with pytest.raises(SettingsError) as found:
                call()
            assert found.value.field == name


def test_a_seq2seq_trainer_may_not_generate(tmp_path: Path) -> None:
    class Ours(PenstockTrainerMixin, transformers.Seq2SeqTrainer):
        pass

    def given(**changes: Any) -> Any:
        return transformers.Seq2SeqTrainingArguments(
            str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, **changes
        )

    with pytest.raises(SettingsError, match="predict_with_generate: generates text"):
        Ours(tiny_model(), given(predict_with_generate=True), pad, DATA)
    Ours(tiny_model(), given(), pad, DATA, penstock=SMALL).train()


def test_an_optimizer_that_is_set_on_the_trainer_is_refused(tmp_path: Path) -> None:
    _, ours = trainers(tmp_path, max_steps=1)
    ours.optimizer = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    with pytest.raises(SettingsError, match=r"^optimizer: cannot be passed.*learning_rate"):
        ours.train()
    own = torch.optim.lr_scheduler.ConstantLR(ours.optimizer)
    ours.optimizer, ours.lr_scheduler = None, own
    with pytest.raises(SettingsError, match=r"^lr_scheduler: cannot be passed.*create_scheduler"):
        ours.train()
    ours.lr_scheduler = None
    with pytest.raises(SettingsError, match=r"^create_optimizer: cannot be called before train"):
        ours.create_optimizer()
    for _ in range(2):
        ours.train()


def test_a_scheduler_of_your_own_in_create_scheduler(tmp_path: Path) -> None:
    class Mine(Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
            return self.lr_scheduler

    class Ours(PenstockTrainerMixin, Mine):
        pass

    made = [
        kind(tiny_model(), arguments(tmp_path, adam_epsilon=1e-4), pad, DATA, **extra)
        for kind, extra in ((Mine, {}), (Ours, {"penstock": SMALL}))
    ]
    check_equal(*made)
    made[1].train()


def test_a_create_optimizer_that_makes_another_one_is_refused(tmp_path: Path) -> None:
    class Without(PenstockTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    class After(Without):
        def create_optimizer(self, model: Any = None) -> Any:
            PenstockTrainer.create_optimizer(self, model)
            return super().create_optimizer(model)

    class Faster(PenstockTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            optimizer = super().create_optimizer(model)
            optimizer.param_groups[0]["lr"] *= 2
            return optimizer

    for kind in (Without, After):
        trainer = kind(tiny_model(), arguments(tmp_path), pad, DATA, penstock=SMALL)
        with pytest.raises(SettingsError, match=r"^create_optimizer: must return the optimizer"):
            trainer.train()
    Faster(tiny_model(), arguments(tmp_path, max_steps=1), pad, DATA, penstock=SMALL).train()


def test_an_optimizer_class_has_its_own_defaults(tmp_path: Path) -> None:
    chosen = (torch.optim.AdamW, {"eps": 1e-7, "weight_decay": 0.5})
    check_equal(*trainers(tmp_path, more={"optimizer_cls_and_kwargs": chosen}))


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
