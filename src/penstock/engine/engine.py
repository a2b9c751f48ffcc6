"""What an engine is told beside its plan, and what it tells. Room: move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from penstock import records
from penstock.checkpoint.errors import StateError
from penstock.checkpoint.training_state import TrainingState, read_engine_state
from penstock.checkpoint.writer import Progress as WriteProgress
from penstock.engine.allocate import Programs, StepState, allocate
from penstock.engine.batches import Cut, cut_batch
from penstock.engine.compute import Computer
from penstock.engine.device import Device
from penstock.engine.gradient_rounding import round_gradients
from penstock.engine.loss import ChunkedLoss, LossFunction
from penstock.engine.loss_scale import LossScale
from penstock.engine.optimizer import Grouping, StreamedAdamW
from penstock.engine.pending_update import Pending, draw_keys
from penstock.engine.runner import Progress, Runner
from penstock.engine.state_io import EngineFiles
from penstock.engine.state_view import StateView
from penstock.engine.tensor_access import Access
from penstock.engine.tier_memory import StoreSettings
from penstock.engine.timeline import Event, timeline
from penstock.engine.transfer import Mover
from penstock.errors import EngineError, EngineStateError, NonFiniteLossError
from penstock.model.inventory import Inventory
from penstock.model.split import SplitModel
from penstock.optim.norms import GradStats, clip_scale
from penstock.optim.threads import Pool
from penstock.plan.plan import Plan
from penstock.plan.weight_window import PlacementIndex
from penstock.records import Json
from penstock.roles import Dtype, Moments
from penstock.tiers import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What cannot change a bit of the result, and what the caller adds to the workload."""

    optimizer: Mapping[str, Any]
    grouping: Grouping
    loss: LossFunction | None = None
    seed: int = 0
    store: StoreSettings = field(default_factory=StoreSettings)
    sweep_threads: int | None = None
    nonfinite: str = "raise"
    """`raise`, or `skip`: leave the step out and go on. fp16 always skips, and halves its scale."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean over trained tokens."""

    loss: float
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """What an engine must remember besides its tensors to continue to the bit.

    It does not depend on the plan: a run may resume with other budgets.
    """

    FORMAT: ClassVar[int] = 1

    version: int = FORMAT

    fingerprint: str
    """Fingerprint of the model's blocks and tensors, and of which tensors are trained."""

    steps: int
    """Number of optimizer steps taken."""

    batches: int
    """Number of batches seen. Dropout masks depend on it."""

    seed: int
    """Random seed for dropout and stochastic rounding."""

    dtype: Dtype
    moments: Moments

    loss_scale: float = 1.0
    good_steps: int = 0
    """Number of steps since the loss scale last changed."""

    groups: Json = None
    """Parameter groups of the optimizer: hyperparameters, and the names of the tensors."""

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise EngineStateError("version", f"must be {self.FORMAT}, got {self.version}")

    @classmethod
    def of(cls, engine: Engine) -> EngineState:
        """Record the state of an engine."""
        return cls(
            fingerprint=engine.inventory.fingerprint,
            steps=engine.steps,
            batches=engine.batches,
            seed=engine.settings.seed,
            dtype=engine.workload.dtype,
            moments=engine.workload.moments,
            loss_scale=engine.scale.value,
            good_steps=engine.scale.good_steps,
            groups=[_group_record(engine, group) for group in engine.optimizer.param_groups],
        )

    @classmethod
    def load(cls, folder: str | Path) -> EngineState:
        """Read the engine's part of a checkpoint, of this version or an earlier one."""
        try:
            data, path = read_engine_state(folder)
        except StateError as wrong:
            raise EngineStateError(wrong.field, wrong.problem, where=wrong.where) from None
        return records.from_json(cls, data, where=str(path), error=EngineStateError)

    def check(self, engine: Engine) -> None:
        """Raise EngineStateError unless the engine can continue from this state."""
        for name, now in (
            ("fingerprint", engine.inventory.fingerprint),
            ("dtype", engine.workload.dtype),
            ("moments", engine.workload.moments),
            ("seed", engine.settings.seed),
        ):
            saved = getattr(self, name)
            if saved != now:
                raise EngineStateError(
                    name, f"was {saved} in the checkpoint and is {now} now; resume with {saved}"
                )
        names = [_group_record(engine, group)["params"] for group in engine.optimizer.param_groups]
        groups: Any = self.groups
        if [group["params"] for group in groups] != names:
            raise EngineStateError(
                "groups",
                "contain other tensors than in the checkpoint; resume with the same param_groups",
            )

    def restore(self, engine: Engine) -> None:
        """Set the engine's counters, loss scale and parameter groups."""
        engine.steps, engine.batches = self.steps, self.batches
        engine.scale.value, engine.scale.good_steps = self.loss_scale, self.good_steps
        groups: Any = self.groups
        for group, saved in zip(engine.optimizer.param_groups, groups, strict=True):
            settings = {k: v for k, v in saved.items() if k != "params"}
            group.update(settings | {"betas": tuple(settings["betas"])})


