"""The engine: runs optimizer steps over a model whose parameters live in several tiers.

The engine executes a plan and never makes one. A step is forward, loss and backward over all blocks
(`forward_backward`), then the optimizer update (`apply`). The update is only *decided* by `apply`;
the optimizer sweeps that carry it out run block by block during the next forward pass, where they
overlap with computation, or in `finish`, which everything that looks at the parameters calls first.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import nn

from penstock import records
from penstock.checkpoint.disk import translate_write_errors
from penstock.checkpoint.errors import StateError
from penstock.checkpoint.manifest import FileRecord, check_small_files
from penstock.checkpoint.model_files import ModelFiles
from penstock.checkpoint.record_files import record_model
from penstock.checkpoint.training_state import (
    Software,
    TrainingState,
    engine_state_file,
    read_engine_state,
)
from penstock.checkpoint.writer import PartsError
from penstock.checkpoint.writer import Progress as WriteProgress
from penstock.engine.allocate import Programs, allocate
from penstock.engine.batches import SplitBatch, check_documents, split_batch
from penstock.engine.caller_passes import (
    NOT_ZEROED,
    ROUNDED,
    SPENT,
    UPDATED,
    CallerPasses,
    LiveForward,
)
from penstock.engine.compute import Computer
from penstock.engine.device import Device
from penstock.engine.device_memory import explain_out_of_memory
from penstock.engine.expert_load import ExpertLoad
from penstock.engine.gradient_buffers import GradientBuffers
from penstock.engine.gradients import NO_GRADIENT, round_gradients
from penstock.engine.host_arenas import HostArenas
from penstock.engine.loss import ChunkedLoss, LossFunction, LossScale, TokenValues
from penstock.engine.optimizer import Grouping, StreamedOptimizer
from penstock.engine.pending_update import PendingUpdate, draw_keys
from penstock.engine.rank_agreement import all_or_none, gather_tensors
from penstock.engine.rank_exchange import RankExchange, own_report
from penstock.engine.report import StepReport, share
from penstock.engine.restore import giving_back, load_into, restore_live
from penstock.engine.result_record import (
    find_differences,
    result_record,
    warn_of_differences,
    was_self_checked,
)
from penstock.engine.runner import Progress, Runner
from penstock.engine.startup import FIRST_STEP, StartUp
from penstock.engine.state_io import EngineFiles
from penstock.engine.state_view import StateView
from penstock.engine.step_records import Event, timeline
from penstock.engine.step_state import StepState
from penstock.engine.sweep_pool import sweep_pool
from penstock.engine.tensor_access import TensorAccess
from penstock.engine.tier_memory import StoreSettings
from penstock.engine.transfer import Mover
from penstock.engine.transport import SingleRank, Transport, check_ranks
from penstock.errors import (
    BatchError,
    EngineError,
    EngineStateError,
    NonFiniteLossError,
    SettingsError,
)
from penstock.memory.process import peak_resident_nbytes, resident_nbytes
from penstock.model.inventory import Inventory
from penstock.model.live_model import LiveModel
from penstock.model.split import MicroBatch, SplitModel
from penstock.optim.norms import GradStats, clip_scale
from penstock.optimizer_options import check_values
from penstock.plan.placement_index import PlacementIndex
from penstock.plan.plan import Plan
from penstock.records import Json
from penstock.roles import Dtype, Moments, OptimizerName
from penstock.tiers import Tier

SWEEP_NICE = 10
"""Niceness of the sweep threads when a GPU computes.

There are as many sweep threads as CPUs, so one of them shares its CPU with the thread that launches
kernels. At equal priority that thread would get only half of the CPU, and the GPU would wait for
it.
"""


NO_LABELS = (
    "no token has a label to predict: all are -100, padding, or the first of their document, so "
    "the mean loss would be 0/0. Remove such batches from the data"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine that are not part of the plan or its workload."""

    optimizer: Mapping[str, Any]
    """Options of the workload's optimizer that differ from `optimizer_options.DEFAULTS`."""
    grouping: Grouping
    """Makes the param groups."""
    loss: LossFunction | None = None
    """A loss function in place of cross-entropy."""
    seed: int = 0
    """Seed of dropout, of the noise on embeddings and of stochastic rounding."""
    store: StoreSettings = field(default_factory=StoreSettings)
    sweep_threads: int | None = None
    """Number of threads of the CPU sweep; None for one per CPU."""
    nonfinite: str = "raise"
    """Response to a loss or gradient that is not finite: `raise` an error, or `skip` the step.
    With fp16, an overflow of the gradient always skips the step and halves the loss scale. The
    optimizers in `penstock.optim` take `refuse` and `trust` instead: `refuse` raises like `raise`,
    `trust` does not check, and none of them skips a step."""
    self_checked: bool = False
    """Whether the model has passed the self-check (`penstock.engine.self_check`)."""


