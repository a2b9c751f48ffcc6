"""The loop: batches in, steps taken, saved and told. Room: show."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.errors import (
    CheckpointExistsError,
    CheckpointSpaceError,
    CheckpointWriteError,
)
from penstock.errors import NonFiniteLossError, PenstockError
from penstock.records import to_json
from penstock.settings import Settings, parse_interval
from penstock.train.checkpoints import CheckpointSaver, Standing
from penstock.train.errors import TokenRangeError
from penstock.train.events import Listeners
from penstock.train.failures import keep_batch, memory_told
from penstock.train.inputs import Data
from penstock.train.learning_rate import Rate
from penstock.train.progress import View
from penstock.train.signals import Stopping
from penstock.train.watchdog import Watchdog

if TYPE_CHECKING:
    from penstock.data.batches import Batches
    from penstock.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Everything that a run needs, ready."""

    settings: Settings
    engine: Engine
    data: Data
    batches: Batches
    keeper: CheckpointSaver
    resumed: bool


class Loop:
    """Takes a run to its end, or to where it is told to stop."""

    def __init__(
        self, run: TrainingRun, listeners: Listeners, view: View, stopping: Stopping
    ) -> None:
        self._run, self._listeners, self._view, self._stopping = run, listeners, view, stopping
        self._engine, self._batches = run.engine, run.batches
        self._rate = Rate.of(run.settings, run.batches.steps)
        self._scheduler = self._rate.scheduler(
            run.engine.optimizer, taken=run.engine.steps, highest=run.settings.schedule.lr
        )
        self._every = parse_interval(run.settings.checkpoint.save_every)
        self._watchdog = Watchdog(run.engine.waiting, listeners.note)
        self._evaluated: int | None = None
        self._sampled: int | None = None
        self._evaluating = False
        self._tried_step, self._tried_at = run.batches.step, time.monotonic()

    def run(self) -> bool:
        """Whether it came to its end."""
        with self._watchdog, memory_told(self._engine.plan):
            self._engine.on_progress = self._progress
            if not self._run.resumed:
                self._look()
            while not self._ended and not self._stopping.requested:
                self._step()
                self._save_if_due()
                self._evaluate_if_due()
            if not self._ended:
                self._stop()
                return False
            self._finish()
            return True

    @property
    def _ended(self) -> bool:
        return self._batches.step >= self._batches.steps

    # One step.

    def _step(self) -> None:
        begun = time.monotonic()
        position = self._batches.position
        batch = next(self._batches)
        rate = self._scheduler.get_last_lr()[0]
        self._check_tokens(batch)
        try:
            loss = self._engine.step(batch)
        except NonFiniteLossError:
            self._keep_bad(batch, position)
            raise
        told: dict[str, Any] = {
            "step": self._batches.step,
            "loss": float(loss),
            "grad_norm": self._engine.grad_norm,
            "lr": rate,
        }
        if self._engine.skipped:
            self._listeners.tell("skipped", **told, loss_scale=self._engine.scale.value)
            return
        self._scheduler.step()
        seconds = time.monotonic() - begun
        self._listeners.tell(
            "step",
            **told,
            epoch=round(self._batches.epoch, 6),
            seconds=seconds,
            tokens_per_second=batch["input_ids"].numel() / seconds,
            tiers=self._engine.tiers(),
        )

    def _check_tokens(self, batch: Any) -> None:
        token, rows = int(batch["input_ids"].max()), self._engine.inventory.vocabulary
        if token >= rows:
            raise TokenRangeError(token=token, vocabulary=rows)

    def _keep_bad(self, batch: Any, position: Any) -> None:
        """For a look at it; and the run as it was before it."""
        step = self._batches.step
        path = keep_batch(
            Path(self._run.settings.checkpoint.out), step, batch, self._run.data.dataset.decode
        )
        self._listeners.note(f"the batch of step {step} is in {path} and, as text, beside it")
        if step - 1 > 0 and self._run.keeper.saved_step != step - 1:
            self._save(Standing(step - 1, position, to_json(self._rate)))

    def _progress(self, done: int, total: int, what: str) -> None:
        self._watchdog.moved(what)
        if self._evaluating:
            self._view.busy(0, 0, f"evaluating: {what}")
        else:
            self._view.progress(done, total, what)

    # Keeping.

    def _save_if_due(self) -> None:
        steps, seconds = self._batches.step - self._tried_step, time.monotonic() - self._tried_at
        if self._every.is_due(steps=steps, seconds=seconds) and not self._ended:
            try:
                self._save(self._standing)
            except (CheckpointSpaceError, CheckpointWriteError) as failed:
                self._listeners.note(f"not saved: {failed}. Training goes on; tried again later")

    def _save(self, standing: Standing) -> None:
        self._tried_step = standing.step
        begun = time.monotonic()
        try:
            path = self._run.keeper.save(standing, self._saving)
        finally:
            self._tried_at = time.monotonic()
        self._listeners.tell(
            "save",
            step=standing.step,
            path=str(path),
            bytes=self._run.keeper.nbytes,
            seconds=self._tried_at - begun,
        )

    def _saving(self, done: int, total: int, what: str) -> None:
        self._watchdog.moved("saving")
        self._view.busy(done, total, "saving")

    @property
    def _standing(self) -> Standing:
        return Standing(self._batches.step, self._batches.position, to_json(self._rate))

    def _save_last(self) -> None:
        if self._run.keeper.saved_step != self._batches.step:
            try:
                self._save(self._standing)
            except CheckpointExistsError:
                self._run.keeper.saved_step = self._batches.step

    # Looking.

    def _evaluate_if_due(self) -> None:
        every = self._run.settings.evaluation.eval_every
        if every is not None and self._batches.step % every == 0 and not self._ended:
            self._look()

    def _look(self) -> None:
        self._evaluate()
        self._sample()

    def _sample(self) -> None:
        """What the model answers by now. There may be no room for it beside training."""
        samples, step = self._run.data.samples, self._batches.step
        if samples is None or self._stopping.requested or self._sampled == step:
            return
        self._sampled = step
        self._view.busy(0, 0, "answering the sample prompts")
        with (
            self._engine.gradient_buffers_released() as room
        ):  # which, if it is not had back, ends the run
            try:
                for answer in samples.answers(self._engine, room):
                    self._watchdog.moved("sampling")
                    self._listeners.tell("sample", step=step, **answer)
            except (PenstockError, MemoryError) as problem:
                self._listeners.note(f"no samples: {problem}. Training goes on")

    def _evaluate(self) -> None:
        held_out = self._run.data.held_out
        if held_out is None or self._evaluated == self._batches.step:
            return
        begun = time.monotonic()
        rows = held_out.batches(self._run.settings.schedule.batch, shuffle=False)
        self._evaluating = True
        try:
            found = self._engine.evaluate(self._unless_stopped(rows))
        except _StoppedError:
            return
        finally:
            self._evaluating = False
        self._evaluated = self._batches.step
        self._listeners.tell(
            "eval",
            step=self._batches.step,
            loss=found.loss,
            tokens=found.tokens,
            seconds=time.monotonic() - begun,
        )

    def _unless_stopped(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            if self._stopping.requested:
                raise _StoppedError
            yield batch

    # Ending.

    def _stop(self) -> None:
        """As the user asked."""
        if self._batches.step > 0:
            self._save_last()
        self._listeners.tell(
            "stopped",
            step=self._batches.step,
            steps=self._batches.steps,
            out=self._run.settings.checkpoint.out,
        )

    def _finish(self) -> None:
        self._save_last()
        self._look()
        self._run.keeper.publish()
        self._listeners.tell(
            "done",
            steps=self._batches.step,
            peak_host_bytes=peak_host_nbytes(),
            peak_hbm_bytes=self._engine.device.peak_nbytes(),
            out=self._run.settings.checkpoint.out,
        )


class _StoppedError(Exception):
    """An evaluation that the user does not wait for."""


def peak_host_nbytes() -> int:
    """The most memory that this process has had resident; 0 where the kernel does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    high = next((line for line in lines if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(high.split()[1]) * 1024