def _group_record(engine: Engine, group: dict[str, Any]) -> dict[str, Any]:
    """Describe a parameter group as JSON: names instead of tensors, and the plain values."""
    plain = {
        k: list(v) if isinstance(v, tuple) else v
        for k, v in group.items()
        if k != "params" and isinstance(v, int | float | str | bool | tuple | list)
    }
    return {"params": [engine.optimizer.name_of(p) for p in group["params"]], **plain}


# --------
# The engine: whole optimizer steps over a model that rests in tiers. Room: move.
#
# It obeys the plan and never re-plans. The sweep of a step is pending until the next forward, or
# until somebody wants to see its result: `finish`.

YIELDING = 10
"""Beside a GPU, threads that sweep let the one that launches kernels go first. There are as many as
CPUs, so it shares one with them, and would have half of it."""


class Engine:
    """Made by `prepare`. Not for several threads at once."""

    def __init__(
        self,
        plan: Plan,
        inventory: Inventory,
        body: SplitModel,
        device: Device,
        settings: EngineSettings,
    ) -> None:
        self.plan, self.inventory, self.workload = plan, inventory, plan.workload
        self.settings = settings
        self.body, self.device = body, device
        self.optimizer = StreamedAdamW(self, settings.optimizer, settings.grouping)
        self._programs = Programs.of(plan, inventory)
        pool = Pool(settings.sweep_threads, nice=YIELDING if device.where.type == "cuda" else 0)
        self._taken = allocate(plan, inventory, self._programs, device, settings.store, pool)
        self.access = Access(self._taken)
        self.files = EngineFiles(self.access, inventory)
        mover = Mover(self._taken)
        facts = PlacementIndex.of(inventory, plan.placement)
        numerics = self.workload.numerics
        loss = ChunkedLoss(
            body.logits, numerics.loss_chunk, settings.loss, fused=numerics.loss_kernel == "fused"
        )
        self._computer = Computer(self._taken, body, loss, mover, facts)
        self._computer.seed = settings.seed
        self._runner = Runner(self._taken, self._computer, mover)
        self.steps = 0
        self.batches = 0
        self.grad_norm = float("nan")
        self.skipped = False
        self.scale = LossScale.of(self.workload.dtype)
        self._pending: Pending | None = None
        self._stats: GradStats | None = None
        self._lost = False  # a loss behind those gradients was not finite
        self._closed = False

    # Training.

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One whole update with all micro-batches of the batch; its mean loss."""
        loss = self.forward_backward(batch)
        self.apply()
        return loss

    def forward_backward(
        self, batch: Mapping[str, torch.Tensor], *, num_items: int | None = None
    ) -> torch.Tensor:
        """Gradients of the batch, without an update. The loss is divided by `num_items`, or by the
        batch's trained tokens."""
        self._check_open()
        adds = self._stats is not None
        if adds and not self.workload.accumulate:
            raise EngineError(
                "gradients are there already: call apply() before the next forward_backward(), "
                "pass all sequences of a step in one batch, or prepare(accumulate=True), which "
                "keeps gradients in fp32"
            )
        cut = self._cut(batch)
        items = max(1, cut.items if num_items is None else num_items)
        self.body.train(True)
        run = self._next_run(cut, items, adds=adds)
        self._stats = None  # what a failure leaves half summed must not be applied
        self._run(run)
        self.batches += 1
        self._stats = self._gather()
        assert run.loss is not None
        loss = (run.loss / items).float().cpu()
        self._lost = (adds and self._lost) or not bool(torch.isfinite(loss))
        self._check_finite(loss)
        return loss

    def apply(self) -> None:
        """The update with the gradients that are there. Its learning rate, betas, decay, step
        number and clip scale are fixed now; the sweep itself comes with the next forward."""
        if self._stats is None:
            raise EngineError("there are no gradients: call forward_backward() first")
        stats, self._stats = self._stats, None
        if self.workload.accumulate:
            stats = round_gradients(self._taken)
        self.optimizer.note_step()
        self.skipped = self._lost or not stats.finite
        if self.skipped:
            self.scale.overflowed()
            return
        unscale = 1.0 / self.scale.value
        self.grad_norm = stats.norm * unscale
        clip = self.workload.clip
        scale = unscale if clip is None else unscale * clip_scale(self.grad_norm, clip)
        self.steps += 1
        self._pending = Pending(
            "adamw",
            self.optimizer.coefficients(self.steps, scale),
            draw_keys(self.inventory, self.settings.seed, self.steps),
        )
        self.scale.took_step()

    def finish(self) -> None:
        """Make the pending sweeps now."""
        self._check_open()
        if self._pending is not None:
            self._run(StepState(self._programs.sweep, (), self._pending, self.batches))

    # Looking.

    def evaluate(self, batches: Iterable[Mapping[str, torch.Tensor]]) -> Evaluation:
        """The mean loss over trained tokens; nothing is changed."""
        self.finish()
        self.body.train(False)
        total, tokens = 0.0, 0
        for batch in batches:
            cut = self._cut(batch)
            for micros in cut.rounds:
                if micros:
                    run = StepState(self._programs.evaluate, [micros], None, self.batches)
                    self._runner.run(run)
                    assert run.loss is not None
                    total += float(run.loss)
            tokens += cut.items
        return Evaluation(total / tokens if tokens else float("nan"), tokens)

    def lending(self) -> AbstractContextManager[int]:
        """Inside, device memory that only steps need is free for others: so many bytes."""
        self.finish()
        return self._taken.lending()

    @property
    def state(self) -> StateView:
        """Weights, masters and moments by name, as host tensors."""
        return StateView(self.access, self.inventory, self.finish)

    @property
    def on_progress(self) -> Progress | None:
        return self._runner.on_progress

    @on_progress.setter
    def on_progress(self, tell: Progress | None) -> None:
        self._runner.on_progress = tell

    def timeline(self) -> list[Event]:
        """When each operation of the last step ran."""
        passed = self._runner.latest()
        return [] if passed is None else timeline(passed)

    def waiting(self) -> str:
        """What it waits for right now; callable from any thread."""
        return self._runner.waiting()

    def tiers(self) -> dict[str, dict[str, int]]:
        """What each tier holds, as planned and taken."""
        plan = self.plan
        return {
            tier.value: {
                "budget": plan.budget.of(tier),
                "at_rest": plan.at_rest(tier),
                "peak": plan.peak(tier),
            }
            for tier in Tier
        }

    # Keeping.

    def write(
        self, folder: str | Path, *, optimizer: bool = True, progress: WriteProgress | None = None
    ) -> None:
        """Weights, and with `optimizer` all that a resume needs, into an existing directory."""
        self.finish()
        self.files.write(Path(folder), optimizer=optimizer, progress=progress)
        if optimizer:
            TrainingState(engine=self.state_record()).save(folder)

    def state_record(self) -> Json:
        """Return what the engine must remember besides its tensors, as plain JSON."""
        return records.to_json(EngineState.of(self))

    def read(self, folder: str | Path) -> None:
        """Continue from what `write` wrote, to the bit, whatever plan wrote it."""
        state = EngineState.load(folder)
        state.check(self)
        self._pending = self._stats = None
        self.files.read(Path(folder))
        state.restore(self)

    # Ending.

    def close(self) -> None:
        """Give everything back. Pending sweeps are not made: `finish` first to keep them."""
        if not self._closed:
            self._closed = True
            self._runner.close()
            self.body.release()
            self._taken.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Within.

    def _next_run(self, cut: Cut, items: int, *, adds: bool) -> StepState:
        pending, programs = self._pending, self._programs
        program = programs.again if adds else programs.step if pending else programs.first
        return StepState(
            program, cut.rounds, pending, self.batches, items, self.scale.value, fresh=not adds
        )

    def _run(self, run: StepState) -> None:
        """With the pending sweeps. What is left of them after a failure can still be finished."""
        try:
            self._runner.run(run)
        finally:
            if self._pending is not None and self._swept(self._pending):
                self._pending = None

    def _cut(self, batch: Mapping[str, torch.Tensor]) -> Cut:
        rounds, where = self.plan.placement.rounds, self.device.where
        return cut_batch(batch, self.workload, rounds, where)

    def _gather(self) -> GradStats:
        total = GradStats(0, 0.0, None)
        for block, tensor, ticket in self._taken.gradients.stats:
            found = ticket.wait()
            where = None if found.first_bad is None else (block, tensor + found.first_bad[0])
            total = total + GradStats(found.units, found.max_abs, where)
        return total

    def _check_finite(self, loss: torch.Tensor) -> None:
        assert self._stats is not None
        if bool(torch.isfinite(loss)) and self._stats.finite:
            return
        if not self.scale.fixed and bool(torch.isfinite(loss)):
            return  # fp16: apply() leaves the step out and halves the scale
        if self.settings.nonfinite == "skip":
            return
        bad, self._stats = self._stats.first_bad, None
        problem = f"the loss is {float(loss)}"
        if bool(torch.isfinite(loss)) and bad is not None:
            tensors = [t for t in self.inventory.blocks[bad[0]].tensors if t.trainable]
            problem = f"the gradient of {tensors[bad[1]].name} is not finite"
        raise NonFiniteLossError(problem, step=self.steps + 1)

    def _swept(self, pending: Pending) -> bool:
        wanted = {
            (op.block, op.piece) for op in self._programs.sweep.operations if op.verb == "sweep"
        }
        return wanted <= pending.done

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