class ForwardOutput(NamedTuple):
    """The result of a forward pass whose loss the caller computes."""

    hidden: torch.Tensor
    """Output of the last layer."""
    live: LiveForward
    """What the backward pass needs."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation."""

    loss: float
    """Mean loss over the tokens whose label is not -100."""
    tokens: int
    """Number of those tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """What an engine must save in addition to its tensors to resume bit for bit.

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

    optimizer: OptimizerName = "adamw"
    """The optimizer. Checkpoints of earlier versions do not say so."""

    momentum: bool = False
    """Whether SGD stores its momentum."""

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
            optimizer=engine.workload.optimizer,
            momentum=engine.workload.momentum,
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
        if self.fingerprint != engine.inventory.fingerprint:
            raise EngineStateError("fingerprint", self._describe_tensors(engine))
        for name, now in (
            ("optimizer", engine.workload.optimizer),
            ("momentum", engine.workload.momentum),
            ("dtype", engine.workload.dtype),
            ("moments", engine.workload.moments),
            ("seed", engine.settings.seed),
        ):
            saved = getattr(self, name)
            if saved != now:
                raise EngineStateError(
                    name, f"was {saved} in the checkpoint and is {now} now; resume with {saved}"
                )
        records_now = [_group_record(engine, group) for group in engine.optimizer.param_groups]
        groups: Any = self.groups
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise EngineStateError("groups", "must be a list of objects {...}")
        for number, (group, current) in enumerate(zip(groups, records_now, strict=False)):
            _check_group(f"groups[{number}]", engine.optimizer.kind, group, current)
        if [group.get("params") for group in groups] != [now["params"] for now in records_now]:
            raise EngineStateError(
                "groups",
                "contain other tensors than in the checkpoint; resume with the same param_groups",
            )

    def _describe_tensors(self, engine: Engine) -> str:
        """Say how the tensors differ from those of the checkpoint, and what to do."""
        saved, groups = _trained_names(self.groups), engine.optimizer.param_groups
        now = _trained_names([_group_record(engine, group) for group in groups])
        changes = [
            f"{len(names)} {words}, such as {min(names)}"
            for names, words in (
                (saved - now, "of its trained tensors are not trained now"),
                (now - saved, "tensors are trained now that it did not train"),
            )
            if names
        ]
        reason = "; ".join(changes) or "sizes or frozen tensors differ"
        return (
            f"the checkpoint has other tensors than this model, or others of them are trained: "
            f"{reason}. Resume with the same model, adapter and frozen tensors"
        )

    def restore(self, engine: Engine) -> None:
        """Set the engine's counters, loss scale and parameter groups."""
        engine.steps, engine.batches = self.steps, self.batches
        engine.scale.value, engine.scale.good_steps = self.loss_scale, self.good_steps
        groups: Any = self.groups
        for group, saved in zip(engine.optimizer.param_groups, groups, strict=True):
            for name, value in saved.items():
                if name != "params":
                    group[name] = tuple(value) if isinstance(value, list) else value


