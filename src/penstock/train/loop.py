"""The training loop: take steps, save checkpoints and evaluate until the end or a stop request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.checkpoint import errors as checkpoint_errors
from penstock.checkpoint.errors import CheckpointExistsError
from penstock.durable_files import name_file
from penstock.engine.startup import EVALUATION
from penstock.errors import BatchError, NonFiniteLossError, PenstockError
from penstock.io_retries import take_counts
from penstock.records import to_json
from penstock.settings import Settings, parse_interval
from penstock.tiers import Tier
from penstock.train.best_model import BestModel
from penstock.train.checkpoints import CheckpointSaver, RunPosition
from penstock.train.errors import (
    NoUpdateError,
    OutLostError,
    explain_host_out_of_memory,
    save_bad_batch,
)
from penstock.train.events import Listeners
from penstock.train.inputs import TrainingData
from penstock.train.learning_rate import LearningRateSchedule
from penstock.train.model_card import TrainingResult
from penstock.train.progress import View
from penstock.train.rank_commands import RankLeader
from penstock.train.signals import StopRequest
from penstock.train.watchdog import Watchdog
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.data.batches import Batches
    from penstock.engine.engine import Engine

SAVE_FAILURES = (*checkpoint_errors.SAVE_FAILURES, OutLostError)
"""Errors of a save after which training continues: the next save may succeed."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Everything that the loop needs, ready for the first step."""

    settings: Settings
    engine: Engine
    data: TrainingData
    batches: Batches
    saver: CheckpointSaver
    rate: LearningRateSchedule
    resumed: bool
    leader: RankLeader
    """Sends the other ranks, if there are any, what this one does."""


