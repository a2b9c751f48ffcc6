"""transformers' Trainer, with Penstock's engine in place of model and optimizer.

Trainer takes all micro-batches of an optimizer step from the data first, passes each one to
`training_step`, and calls `optimizer.step()` after the last. Here, `training_step` collects them
and computes the gradients of all of them at the last one, and `optimizer.step()` is the engine's
`apply`. Batches, learning rates, callbacks, logs, evaluation and checkpoints remain Trainer's.

Under torchrun, every process is a rank of one engine, and runs the same loop over the same data.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from accelerate.utils import find_batch_size
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.manifest import Checkpoint, check_small_files
from penstock.checkpoint.run_directory import remove_leftovers
from penstock.distributed.rank_group import RankGroup
from penstock.engine.engine import Engine
from penstock.engine.loss import IGNORE_INDEX, LossFunction, TokenValues
from penstock.engine.optimizer import StreamedOptimizer
from penstock.engine.rank_agreement import all_or_none
from penstock.errors import BatchError, EngineError, SettingsError
from penstock.integrations import checkpoint_folder
from penstock.integrations.argument_checks import (
    OPTIMIZERS,
    check_before_init,
    check_devices,
    check_optimizer_attributes,
    check_training_arguments,
    switch_off_checkpointing,
)
from penstock.integrations.auxiliary_loss import (
    check_auxiliary_evaluation,
    choose_micro_batch,
)
from penstock.integrations.config import PenstockConfig
from penstock.integrations.engine_setup import EngineRequest, open_engine
from penstock.integrations.optimizer_choice import optimizer_options
from penstock.integrations.override_checks import PATH_B, check_attributes
from penstock.integrations.sequence_length import sequence_length
from penstock.integrations.several_ranks import (
    WholeBatchAccelerator,
    as_one_process,
    batch_of_all_ranks,
    check_shared_output,
    check_together,
    open_group,
    share_choice,
)
from penstock.integrations.window import TOO_MANY, Window, expand_positions, make_window
from penstock.model.adapters import without_wrapper

logger = logging.getLogger(__name__)

MISCOUNTED = (
    "Trainer counts {trainer} trained tokens in this batch, and the engine {engine}. Labels of "
    "padding, and of the first token of each document in a packed row, must be -100"
)

MASKED_DOCUMENTS = (
    "position_ids start again inside of rows that have an attention_mask. Penstock trains each "
    "document by itself; transformers does that only without attention_mask, and with one lets "
    "every document attend to those before it. Leave attention_mask out to train the same with both"
)

TOO_EARLY = (
    "cannot be called before train(), which plans memory and opens the engine. Set learning_rate, "
    "weight_decay and optim in the arguments; to change the optimizer's param_groups, override "
    "create_optimizer and call super() in it, or use on_train_begin of a callback"
)

OTHER_OPTIMIZER = (
    "must return the optimizer that super().create_optimizer() returns, which updates the weights "
    "in the engine. To choose another one, set optim or PenstockConfig(optimizer=...), or use "
    f"{PATH_B}"
)


class StreamedModel(nn.Module):
    """Stands for the model in Trainer's loop: accelerate must not move or wrap the weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to compute: the engine does."""
        raise EngineError(
            "the model of a trainer with Penstock cannot be called: its weights are in the engine. "
            f"For losses of your own, use {PATH_B}"
        )

    def to(self, *_: Any, **__: Any) -> StreamedModel:
        """Do nothing: the plan decides where the weights are."""
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients are in the engine, and the update uses them up."""


class PenstockTrainerMixin:
    """Lets a subclass of transformers' Trainer train with Penstock's engine.

    Put it before the trainer's class: `class MyTrainer(PenstockTrainerMixin, Trainer)`. The new
    argument `penstock` takes a `PenstockConfig`.
    """

    # Attributes of Trainer that this class uses.
    args: Any
    model: Any
    model_wrapped: Any
    accelerator: Any
    optimizer: Any
    state: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, penstock: PenstockConfig | None = None, **kwargs: Any) -> None:
        self.penstock = penstock or PenstockConfig()
        """The settings of Penstock."""
        self.engine: Engine | None = None
        """The engine, while it trains or evaluates; otherwise the model has the weights."""
        self._group: RankGroup | None = None
        """The ranks of the engine, while there is one."""
        self._micro_batches: list[Mapping[str, Any]] = []
        self._window_items: Any = None
        self._resume: Checkpoint | None = None
        self._saves_checkpoint = False
        self._warned_of_documents = False
        given = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments
        check_before_init(type(self), PenstockTrainerMixin, given, self.penstock)
        if given.get("args") is not None:
            check_devices(given["args"])
            switch_off_checkpointing(given["args"])
        super().__init__(*args, **kwargs)
        check_training_arguments(self.args)
        check_devices(self.args)
        switch_off_checkpointing(self.args)
        trainer: Any = self
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise SettingsError("launcher", "asks for DeepSpeed or FSDP; start the script with "
                                "python instead of accelerate launch")  # fmt: skip
        # The engine adds the noise itself. Trainer would hook it into the model's embedding.
        trainer.neftune_noise_alpha = None

    # What Trainer must leave alone.

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the weights where they are: the engine copies them to the tiers of the plan."""

    def create_accelerator_and_postprocess(self) -> None:
        """Let accelerate leave batches on the host, and losses unscaled."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.device_placement = False
        self.accelerator.scaler = None
        # accelerate dispatches only batches that it places. `_set_remainder` does the part of
        # dispatching that changes a result.
        self._dispatches = self.accelerator.dataloader_config.dispatch_batches is not False
        self.accelerator.dataloader_config.dispatch_batches = None
        if self.args.world_size > 1:
            # Trainer makes the accelerator itself, and has no argument for its class.
            self.accelerator.__class__ = WholeBatchAccelerator
            trainer: Any = self
            trainer.gather_function = self.accelerator.gather_for_metrics

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Make a data loader of whole batches, which all ranks read."""
        trainer: Any = super()
        size = batch_size * self.args.world_size
        with batch_of_all_ranks(self.args):  # samplers that group by length read the arguments
            return trainer._get_dataloader(dataset, description, size, *args, **kwargs)

    def _wrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return model if isinstance(model, StreamedModel) else StreamedModel(model)

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a search builds many models, and memory is planned for one."""
        raise SettingsError("hyperparameter_search", "is not supported with Penstock: train each "
                            "candidate with a trainer of its own")  # fmt: skip

    # Training.

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, and give the model the trained weights.

        `resume_from_checkpoint` is a folder, or True for the newest complete checkpoint in the
        output directory.
        """
        check_attributes(self)
        check_optimizer_attributes(self, StreamedOptimizer)
        self._resume = None
        self._micro_batches = []
        out = Path(self.args.output_dir)
        chosen = None
        if self.args.process_index == 0:
            remove_leftovers(out)
            if resume_from_checkpoint is True:
                chosen = checkpoint_folder.last_checkpoint(out)
        if resume_from_checkpoint is True:
            found = share_choice(self.args, chosen)
            if found is None:
                raise ValueError(f"No valid checkpoint found in output directory ({out})")
            resume_from_checkpoint = str(found)
        check_shared_output(self.args)
        trainer: Any = super()
        with self._engine_closed_at_end(), _callbacks_named():
            return trainer.train(resume_from_checkpoint, *args, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the engine, whose optimizer applies the updates."""
        trainer: Any = self
        if not trainer.is_in_train:
            raise SettingsError("create_optimizer", TOO_EARLY)
        if self.optimizer is not None and not isinstance(self.optimizer, StreamedOptimizer):
            raise SettingsError("optimizer", OPTIMIZERS)
        if self.engine is None:
            self.engine = self._open_engine(show=True)
        # accelerate would copy the optimizer's states to place them on a device.
        optimizer: Any = self.engine.optimizer
        optimizer._is_accelerate_prepared = True
        self.optimizer = optimizer
        return self.engine.optimizer

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Collect a micro-batch, and compute the gradients of all of them at the last one.

        Returns the loss of the whole step at the last micro-batch, and 0 before, since Trainer
        adds the losses up.
        """
        if self.engine is None or self.optimizer is not self.engine.optimizer:
            raise SettingsError("create_optimizer", OTHER_OPTIMIZER)
        model.train()
        if self._micro_batches and num_items_in_batch is not self._window_items:
            logger.warning(
                "%d micro-batches at the end of the data are left out: they are fewer than "
                "gradient_accumulation_steps, and Trainer made no step with them",
                len(self._micro_batches),
            )
            self._micro_batches = []
        self._micro_batches.append(inputs)
        self._window_items = num_items_in_batch
        if not self.accelerator.sync_gradients:
            nothing = num_items_in_batch is not None and int(num_items_in_batch) == 0
            waiting = self._loss_without_targets if nothing else 0.0
            return torch.tensor(waiting, device=self.args.device)
        micro_batches, self._micro_batches = self._micro_batches, []
        window = self._make_window(micro_batches)
        rows = window.owners.shape[0]
        if rows > self.engine.workload.batch:
            raise BatchError(TOO_MANY.format(rows=rows, batch=self.engine.workload.batch))
        num_items = self._count_items(window, micro_batches, num_items_in_batch)
        check_together(self.engine.ranks, "takes a training step", window.batch)
        nothing = not num_items and not bool(window.targets.any())
        # Without trained tokens the gradient is zero, whatever it is divided by, and as in Trainer
        # the update lets weights and moments decay.
        loss = self.engine.forward_backward(window.batch, num_items=1 if nothing else num_items)
        if nothing:
            loss = torch.full_like(loss, self._loss_without_targets)
        self._note_tokens(micro_batches, window, self.engine.token_values, training=True)
        return loss.to(self.args.device)

    def _count_items(
        self, window: Window, micro_batches: list[Mapping[str, Any]], num_items_in_batch: Any
    ) -> int | None:
        """Return the number by which Trainer divides the sum of the loss; None for its mean."""
        if num_items_in_batch is None:
            return None
        trainer: Any = self
        counted, wanted = int(window.targets.sum()), int(num_items_in_batch)
        # If the model's class does not name its loss, Trainer also counts the labels of the first
        # column, which nothing predicts, and divides by them.
        first = 0
        if not trainer._loss_shifts_labels:
            first = sum(int((m["labels"][:, 0] != IGNORE_INDEX).sum()) for m in micro_batches)
        if wanted != counted + first:
            raise BatchError(MISCOUNTED.format(trainer=wanted, engine=counted + first))
        return wanted

    def _clip_grad_norm(self, model: nn.Module) -> float:
        """Return the norm before clipping. The update clips: it costs no pass of its own."""
        assert self.engine is not None
        return self.engine.waiting_grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Log the mean of the ranks' losses, which are equal, without rounding it."""
        trainer: Any = super()
        if self.args.world_size == 1:
            return trainer._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if self.engine is not None:
            # Before Trainer gathers the losses: a rank whose callback saves the model waits for the
            # others in a call of the engine.
            check_together(self.engine.ranks, "ends a step")
        exact = tr_loss.double()
        try:
            return trainer._maybe_log_save_evaluate(exact, *args, **kwargs)
        finally:
            tr_loss.copy_(exact)  # 0 if it was logged

    def store_flos(self) -> None:
        """Count the operations of a step once: every rank counts those of all."""
        trainer: Any = super()
        with as_one_process(self.args):
            trainer.store_flos()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # First, so that the best model can be loaded, and callbacks at the end have the weights.
        self._close_engine()
        trainer: Any = super()
        return trainer._finalize_training(*args, **kwargs)

    def _note_tokens(
        self,
        micro_batches: list[Mapping[str, Any]],
        window: Window,
        values: list[TokenValues],
        *,
        training: bool,
    ) -> None:
        """Note what the model predicted. Trainer logs nothing of it; TRL does."""

    # The engine.

    def _loss_function(self) -> LossFunction | None:
        """Return a loss in place of cross-entropy, from log-probabilities of targets."""
        return None

    def _open_engine(self, *, show: bool) -> Engine:
        trainer: Any = self
        args = self.args
        accumulation = args.gradient_accumulation_steps
        if accumulation > 1 and not trainer.model_accepts_loss_kwargs:
            raise SettingsError(
                "gradient_accumulation_steps",
                f"is {accumulation}, but {type(self.model).__name__} takes no num_items_in_batch: "
                f"Trainer would average the means of micro-batches. Use 1 and a larger "
                f"per_device_train_batch_size",
            )
        if getattr(self.model, "is_gradient_checkpointing", False):
            self.model.gradient_checkpointing_disable()
        rows = trainer._train_batch_size * accumulation * args.world_size
        config = self.penstock
        if (micro_batch := choose_micro_batch(trainer, config, rows)) is not None:
            config = replace(config, micro_batch=micro_batch)
        steps = self.state.max_steps
        if self._group is None:
            self._group = open_group(args)
        request = EngineRequest(
            model=self.model,
            args=args,
            config=config,
            rows=rows,
            length=lambda limit: sequence_length(
                self.penstock.context, args, self._datasets(), limit=limit
            ),
            steps=steps if steps and steps > 0 else None,
            optimizer=optimizer_options(trainer),
            decayed=frozenset(trainer.get_decay_parameter_names(without_wrapper(self.model))),
            loss=self._loss_function(),
            resume=self._resume,
            group=self._group,
        )
        # Planning and the self-check draw numbers; the order of the data must not depend on them.
        with torch.random.fork_rng(devices=[]):
            engine = open_engine(request, show=show)
        if engine.plan_change and self._group.talks:
            logger.warning(engine.plan_change)
        return engine

    def _datasets(self) -> list[Any]:
        trainer: Any = self
        held_out = trainer.eval_dataset
        several = list(held_out.values()) if isinstance(held_out, Mapping) else [held_out]
        return [data for data in (trainer.train_dataset, *several) if data is not None]

    def _close_engine(self) -> None:
        """Give the model its weights back, and leave the group of ranks."""
        engine, group = self.engine, self._group
        self.engine = self._group = None
        try:
            if engine is not None:
                check_together(engine.ranks, "ends training or evaluation")
                engine.close(spill=self.args.output_dir)
            if group is not None:
                group.close()
        except BaseException as error:
            _abandon(engine, group, error)
            raise

    @contextlib.contextmanager
    def _engine_closed_at_end(self) -> Iterator[None]:
        """Close the engine after the block. After an error, other ranks are told first."""
        try:
            yield
        except BaseException as error:
            if self._group is not None and self._group.world > 1:
                engine, group = self.engine, self._group
                self.engine = self._group = None
                _abandon(engine, group, error)
            raise
        finally:
            self._close_engine()

    @contextlib.contextmanager
    def _engine_open(self) -> Iterator[Engine]:
        """Yield the engine that trains, or one for this block alone."""
        if self.engine is not None:
            yield self.engine
            return
        with self._engine_closed_at_end():
            self.engine = self._open_engine(show=False)
            yield self.engine

    def _make_window(
        self, micro_batches: list[Mapping[str, Any]], *, needs_labels: bool = True
    ) -> Window:
        assert self.engine is not None
        workload, inventory = self.engine.workload, self.engine.inventory
        # Compiled layers are compiled for each shape: rows of one length need one compilation.
        compiled = workload.numerics.compiled
        pack = compiled if self.penstock.pack is None else self.penstock.pack
        hides_padding = (
            self.engine.split_model.router_loss is not None
            or workload.numerics.neftune_noise_alpha > 0
        )
        window = make_window(
            micro_batches,
            context=workload.context,
            pack=pack and not inventory.mixes_documents,
            full_rows=compiled,
            with_mask=hides_padding,
            needs_labels=needs_labels,
        )
        if window.masked_documents and not self._warned_of_documents:
            self._warned_of_documents = True
            logger.warning(MASKED_DOCUMENTS)
        return window

    # Evaluation.

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict with the engine, which is opened for it unless it trains."""
        trainer: Any = super()
        check_attributes(self)
        with self._engine_open() as engine, batch_of_all_ranks(self.args):
            check_together(engine.ranks, "begins an evaluation")
            engine.finish()
            return trainer.evaluation_loop(*args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the loss and, unless only that is asked for, logits and labels, on the host."""
        if self.engine is None:
            raise SettingsError(
                "evaluation_loop",
                "must call super(), which opens the engine, and must not call prediction_step "
                "itself",
            )
        window = self._make_window([inputs], needs_labels=False)
        check_together(self.engine.ranks, "evaluates a batch", window.batch)
        labels = inputs.get("labels")
        loss = None if labels is None else self._evaluation_loss(inputs)
        self._set_remainder(inputs)
        if prediction_loss_only:
            return loss, None, None
        return loss, self._logits(inputs), labels

    def _set_remainder(self, inputs: Mapping[str, Any]) -> None:
        """Tell the accelerator how many examples the last batch of a dataset without a length has.

        Trainer repeats the loss of each batch for a full batch, and the accelerator leaves out what
        the last batch has more than the dataset.
        """
        state = self.accelerator.gradient_state
        if self._dispatches and state.end_of_dataloader and state.remainder == -1:
            state.active_dataloader.remainder = find_batch_size(inputs)

    def _evaluation_loss(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        assert self.engine is not None
        window = self._make_window([inputs])
        if not bool(window.targets.any()):
            return torch.tensor(self._loss_without_targets, device=self.args.device)
        check_auxiliary_evaluation(self.engine, window)
        items = self._count_items(window, [inputs], self._count_evaluation_items(inputs))
        result = self.engine.evaluate(window.split(self.engine.workload.batch))
        self._note_tokens([inputs], window, self.engine.token_values, training=False)
        loss = result.loss if items is None else result.loss * (result.tokens / items)
        return torch.tensor(loss, device=self.args.device)

    def _count_evaluation_items(self, inputs: Mapping[str, Any]) -> Any:
        """Return the number by which the loss of an evaluation batch is divided."""
        trainer: Any = self
        return trainer._get_num_items_in_batch([inputs], self.args.device)

    _loss_without_targets = float("nan")
    """Loss of a batch in which no token counts: 0/0, which Trainer leaves out of the logs."""

    def _logits(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        assert self.engine is not None
        names = ("input_ids", "attention_mask", "position_ids")
        batch = {name: inputs[name] for name in names if inputs.get(name) is not None}
        if "position_ids" in batch:
            batch["position_ids"] = expand_positions(batch["position_ids"], batch["input_ids"])
        rows, count = self.engine.workload.batch, batch["input_ids"].shape[0]
        parts = [
            self.engine.logits({name: tensor[low : low + rows] for name, tensor in batch.items()})
            for low in range(0, count, rows)
        ]
        return torch.cat(parts)

    # Saving.

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model from the engine, tensor by tensor, as `save_pretrained` lays it out."""
        trainer: Any = super()
        if self.engine is None:
            trainer._save(output_dir, state_dict)
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if self._saves_checkpoint:
            checkpoint_folder.remove_earlier(folder)
        checkpoint_folder.write_model(
            self.engine, folder, tokenizer=self._tokenizer_to_save(),
            optimizer=self._saves_optimizer,
        )  # fmt: skip
        if hasattr(self.model, "create_or_update_model_card"):  # as PEFT's save_pretrained does
            self.model.create_or_update_model_card(str(folder))
        torch.save(self.args, folder / transformers.trainer.TRAINING_ARGS_NAME)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model. With several ranks, all of them must call this, and one folder is made.

        Each rank writes some of the files with weights; rank 0 writes everything else.
        """
        trainer: Any = super()
        if self.engine is not None:
            check_together(self.engine.ranks, "saves the model")
            if not self.args.should_save:
                checkpoint_folder.join_write(self.engine, optimizer=self._saves_optimizer)
        trainer.save_model(*args, **kwargs)

    @property
    def _saves_optimizer(self) -> bool:
        return self._saves_checkpoint and not self.args.save_only_model

    def _tokenizer_to_save(self) -> Any:
        trainer: Any = self
        collator = getattr(trainer.data_collator, "tokenizer", None)
        return trainer.processing_class if trainer.processing_class is not None else collator

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        trainer: Any = super()
        self._saves_checkpoint = True
        try:
            trainer._save_checkpoint(*args, **kwargs)
        finally:
            self._saves_checkpoint = False
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        if self.args.should_save and folder.is_dir():
            checkpoint_folder.seal(folder, self.state.global_step)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # `_save` has written the optimizer's states next to the weights.
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        """Save one state for all ranks, as a single process does: they draw the same numbers."""
        trainer: Any = super()
        if self.args.should_save:
            with as_one_process(self.args):
                trainer._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        trainer: Any = super()
        with as_one_process(self.args):
            trainer._load_rng_state(checkpoint)

    # Resuming.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check a checkpoint of Penstock, whose weights the engine reads; load any other."""
        folder = Path(resume_from_checkpoint)
        self._resume = checkpoint_folder.find_checkpoint(folder) if folder.is_dir() else None
        if self._resume is None:
            trainer: Any = super()
            trainer._load_from_checkpoint(resume_from_checkpoint, model)
            return
        check_small_files(folder)
        if not self._resume.resumable:
            raise CheckpointError(
                f"{folder} has weights only, because it was saved with save_only_model=True: it "
                f"can be loaded as a model, but training cannot continue from it"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trainer: Any = super()
        if checkpoint is None or self._resume is None:
            trainer._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.engine is not None
        with all_or_none(self.engine.ranks):
            self.engine.read(checkpoint)
        saved = torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(saved)


SCHEDULER_NAME = "scheduler.pt"
"""File that Trainer keeps the learning-rate schedule in."""


@contextlib.contextmanager
def _callbacks_named() -> Iterator[None]:
    """Add the name of the callback to an error of the engine that one has caused."""
    try:
        yield
    except EngineError as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, TrainerCallback) and not isinstance(owner, CallbackHandler):
                error.add_note(
                    f"It was raised in {type(owner).__name__}.{frame.f_code.co_name}. While "
                    f"Penstock trains, callbacks cannot read or change the model's weights"
                )
                break
        raise


def _abandon(engine: Engine | None, group: RankGroup | None, error: BaseException) -> None:
    """Release the engine of one of several ranks, without the others.

    They may be anywhere in the script, so that they cannot help to restore the model.
    """
    if group is None or group.world == 1:
        return
    group.transport.abort(error)
    if engine is not None:
        engine.close()
    group.__exit__(type(error), error, None)


class PenstockTrainer(PenstockTrainerMixin, transformers.Trainer):
    """transformers' Trainer, with Penstock's engine in place of model and optimizer."""