def _trained_names(groups: Any) -> set[str]:
    """Return the names in parameter groups, as far as they are well-formed."""
    found: set[str] = set()
    for group in groups if isinstance(groups, list) else []:
        names = group.get("params") if isinstance(group, dict) else None
        found |= (
            {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
        )
    return found


def _check_group(
    where: str, kind: OptimizerName, saved: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raise EngineStateError unless all hyperparameters are there and of the right type."""
    for name, value in now.items():
        found: Any = saved.get(name)
        pairs = zip(found, value, strict=True) if _are_lists(found, value) else [(found, value)]
        if name != "params" and not all(_is_alike(one, other) for one, other in pairs):
            raise EngineStateError(f"{where}.{name}", f"must be like {value}, got {found!r:.60}")
    try:
        check_values(kind, saved)
    except SettingsError as wrong:
        raise EngineStateError(f"{where}.{wrong.field}", wrong.problem) from None


def _are_lists(one: object, other: object) -> bool:
    return isinstance(one, list) and isinstance(other, list) and len(one) == len(other)


def _is_alike(saved: object, now: object) -> bool:
    if isinstance(now, int | float) and not isinstance(now, bool):
        return (
            isinstance(saved, int | float)
            and not isinstance(saved, bool)
            and abs(saved) <= sys.float_info.max
        )
    # Lists are compared by their elements, unless their lengths differ.
    return type(saved) is type(now) and not isinstance(now, list)


@dataclass(frozen=True, slots=True)
class _ItemCount:
    """The token counts by which the losses of an update are divided."""

    first: int
    """Number that the loss of the first batch was divided by."""
    total: int
    """Number of tokens with a label in all batches."""
    counted: bool
    """Whether the engine counted the tokens; otherwise, the caller passed `num_items`."""

    @property
    def correction(self) -> float:
        """The factor that makes the sum of the gradients that of the mean over all tokens."""
        return self.first / max(1, self.total) if self.counted else 1.0

    @property
    def reduction(self) -> float:
        """The part of the correction that is a power of two, and 1 at most.

        The sum is multiplied by it before it is rounded, so that it exceeds fp16 only if the mean
        does. A power of two changes no bit of a rounded bf16 or fp32 number.
        """
        return 1 / _power_of_two_from(1 / self.correction)


def _power_of_two_from(value: float) -> float:
    """Return the smallest power of two that is at least `value` and at least 1."""
    return 2.0 ** max(0, math.ceil(math.log2(value))) if value > 1 else 1.0


def _group_record(engine: Engine, group: dict[str, Any]) -> dict[str, Any]:
    """Describe a parameter group as JSON: names instead of tensors, and the plain values."""
    plain = {
        k: list(v) if isinstance(v, tuple) else v
        for k, v in group.items()
        if k != "params" and isinstance(v, int | float | str | bool | tuple | list)
    }
    return {"params": [engine.optimizer.name_of(p) for p in group["params"]], **plain}


class Engine:
    """Trains one model under one plan. Made by `penstock.prepare`.

    One thread at a time may use an engine, except for `waiting`.
    """

    def __init__(
        self,
        plan: Plan,
        inventory: Inventory,
        split_model: SplitModel,
        device: Device,
        settings: EngineSettings,
        ranks: Transport | None = None,
        *,
        start_up: StartUp | None = None,
        host: HostArenas | None = None,
    ) -> None:
        self.start_up = StartUp() if start_up is None else start_up
        """How long each phase took, from the call of `prepare` to the end of the first step."""
        ranks = SingleRank() if ranks is None else ranks
        check_ranks(plan.workload, ranks)
        inventory = plan.workload.stored(inventory)
        plan = plan.for_rank(ranks.rank)  # the only place that applies the nodes and paths of ranks
        self.plan, self.inventory, self.workload = plan, inventory, plan.workload
        self.settings, self.ranks = settings, ranks
        self.split_model, self.device = split_model, device
        self.optimizer = StreamedOptimizer(self, settings.optimizer, settings.grouping)
        self._programs = Programs.of(plan, inventory)
        nice = SWEEP_NICE if self.on_gpu else 0
        pool = sweep_pool(plan, ranks.rank, settings.sweep_threads, nice=nice)
        store = settings.store
        self._memory = allocate(
            plan, inventory, self._programs, device, store, pool, ranks,
            start_up=self.start_up, host=host,
        )  # fmt: skip
        self.access = TensorAccess(self._memory)
        self.files = EngineFiles(self.access, inventory, split_model.buffers)
        mover = Mover(self._memory)
        placement = PlacementIndex.of(inventory, plan.placement)
        numerics = self.workload.numerics
        loss = ChunkedLoss(
            split_model.logits,
            numerics.loss_chunk,
            settings.loss,
            fused=numerics.loss_kernel == "fused",
            label_smoothing=numerics.label_smoothing,
        )
        buffers = GradientBuffers(self._memory)
        self._computer = Computer(self._memory, split_model, loss, mover, placement, buffers)
        self._computer.seed = settings.seed
        exchange = RankExchange(self._memory, buffers)
        self._runner = Runner(self._memory, self._computer, mover, exchange)
        self.passes = CallerPasses(self._memory, self._programs, split_model, self._run)
        """Forward and backward as separate passes, if the workload has a loss of the caller's."""
        self.plan_change = ""
        """What the rehearsal changed in the plan, in a sentence for the user; "" if nothing."""
        self.live_model: LiveModel | None = None
        """The caller's own model, if `prepare` got one: `close` gives it the trained weights."""
        self.model_files: ModelFiles | None = None
        """Config and tokenizer, which `write` saves next to the weights; None if not known."""
        self.self_checked = settings.self_checked
        """Whether the model has passed the self-check, in this run and in all that it continues."""
        self.steps = 0
        """Number of optimizer steps made."""
        self.batches = 0
        """Number of batches seen."""
        self.grad_norm = float("nan")
        """Gradient norm of the last step that was not skipped, before clipping and without the loss
        scale; NaN before the first such step. A skipped step leaves it unchanged."""
        self.skipped = False
        """Whether the last `apply` skipped the update."""
        self.scale = LossScale.of(self.workload.dtype)
        """The loss scale: adapted to overflows with fp16, otherwise 1."""
        self.keeps_token_values = False
        """Whether `forward_backward` and `evaluate` fill `token_values`."""
        self.token_values: list[TokenValues] = []
        """Of the last `forward_backward`, or of each batch of the last `evaluate`: what the model
        predicted for each token, in host tensors of the batch's shape. Tokens without a target have
        values, too."""
        self._pending: PendingUpdate | None = None
        self._stats: GradStats | None = None  # of the gradients that wait for `apply`, if any
        self._items = _ItemCount(1, 1, counted=True)  # of the batches behind those gradients
        self._loss_not_finite = False  # of any of these batches
        self._tensor_stats: dict[str, GradStats] | None = None  # of rounded gradients, by name
        self._late_gradient = ""  # why a gradient of the head came too late, if one did
        self.keeps_gradients = False
        """Whether the gradients of the last update would still be there in torch, because nobody
        has called `zero_grad`. No gradients can be added then."""
        self._expert_rows: Mapping[int, torch.Tensor] = {}  # of the last training step, by block
        self._weights_version = 0  # changes with every update, and with every checkpoint read
        self._io_retries = 0
        self._closed = False

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self.device.torch_device.type == "cuda"

    # Training.

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Make one optimizer step with all micro-batches of the batch; return its mean loss."""
        loss = self.forward_backward(batch)
        self.apply()
        return loss

    def forward_backward(
        self, batch: Mapping[str, torch.Tensor], *, num_items: int | None = None
    ) -> torch.Tensor:
        """Compute the gradients of a batch, without an update; return its mean loss.

        The loss is the mean over the tokens whose label is not -100. Without any, it is not a
        number: BatchError, or, with `nonfinite="skip"`, a skipped step.

        Several calls before `apply` accumulate gradients, if the engine was prepared with
        `accumulate=True`. The update uses the mean over the tokens of all these batches, however
        they are distributed, as for one large batch. With `num_items` in every call, the sum of
        each batch's losses is divided by it instead, and nothing else is: pass the number of such
        tokens in all batches of the update.
        """
        self._check_open()
        self._check_computes_loss("step() and forward_backward()")
        accumulating = self._stats is not None
        if accumulating and not self.workload.accumulate:
            raise EngineError(
                "gradients of an earlier batch have not been applied. Call apply() before the next "
                "forward_backward(), pass all sequences of a step in one batch, or use "
                "prepare(accumulate=True), which keeps gradients in fp32"
            )
        if accumulating and (num_items is None) != self._items.counted:
            raise EngineError(
                "num_items was passed to some of the forward_backward() calls of an update. Pass "
                "it to all of them (the number of tokens with a label in all batches), or to none"
            )
        with self.start_up.phase(FIRST_STEP), self._explaining("a training step"):
            loss = self._compute_gradients(batch, num_items, accumulating=accumulating)
        self.start_up.end()
        finite = bool(torch.isfinite(loss))
        self._loss_not_finite = (accumulating and self._loss_not_finite) or not finite
        self._check_finite(loss)
        return loss

    def _compute_gradients(
        self, batch: Mapping[str, torch.Tensor], num_items: int | None, *, accumulating: bool
    ) -> torch.Tensor:
        split = self._split(batch)
        items = split.num_items if num_items is None else num_items
        if num_items is not None and items < 1:
            raise BatchError(f"num_items must be 1 or more, got {items}")
        if items == 0 and self.settings.nonfinite != "skip":
            raise BatchError(NO_LABELS)
        # Without num_items, the total is known only in `apply`. Until then all batches are divided
        # by the count of the first. A larger batch is divided by more, so that fp16 does not
        # overflow, and its gradients are multiplied by as much when they are added in fp32.
        first = self._items.first if accumulating else max(1, items)
        weight = _power_of_two_from(items / first) if num_items is None else 1.0
        divisor = round(first * weight) if num_items is None else items
        self.split_model.train(True)
        if self._pending is not None and self._pending.has_late_pieces:
            # An earlier step failed. Its moments on NVMe may have been left with refused elements,
            # which are found in the weights. Only a sweep of everything reads those, too.
            self.finish()
        step = self._next_step(split, divisor, accumulating=accumulating)
        step.weight = weight
        self._ask_for_token_values(step)
        self._stats = None  # if the step fails, half-summed gradients must not be applied
        self._run(step)
        self.batches += 1
        report = self._report(step)
        self._stats = report.stats
        self._expert_rows = step.expert_rows
        self.token_values = self._token_values([step])
        before = self._items.total if accumulating else 0
        self._items = _ItemCount(first, before + split.num_items, counted=num_items is None)
        # NaN without items: `apply` skips the step.
        return (torch.tensor(report.loss, dtype=torch.float64) / items).float()

    def expert_load(self) -> ExpertLoad | None:
        """Return how evenly the last step used the experts; None for a model without any."""
        return ExpertLoad.of(self._expert_rows)

    def apply(self, tensor_scales: Mapping[str, float] | None = None) -> None:
        """Apply an optimizer update with the gradients that were computed.

        The options of the optimizer, step number and clipping scale are fixed now. The sweeps
        that carry the update out run during the next forward pass, or in `finish`. Raises
        LossScaleError if fp16 overflows in every step, although the loss scale is at its minimum.
        `tensor_scales` are factors of the gradients of single tensors, by name.
        """
        if self._stats is None:
            raise EngineError(
                "there are no gradients to apply; call "
                + ("forward_backward() first" if self._computes_loss else "loss.backward() first")
            )
        if self._late_gradient:
            raise EngineError(self._late_gradient)
        stats = self._stats
        if self.workload.accumulate:
            stats = sum(self.round_gradients().values(), NO_GRADIENT)
            stats = share(StepReport(stats, ()), self.ranks, 0).stats
        self._stats = self._tensor_stats = None
        self.optimizer.note_step()
        self.skipped = self._loss_not_finite or not stats.finite
        if self.skipped:
            self.scale.note_overflow()
            return
        unscale = self._unscale
        self.grad_norm = stats.norm * unscale
        clip = self.workload.clip
        factor = unscale if clip is None else unscale * clip_scale(self.grad_norm, clip)
        steps = self.steps + 1
        # The sweeps multiply gradients by `factor`, so clipping costs no pass of its own.
        pending = PendingUpdate(
            self.optimizer.rule,
            self.optimizer.coefficients(steps, factor, tensor_scales),
            draw_keys(self.inventory, self.settings.seed, steps),
            whole=self.optimizer.whole_updates(steps, factor, tensor_scales),
        )
        # Nothing counts before all of it is known: a wrong option, or Ctrl-C, leaves no update.
        self._pending, self.steps = pending, steps
        self._weights_version += 1
        self.scale.note_good_step()
        if not self._computes_loss:  # the caller may look at the head's weights right away
            self.passes.update_held(self._pending, self.batches)

    def round_gradients(self) -> dict[str, GradStats]:
        """Round the accumulated gradients to the model's type; return their norms by tensor.

        No more gradients can be added to them afterwards, until `apply` or `clear_gradients`.
        """
        if self._tensor_stats is None:
            memory = self._memory
            with self._explaining("rounding of gradients"):
                if not self._computes_loss:
                    self.passes.store_held_gradients(self.batches)
                self._tensor_stats = round_gradients(
                    memory.tiers, memory.staging, memory.sweep_pool, self._items.reduction
                )
        return self._tensor_stats

    # Training with a loss that the caller computes.

    def forward_pass(self, micros: Sequence[MicroBatch], *, training: bool) -> ForwardOutput:
        """Run the embedding and the layers, and keep what the backward pass needs.

        EngineError if more forward passes await their backward pass than the plan has memory for.
        """
        self._check_open()
        live = self.passes.start_live(
            micros, self.batches, self._weights_version, training=training
        )
        try:
            with self.start_up.phase(FIRST_STEP), self._explaining("a forward pass"):
                self.passes.ensure_held(self._pending, self.batches)
                hidden = self.passes.forward(live, self._pending)
        except BaseException:
            live.release()
            raise
        self.batches += 1
        return ForwardOutput(hidden, live)

    def inference_pass(self, micros: Sequence[MicroBatch], *, training: bool) -> torch.Tensor:
        """Run the embedding and the layers without keeping anything; return the last output."""
        self._check_open()
        with self._explaining("a forward pass"):
            self.passes.ensure_held(self._pending, self.batches)
            return self.passes.infer(micros, self.batches, self._pending, training=training)

    def backward_pass(self, live: LiveForward, gradient: torch.Tensor) -> None:
        """Add the gradients of a forward pass, given that of its output, to those of the update."""
        self._check_open()
        if live.spent:
            raise EngineError(SPENT)
        problem = self._addition_problem()
        problem = UPDATED if live.version != self._weights_version else problem
        if problem:
            # torch keeps the graph of a backward pass that failed until the next one.
            live.release()
            raise EngineError(problem)
        adds, self._stats = self._stats is not None, None
        try:
            with self.start_up.phase(FIRST_STEP), self._explaining("a backward pass"):
                self.passes.backward(live, gradient, adds=adds)
            self.start_up.end()
        except BaseException:
            # Half-summed gradients must not be applied.
            self.clear_gradients()
            raise
        finally:
            live.release()
        self._stats, self._items = NO_GRADIENT, _ItemCount(1, 1, counted=False)

    def add_head_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Add the gradient of a held tensor, which autograd has computed.

        A gradient that comes too late raises no error here, inside of autograd, but in the backward
        pass that follows, or in `apply`.
        """
        if problem := self._addition_problem():
            self._late_gradient = problem
            if not self.trains_layers:  # no backward pass follows, and `apply` raises the error
                self._stats = NO_GRADIENT
            return
        self._memory.held.add(name, gradient)
        if not self.trains_layers:
            self._stats, self._items = NO_GRADIENT, _ItemCount(1, 1, counted=False)

    def _addition_problem(self) -> str:
        """Return why no gradient can be added now; empty if one can."""
        if self.keeps_gradients:
            return NOT_ZEROED
        return ROUNDED if self._tensor_stats is not None else ""

    @property
    def held_without_gradient(self) -> set[str]:
        """Names of the head's trained tensors that no loss has depended on since the update."""
        # `apply` reports a gradient that came too late.
        return set() if self._late_gradient else self._memory.held.without_gradient

    @property
    def trains_layers(self) -> bool:
        """Whether anything before the head is trained, so that backward passes are needed."""
        return any(block.parameters(True) for block in self.inventory.blocks[:-1])

    def head_parameters(self) -> dict[str, nn.Parameter]:
        """Return the weights that a caller's loss computes with, in device memory, by name."""
        return self._memory.held.parameters()

    def replace_weights(self, write: Callable[[Engine], None]) -> None:
        """Let `write` set weights in the tiers, for a model whose loss the caller computes."""
        self.finish()
        write(self)
        self._weights_version += 1
        self.passes.update_held(None, self.batches)

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients to apply."""
        return self._stats is not None

    def clear_gradients(self) -> None:
        """Forget the gradients that were computed."""
        self._stats = self._tensor_stats = None
        self._late_gradient = ""
        self._memory.held.forget_gradients()

    @property
    def _unscale(self) -> float:
        """The factor that makes the gradients those of the mean loss."""
        return self._items.correction / self._items.reduction / self.scale.value

    @property
    def waiting_grad_norm(self) -> float:
        """Norm of the gradients that wait for `apply`, before clipping and without the loss scale.

        It is infinite if a gradient is not finite. With `accumulate=True`, the gradients are
        complete only in `apply`: use `grad_norm` after it.
        """
        if self._stats is None or self.workload.accumulate:
            raise EngineError(
                "no norm is known: with accumulate=True, read grad_norm after apply()"
                if self.workload.accumulate
                else "there are no gradients; call forward_backward() first"
            )
        return self._stats.norm * self._unscale if self._stats.finite else math.inf

    def finish(self) -> None:
        """Run the pending optimizer sweeps now."""
        self._check_open()
        if self._pending is not None:
            with self._explaining("the optimizer sweep"):
                self._run(StepState(self._programs["sweep"], (), (), self._pending, self.batches))

    # Evaluation and inspection.

    def evaluate(self, batches: Iterable[Mapping[str, torch.Tensor]]) -> Evaluation:
        """Return the mean loss over tokens whose label is not -100.

        Pending sweeps are finished first. Raises BatchError if no batch has such a token.
        """
        self._check_computes_loss("evaluate()")
        self.finish()
        self.split_model.train(False)
        total, tokens = 0.0, 0
        values: list[TokenValues] = []
        for batch in batches:
            with self._explaining("an evaluation"):
                loss, count = self._evaluate_batch(batch, values)
            total, tokens = total + loss, tokens + count
        self.token_values = values
        if not tokens:
            raise BatchError(NO_LABELS)
        return Evaluation(total / tokens, tokens)

    def _evaluate_batch(
        self, batch: Mapping[str, torch.Tensor], values: list[TokenValues]
    ) -> tuple[float, int]:
        split, total, steps = self._split(batch), 0.0, []
        for micros, size in zip(split.rounds, split.sizes, strict=True):
            if size:
                step = self._evaluation_step(micros, size)
                self._ask_for_token_values(step)
                self._runner.run(step)
                steps.append(step)
                total += self._report(step).loss
        values += self._token_values(steps)
        return total, split.num_items

    def _evaluation_step(self, micros: Sequence[MicroBatch], size: int) -> StepState:
        return StepState(
            self._programs["evaluate"], [micros], [size], None, self.batches,
            keeps_activations=False,
        )  # fmt: skip

    def logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of a batch, as `[sequences, tokens, vocabulary]` on the host.

        Pending sweeps are finished first. The logits of a batch are large: one sequence of 4,096
        tokens has 1.2 GB of them with a vocabulary of 150,000 in bf16.
        """
        self._check_computes_loss("logits()")
        self.finish()
        self.split_model.train(False)
        found: dict[int, torch.Tensor] = {}
        with self._explaining("a prediction"):
            split = self._split(batch)
            for micros, size in zip(split.rounds, split.sizes, strict=True):
                if size:
                    step = self._evaluation_step(micros, size)
                    step.logits = found
                    self._runner.run(step)
            gathered = gather_tensors(self.ranks, {str(number): t for number, t in found.items()})
        return torch.cat([gathered[number] for number in sorted(gathered, key=int)])

    def _ask_for_token_values(self, step: StepState) -> None:
        if self.keeps_token_values:
            step.token_values = {}

    def _token_values(self, steps: Sequence[StepState]) -> list[TokenValues]:
        """Copy the values of one batch to the host: one entry, or none if nobody asked."""
        if not any(step.token_values is not None for step in steps):
            return []
        found = {n: v for step in steps for n, v in (step.token_values or {}).items()}
        shapes = {m.number: m.shape for step in steps for each in step.rounds for m in each}
        sides = []
        for name in ("entropy", "is_top"):
            own = {str(n): getattr(v, name).cpu().view(shapes[n]) for n, v in found.items()}
            parts = gather_tensors(self.ranks, own)
            sides.append(torch.cat([parts[number] for number in sorted(parts, key=int)]))
        return [TokenValues(*sides)]

    def gradient_buffers_released(self) -> AbstractContextManager[int]:
        """Free device memory that only training steps need, inside a `with` block.

        The context manager yields how many bytes that makes available.
        """
        self.finish()
        return self._memory.gradient_buffers_released()

    @property
    def state(self) -> StateView:
        """Weights, master weights and moments by name, as host tensors."""
        return StateView(self.access, self.inventory, self.finish)

    @property
    def on_progress(self) -> Progress | None:
        """Callback for every operation of the computing thread."""
        return self._runner.on_progress

    @on_progress.setter
    def on_progress(self, callback: Progress | None) -> None:
        self._runner.on_progress = callback

    def timeline(self) -> list[Event]:
        """Return when each operation of the last successful step ran."""
        record = self._runner.latest()
        return [] if record is None else timeline(record)

    def waiting(self) -> str:
        """Describe what the engine waits for right now; callable from any thread."""
        return self._runner.waiting()

    def tiers(self) -> dict[str, dict[str, int]]:
        """Return what each tier really holds now, next to the plan, in bytes.

        - `budget`: how much the plan was allowed to use.
        - `planned`: the most that the plan says the tier will hold.
        - `used`: what is allocated now. DRAM and CXL: the size of all arenas, which are in memory
          as a whole. NVMe: the disk space that the store has allocated for data, without the
          headers of its files. HBM on a GPU: what torch's allocator holds, and what the driver
          reports for this process in addition (the CUDA context; where the driver does not report
          it, the plan's figure). HBM without a GPU: the engine's buffers; what the computation
          allocates is part of `host_memory`.
        - `peak`: the most that was allocated at the same time since the engine was built.

        HBM also has `tensors`, the part of `used` that live tensors occupy.
        """
        usage, plan = self._memory.tiers.usage, self.plan
        usage.ask_driver()
        found = {
            tier.value: {
                "budget": plan.budget.of(tier),
                "planned": plan.peak(tier),
                "used": measured.used,
                "peak": measured.peak,
            }
            for tier, measured in usage.by_tier().items()
        }
        found[Tier.HBM.value]["tensors"] = 0 if self._closed else usage.device_memory().allocated
        return found

    def resident_nbytes(self) -> int:
        """Return how much of DRAM and CXL memory in `tiers` the OS really has in memory.

        It counts page by page, which takes seconds for 100 GiB.
        """
        return self._memory.tiers.usage.resident_nbytes()

    def host_memory(self) -> dict[str, int]:
        """Return the resident host memory of the whole process, in bytes.

        - `planned`: the tiers in host memory, and what the process itself needs
          (`Plan.host_nbytes`).
        - `used`: the resident memory now, including the code of libraries and mapped files.
        - `peak`: its highest value since the process started.
        """
        return {
            "planned": self.plan.host_nbytes,
            "used": resident_nbytes(),
            "peak": peak_resident_nbytes(),
        }

    # Checkpoints.

    def write(
        self,
        folder: str | Path,
        *,
        optimizer: bool = True,
        tokenizer: Any = None,
        progress: WriteProgress | None = None,
    ) -> None:
        """Save the model to a folder, which is created if it does not exist.

        `AutoModelForCausalLM.from_pretrained(folder)` loads it. Of a model with an adapter, only
        the adapter is saved, and `PeftModel.from_pretrained(base, folder)` loads it. An earlier
        model in the folder is not overwritten: CheckpointWriteError.

        All ranks must call this. Each writes some of the files with tensors, and rank 0 all others;
        the files do not depend on the number of ranks. If one rank cannot write, all raise an
        error, and the engine can be used as before.

        Args:
            folder: Where to save.
            optimizer: Whether to save the optimizer states too, which `read` needs to continue.
                They take 10 bytes per parameter with fp32 moments, the weights 2.
            tokenizer: Tokenizer to save. By default, the files of the tokenizer in the directory
                that the model was loaded from.
            progress: Called with bytes written, the total, and the name of the tensor.
        """
        self.finish()
        folder = Path(folder)
        try:
            self._write(folder, optimizer, tokenizer, progress)
        except PartsError as error:
            self.ranks.abort(error.cause)  # the others wait for this one
            raise error.cause from None
        self.files.move_source(folder)

    def _write(
        self, folder: Path, optimizer: bool, tokenizer: Any, progress: WriteProgress | None
    ) -> None:
        nbytes = sum(writer.nbytes for writer in self.files.writers(optimizer=optimizer))
        leads = self.ranks.rank == 0
        with all_or_none(self.ranks), translate_write_errors(folder, nbytes):
            if leads:
                folder.mkdir(parents=True, exist_ok=True)
        shards = self.files.write(folder, self.ranks, optimizer=optimizer, progress=progress)
        with all_or_none(self.ranks), translate_write_errors(folder, nbytes):
            if leads:
                self._write_small_files(folder, shards, optimizer, tokenizer)

    def _write_small_files(
        self, folder: Path, shards: Mapping[str, FileRecord], optimizer: bool, tokenizer: Any
    ) -> None:
        if self.model_files is not None:
            self.model_files.write(folder, tokenizer=tokenizer)
        if optimizer:
            TrainingState(
                engine=self.state_record(),
                software=Software.here(gpu=self.on_gpu),
                numerics=self.result_record(),
            ).save(folder)
        record_model(folder, shards, step=self.steps)

    def take_io_retries(self) -> dict[str, int]:
        """Return how many requests of the NVMe tier were repeated since the last call, by path."""
        store = self._memory.tiers.store
        if store is None:
            return {}
        before, self._io_retries = self._io_retries, store.stats.retries
        where = ", ".join(volume.path for volume in store.volumes)
        return {where: self._io_retries - before} if self._io_retries > before else {}

    def result_record(self) -> dict[str, Any]:
        """Return how the result was computed, as plain JSON for a checkpoint."""
        return result_record(self.workload, on_gpu=self.on_gpu, self_checked=self.self_checked)

    def state_record(self) -> Json:
        """Return what the engine must save in addition to its tensors, as plain JSON."""
        return records.to_json(EngineState.of(self))

    def read(
        self,
        folder: str | Path,
        *,
        on_difference: Callable[[Sequence[str]], None] = warn_of_differences,
    ) -> None:
        """Continue, bit for bit, from a checkpoint of `write` under this or any other plan.

        Budgets and placement do not change a result. `on_difference` is called with everything
        that does and has changed, such as the micro-batch, the clipping norm, a kernel, or the
        version of torch; by default it emits a NotBitIdenticalWarning. Another model, dtype,
        moment format, seed or param group raises EngineStateError.
        """
        check_small_files(folder)
        state = EngineState.load(folder)
        with records.named_by(engine_state_file(folder)):
            state.check(self)
        if found := find_differences(Path(folder), self.workload, on_gpu=self.on_gpu):
            on_difference(found)
        self._pending = None
        self.clear_gradients()
        self._weights_version += 1
        self.self_checked = self.self_checked and was_self_checked(Path(folder))
        self.files.read(Path(folder))
        state.restore(self)
        if not self._computes_loss:
            self.passes.update_held(None, self.batches)

    def restore(self, model: nn.Module) -> None:
        """Give a model the trained weights as they are now, in the types of its parameters.

        Parameters of another type than the engine computes in get the fp32 master weights. The
        model that was passed to `prepare` gets new parameters in host memory, and works as before;
        the engine still trains its own copy. Its frozen parameters do not change. Another
        model must have the same tensors, and is changed in place; its frozen parameters get what
        the engine computes with.

        Raises ModelRestoreError if there is too little host memory.
        """
        self.finish()
        live = self.live_model
        if live is not None and model in (live.owned, live.model):
            restore_live(live, self.state.weight)
        else:
            load_into(model, self.state)

    # Lifetime.

    def close(self, *, spill: str | Path | None = None) -> None:
        """Release everything.

        The model that was passed to `prepare` gets the trained weights, on the devices where it
        was. If they do not fit, a warning says so, and its methods raise an error that says how to
        load them. With `spill`, a directory, weights that do not fit next to the engine are written
        there, and read again when the engine's memory is free. Without such a model, pending sweeps
        are dropped: call `finish` to keep them.
        """
        if self._closed:
            return
        live = self.live_model
        returning: AbstractContextManager[None] = contextlib.nullcontext()
        if live is not None:
            copies = max(1, len(self.plan.seats))  # every rank of this machine has the model
            returning = giving_back(live, self.state, spill, self.ranks, copies)
        with returning:
            self._closed = True
            self._runner.close()
            self.files.close()
            self.split_model.release()
            self._memory.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Helpers.

    def _next_step(self, split: SplitBatch, num_items: int, *, accumulating: bool) -> StepState:
        pending, programs = self._pending, self._programs
        name = "accumulate" if accumulating else "step" if pending else "first"
        return StepState(
            programs[name],
            split.rounds,
            split.sizes,
            pending,
            self.batches,
            num_items,
            self.scale.value,
            fresh=not accumulating,
        )

    def _report(self, step: StepState) -> StepReport:
        """Return the outcome of a step that has run: that of all ranks."""
        return step.report if step.report is not None else own_report(self._memory, step)

    def _run(self, step: StepState) -> None:
        """Run a step, which may sweep the pending update.

        After a failure the update stays pending and records the blocks that are done. The next
        step, or `finish`, completes it.
        """
        try:
            self._runner.run(step)
        finally:
            if self._pending is not None and self._is_swept(self._pending):
                self._pending = None

    def _split(self, batch: Mapping[str, torch.Tensor]) -> SplitBatch:
        rounds, device = self.plan.placement.rounds, self.device.torch_device
        rank = self.ranks.rank
        split = split_batch(batch, self.workload, self.inventory, rounds, device, rank)
        check_documents(split, self.inventory)
        return split

    def _check_finite(self, loss: torch.Tensor) -> None:
        """Raise NonFiniteLossError if the settings say so; `apply` then finds no gradients."""
        assert self._stats is not None
        if bool(torch.isfinite(loss)) and self._stats.finite:
            return
        if not self.scale.fixed and bool(torch.isfinite(loss)):
            return  # fp16: apply() skips the step and halves the loss scale
        if self.settings.nonfinite == "skip":
            return
        bad, self._stats = self._stats.first_bad, None
        problem = f"the loss is {float(loss)}"
        if bool(torch.isfinite(loss)) and bad is not None:
            tensors = [t for t in self.inventory.blocks[bad[0]].tensors if t.trainable]
            problem = f"the gradient of {tensors[bad[1]].name} is not finite"
        raise NonFiniteLossError(problem, step=self.steps + 1)

    def _is_swept(self, pending: PendingUpdate) -> bool:
        wanted = {
            (op.block, op.piece) for op in self._programs["sweep"].operations if op.verb == "sweep"
        }
        return wanted <= pending.done and not pending.late

    def _explaining(self, what: str) -> AbstractContextManager[None]:
        return explain_out_of_memory(self.device, self.plan, what)

    @property
    def _computes_loss(self) -> bool:
        return self.workload.caller_loss is None

    def _check_computes_loss(self, what: str) -> None:
        if not self._computes_loss:
            raise EngineError(
                f"{what} of this engine cannot be used: it belongs to a model of penstock.stream, "
                f"whose loss you compute. Call the model, then loss.backward() and optimizer.step()"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