class TrainingLoop:
    """Trains until the last step or until the user asks to stop."""

    def __init__(
        self, run: TrainingRun, listeners: Listeners, view: View, stop: StopRequest
    ) -> None:
        self._run, self._listeners, self._view, self._stop = run, listeners, view, stop
        self._engine, self._batches, self._saver = run.engine, run.batches, run.saver
        self._leader = run.leader
        self._rate = run.rate
        self._scheduler = self._rate.scheduler(
            run.engine.optimizer, taken=run.engine.steps, peak=run.settings.schedule.lr
        )
        self._save_interval = parse_interval(run.settings.checkpoint.save_every)
        self._watchdog = Watchdog(run.engine.waiting, listeners.note)
        self._evaluated_step: int | None = None
        self._eval_loss: float | None = None
        self._last_loss: float | None = None
        save_best = run.settings.evaluation.save_best
        self._best = BestModel(run.saver) if save_best else None
        self._sampled_step: int | None = None
        self._is_evaluating = False
        # A resumed run has had its first steps already.
        self._has_updated, self._num_skipped = run.resumed, 0
        self._num_retries = 0  # file operations that failed for a moment and were repeated
        self._exceeded: set[str] = set()  # memories that held more than planned
        # When a save was last tried. A failed save counts, so that it is not repeated every step.
        self._save_step, self._save_time = run.batches.step, time.monotonic()

    def run(self) -> bool:
        """Train. Return True at the end of the run, False if the user stopped it."""
        from penstock.engine.device_memory import explain_out_of_memory

        engine = self._engine
        # Samples are generated outside of the engine, with memory of their own.
        explained = explain_out_of_memory(engine.device, engine.plan, "training")
        with self._watchdog, explain_host_out_of_memory(), explained:
            self._engine.on_progress = self._report_step_progress
            if not self._run.resumed:
                with engine.start_up.phase(EVALUATION):
                    self._evaluate_and_sample()
            while not self._at_end and not self._leader.stop_requested:
                self._take_step()
                self._save_if_due()
                self._evaluate_if_due()
                self._note_retries()
            if not self._at_end:
                self._stop_early()
                return False
            self._finish()
            return True

    @property
    def _at_end(self) -> bool:
        return self._batches.step >= self._batches.steps

    # Steps.

    def _take_step(self) -> None:
        started = time.monotonic()
        is_first = not self._engine.start_up.complete
        position = self._batches.position
        batch = next(self._batches)
        rate = self._scheduler.get_last_lr()[0]
        self._leader.step(batch, [group["lr"] for group in self._engine.optimizer.param_groups])
        try:
            loss = self._engine.step(batch)
        except (BatchError, NonFiniteLossError):
            self._save_before_bad_batch(batch, position)
            raise
        if is_first:
            start_up = self._engine.start_up
            self._listeners.emit(
                "start_up", seconds=round(start_up.seconds, 3), phases=start_up.by_name()
            )
        metrics: dict[str, Any] = {
            "step": self._batches.step,
            "loss": float(loss),
            "lr": rate,
        }
        if self._engine.skipped:
            # The optimizer took no step, so the learning rate stays where it is. There is no norm:
            # the gradient is not finite, and the engine still has the norm of an earlier step.
            self._num_skipped += 1
            self._listeners.emit("skipped", **metrics, loss_scale=self._engine.scale.value)
            return
        self._last_loss = float(loss)
        self._scheduler.step()
        self._has_updated |= float(rate) > 0 and self._engine.grad_norm > 0
        seconds = time.monotonic() - started
        tiers, host = self._engine.tiers(), self._engine.host_memory()
        if (load := self._engine.expert_load()) is not None:
            metrics |= {
                "expert_load_max": round(load.largest, 4),
                "expert_load_min": round(load.smallest, 4),
                "idle_experts": load.idle,
            }
        self._listeners.emit(
            "step",
            **metrics,
            grad_norm=self._engine.grad_norm,
            epoch=round(self._batches.epoch, 6),
            seconds=seconds,
            tokens_per_second=batch["input_ids"].numel() / seconds,
            tiers=tiers,
            host=host,
        )
        self._note_excess(tiers | {"host": host})

    def _note_excess(self, memories: Mapping[str, Mapping[str, int]]) -> None:
        """Report every memory whose measured peak exceeds the plan, once."""
        for name, nbytes in memories.items():
            if nbytes["peak"] > nbytes["planned"] and name not in self._exceeded:
                self._exceeded.add(name)
                self._listeners.note(describe_excess(name, nbytes))

    def _note_retries(self) -> None:
        """Report file operations that failed for a moment: the drive may be about to fail."""
        for path, number in {**take_counts(), **self._engine.take_io_retries()}.items():
            self._num_retries += number
            noun = "retry" if number == 1 else "retries"
            self._listeners.note(f"warning: {number} I/O {noun} on {path}; check the drive")

    def _save_before_bad_batch(self, batch: Any, position: Any) -> None:
        """Save the batch for inspection, and a checkpoint of the run before this batch."""
        step = self._batches.step
        try:
            self._saver.find_directory()
            path = save_bad_batch(self._saver.out, step, batch, self._run.data.dataset.decode)
        except (OSError, OutLostError) as problem:  # the error of the batch says more
            self._listeners.note(f"the batch of step {step} was not saved: {problem}")
        else:
            text = path.with_suffix(".txt").name
            self._listeners.note(
                f"the batch of step {step} was saved to {path} and, as text, {text}"
            )
        if step - 1 > 0 and not self._saver.is_saved(step - 1):
            self._save(RunPosition(step - 1, position, to_json(self._rate)))

    def _report_step_progress(self, done: int, total: int, text: str) -> None:
        self._watchdog.report_progress(text)
        if self._is_evaluating:
            self._view.show_work(0, 0, f"evaluating: {text}")
        else:
            self._view.show_step_progress(done, total, text)

    # Checkpoints.

    @property
    def _position(self) -> RunPosition:
        return RunPosition(self._batches.step, self._batches.position, to_json(self._rate))

    def _save_if_due(self) -> None:
        step, seconds = self._batches.step, time.monotonic() - self._save_time
        due = self._save_interval.is_due(step=step, last=self._save_step, seconds=seconds)
        if due and not self._at_end:
            try:
                self._save(self._position)
            except SAVE_FAILURES as failed:
                self._listeners.note(
                    f"checkpoint not saved: {failed}. Training continues; the next save is due "
                    f"after the usual interval"
                )

    def _save(self, position: RunPosition) -> None:
        self._save_step = position.step
        started = time.monotonic()
        try:
            path = self._saver.save(position, self._report_save_progress)
        finally:
            self._save_time = time.monotonic()
        self._listeners.emit(
            "save",
            step=position.step,
            path=str(path),
            bytes=self._saver.nbytes,
            seconds=self._save_time - started,
            run_id=self._saver.run_id,
        )

    def _report_save_progress(self, done: int, total: int, text: str) -> None:
        self._watchdog.report_progress("saving")
        self._view.show_work(done, total, "saving")

    def _save_last(self) -> None:
        """Save the current step, unless a checkpoint of it exists."""
        self._saver.find_directory()
        if not self._saver.is_saved(self._batches.step):
            try:
                self._save(self._position)
            except CheckpointExistsError:
                self._saver.saved_step = self._batches.step

    # Evaluation.

    def _evaluate_if_due(self) -> None:
        every = self._run.settings.evaluation.eval_every
        if every is not None and self._batches.step % every == 0 and not self._at_end:
            self._evaluate_and_sample()

    def _evaluate_and_sample(self) -> None:
        self._evaluate()
        self._sample()

    def _evaluate(self) -> None:
        """Compute the held-out loss, unless it is known for this step."""
        held_out = self._run.data.held_out
        if held_out is None or self._evaluated_step == self._batches.step:
            return
        started = time.monotonic()
        batches = held_out.batches(self._run.settings.schedule.chosen_batch, shuffle=False)
        self._is_evaluating = True
        self._leader.evaluate()
        try:
            result = self._engine.evaluate(self._until_stopped(batches))
        except _StoppedError:
            return
        finally:
            self._is_evaluating = False
        self._evaluated_step, self._eval_loss = self._batches.step, result.loss
        smoothing = self._engine.workload.numerics.label_smoothing
        self._listeners.emit(
            "eval",
            step=self._batches.step,
            loss=result.loss,
            tokens=result.tokens,
            seconds=time.monotonic() - started,
            **({"label_smoothing": smoothing} if smoothing else {}),
        )
        if self._best is not None and self._batches.step > 0:
            self._save_best(self._best, result.loss)

    def _save_best(self, best: BestModel, loss: float) -> None:
        """Save the model if it is the best so far. Training continues if that fails."""
        self._view.show_work(0, 0, "saving the best model")
        try:
            path = best.offer(self._batches.step, loss)
        except SAVE_FAILURES as failed:
            self._listeners.note(f"best model not saved: {failed}. Training continues")
            return
        if path is not None:
            self._listeners.note(f"lowest evaluation loss so far: {loss:.4f}, saved to {path}")

    def _until_stopped(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            if self._leader.stop_requested:
                self._leader.last_batch()
                raise _StoppedError
            self._leader.batch(batch)
            yield batch
        self._leader.last_batch()

    def _sample(self) -> None:
        """Answer the sample prompts. Training continues if there is too little memory for it."""
        samples, step = self._run.data.samples, self._batches.step
        if samples is None or self._stop.requested or self._sampled_step == step:
            return
        self._sampled_step = step
        self._view.show_work(0, 0, "answering the sample prompts")
        # Outside the `try`: if the engine cannot get its memory back, the run must end.
        with self._engine.gradient_buffers_released() as nbytes:
            try:
                for answer in samples.generate(self._engine, nbytes):
                    self._watchdog.report_progress("sampling")
                    self._listeners.emit("sample", step=step, **answer)
            except (PenstockError, MemoryError) as problem:
                self._listeners.note(f"no samples: {problem}. Training continues")

    # The end.

    def _stop_early(self) -> None:
        if self._batches.step > 0:
            self._save_last()
        self._listeners.emit(
            "stopped", step=self._batches.step, steps=self._batches.steps, out=self._out_text
        )

    def _finish(self) -> None:
        self._save_last()
        if not self._has_updated:
            steps = self._batches.steps
            raise NoUpdateError(self._out_text, steps=steps, skipped=self._num_skipped)
        self._evaluate_and_sample()
        result = TrainingResult(
            steps=self._batches.step, loss=self._last_loss, eval_loss=self._eval_loss
        )
        self._save_last()  # again, if it was removed during the evaluation
        with name_file(self._saver.out):
            self._saver.publish(result)
        self._note_retries()
        tiers = self._engine.tiers()
        self._listeners.emit(
            "done",
            io_retries=self._num_retries,
            steps=self._batches.step,
            peak_host_bytes=self._engine.host_memory()["peak"],
            peak_hbm_bytes=tiers[Tier.HBM.value]["peak"],
            out=self._out_text,
            model=str(self._saver.settings.checkpoint.model_directory),
            run_id=self._saver.run_id,
        )

    @property
    def _out_text(self) -> str:
        """The output directory as the user wrote it, or where it was moved to."""
        return self._saver.settings.checkpoint.out


class _StoppedError(Exception):
    """The user asked to stop during an evaluation."""


def describe_excess(name: str, nbytes: Mapping[str, int]) -> str:
    """Say by how much a tier, or the `host` memory of the process, exceeds the plan."""
    peak, planned = nbytes["peak"], nbytes["planned"]
    text = (
        f"{name}: {format_bytes(peak)} in use, {format_bytes(peak - planned)} more than the "
        f"planned {format_bytes(planned)}"
    )
    if name == "host":
        return (
            f"{text}. `penstock probe` measures what the process itself needs; until then a plan "
            f"assumes it"
        )
    return f"{text}. Please report this: the plan should be an upper bound"
