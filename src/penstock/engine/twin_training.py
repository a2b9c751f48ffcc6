"""Train a small model for a few steps with the engine, and plainly, and return all results.

`penstock.engine.self_check` compares them. Plain training is independent of the engine: it uses the
unmodified transformers model, and torch's autograd, AdamW and clipping.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.engine.device import Device
from penstock.engine.engine import Engine, EngineSettings
from penstock.engine.initial_weights import set_weights
from penstock.engine.loss import IGNORE_INDEX
from penstock.engine.optimizer import decay_matrices
from penstock.machine.discovery import discover
from penstock.machine.presets import cpu_machine
from penstock.model.experts import Routing
from penstock.model.inventory import Block, Inventory
from penstock.model.live_model import LiveModel
from penstock.model.meta_model import weight_dtype
from penstock.model.split import Calls, MicroBatch, SplitModel
from penstock.model.twin import VOCABULARY
from penstock.plan.budget import Budget
from penstock.plan.plan import Plan
from penstock.plan.workload import Workload
from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.planner import plan_result
from penstock.units import GiB

LENGTH = 12
"""Number of tokens in a row: more than a twin's sliding window."""

FIRST = 5
"""Number of tokens of the first document of a packed row."""

PACKED = (False, True, False)
"""Whether rows hold several documents, for each step. The last step's forward pass carries out the
update of the second step; the update of the first is carried out by itself."""

OPTIMIZER: Mapping[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 3e-4, "weight_decay": 1.0}
"""AdamW for a twin. With an epsilon about as large as its clipped gradients, an update depends on
the epsilon, and is a smooth function of the gradient: with a tiny one, the sign of a gradient that
is zero but for rounding would decide it."""

UNCLIPPED_EPS = 1e-2
"""The epsilon for a run without clipping, whose twin has gradients about 20 times as large."""

LOSS_SCALE = 1024.0
"""Loss scale of fp16, without overflow in a twin."""


def optimizer_options(workload: Workload) -> Mapping[str, Any]:
    """Return the options of AdamW with which a twin is trained."""
    return OPTIMIZER if workload.clip is not None else {**OPTIMIZER, "eps": UNCLIPPED_EPS}


class Quantity(NamedTuple):
    """What is compared, in the order in which it is computed."""

    kind: str
    name: str
    step: int

    def __str__(self) -> str:
        of = f" of {self.name}" if self.name else ""
        return f"the {self.kind}{of} in step {self.step}"


Results = dict[Quantity, torch.Tensor]


class Batch(NamedTuple):
    """Rows of random tokens, a fifth of whose labels are ignored."""

    ids: torch.Tensor
    labels: torch.Tensor
    bounds: tuple[int, ...]
    """Where the documents of every row begin, followed by the row's length."""

    @property
    def documents(self) -> list[tuple[int, slice]]:
        """The row and the tokens of each document."""
        spans = [slice(*pair) for pair in itertools.pairwise(self.bounds)]
        return [(row, span) for row in range(self.ids.shape[0]) for span in spans]

    @property
    def items(self) -> int:
        """Number of labels that a token before them in their document predicts."""
        predicted = (self.labels[row, span][1:] for row, span in self.documents)
        return sum(int((labels != IGNORE_INDEX).sum()) for labels in predicted)

    def for_engine(self) -> dict[str, torch.Tensor]:
        """Return the rows with positions that start at 0 for each document."""
        lengths = [stop - start for start, stop in itertools.pairwise(self.bounds)]
        positions = torch.cat([torch.arange(length) for length in lengths])
        return {
            "input_ids": self.ids,
            "labels": self.labels,
            "position_ids": positions.expand_as(self.ids).clone(),
        }


def draw_batches(rows: int, packs: bool, seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for packed in PACKED:
        ids = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)
        ignored = torch.rand(ids.shape, generator=generator) < 0.2
        bounds = (0, FIRST, LENGTH) if packed and packs else (0, LENGTH)
        batches.append(Batch(ids, ids.masked_fill(ignored, IGNORE_INDEX), bounds))
    return batches


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> float:
    """Clip gradients as torch's `clip_grad_norm_` does, and return their norm.

    The norm is computed in fp64: on a CPU, torch's sum of a million squares in fp32 is wrong by
    some 1e-5, which is as much as the engine may differ by.
    """
    gradients = [p.grad.double() for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)


class PlainTraining:
    """Train the unmodified model, one document after another, with torch's AdamW and clipping.

    AdamW updates fp32 master weights. Gradients are summed in fp32, and rounded to the type of the
    weights, in which the engine keeps them.
    """

    def __init__(
        self, model: nn.Module, inventory: Inventory, workload: Workload, scale: float
    ) -> None:
        self._model, self._inventory, self._scale = model, inventory, scale
        self._clip, self._smoothing = workload.clip, workload.numerics.label_smoothing
        trained = {t.name for b in inventory.blocks for t in b.tensors if t.trainable}
        self._weights = dict(model.named_parameters())
        self._masters = {
            name: nn.Parameter(weight.detach().float().clone(), requires_grad=name in trained)
            for name, weight in self._weights.items()
        }
        self._trained = {name: self._masters[name] for name in self._masters if name in trained}
        self._initial = {name: master.detach().clone() for name, master in self._masters.items()}
        groups = decay_matrices(self._trained.items())
        self._norm = 0.0  # of the last gradient, before it was clipped
        groups = [group for group in groups if group["params"]]
        self._adamw = torch.optim.AdamW(groups, **optimizer_options(workload))

    def train(self, batches: Sequence[Batch]) -> Results:
        results: Results = {}
        for step, batch in enumerate(batches, 1):
            self._step(batch, step, results)
            if step in (1, len(batches)):
                moments = {
                    name: self._adamw.state[master] for name, master in self._trained.items()
                }
                masters = {name: master.detach() for name, master in self._masters.items()}
                results |= _gradients(self._inventory, step, moments, self._norm, self._clip)
                results |= _updates(self._inventory, step, masters, moments, self._initial)
        return results

    def _step(self, batch: Batch, step: int, results: Results) -> None:
        items = batch.items
        with _layer_outputs(self._model, self._inventory) as outputs:
            sums = [self._add_gradients(batch, row, span, items) for row, span in batch.documents]
        for name, output in outputs.items():
            results[Quantity("output", name, step)] = output
        results[Quantity("loss", "", step)] = torch.stack(sums).sum()
        for name, master in self._trained.items():
            assert master.grad is not None
            master.grad = master.grad.to(self._weights[name].dtype).float() / self._scale
        limit = math.inf if self._clip is None else self._clip
        self._norm = clip_gradients(list(self._trained.values()), limit)
        self._adamw.step()
        self._adamw.zero_grad()
        with torch.no_grad():
            for name, master in self._trained.items():
                self._weights[name].copy_(master)

    def _add_gradients(self, batch: Batch, row: int, span: slice, items: int) -> torch.Tensor:
        """Add one document's gradients to those of the masters; return its part of the loss."""
        ids, labels = batch.ids[row : row + 1, span], batch.labels[row, span]
        output: Any = self._model(input_ids=ids, use_cache=False)
        logits = output.logits[0, :-1].float()
        losses = nn.functional.cross_entropy(
            logits, labels[1:], reduction="sum", label_smoothing=self._smoothing
        )
        loss = losses / items
        weights = [self._weights[name] for name in self._trained]
        found = torch.autograd.grad(loss * self._scale, weights, allow_unused=True)
        for master, gradient in zip(self._trained.values(), found, strict=True):
            part = torch.zeros_like(master) if gradient is None else gradient.float()
            master.grad = part if master.grad is None else master.grad + part
        return loss.detach()


@contextlib.contextmanager
def _layer_outputs(model: nn.Module, inventory: Inventory) -> Iterator[dict[str, torch.Tensor]]:
    """Record the outputs of the embedding and of the layers, `[tokens, hidden]`."""
    blocks = inventory.blocks[:-1]
    parts: dict[str, list[torch.Tensor]] = {block.name: [] for block in blocks}
    outputs: dict[str, torch.Tensor] = {}

    def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        parts[blocks[0].name].append(hidden.detach().float())

    def after(name: str) -> Callable[..., None]:
        def record(_module: nn.Module, _args: Any, out: Any) -> None:
            parts[name].append((out[0] if isinstance(out, tuple | list) else out).detach().float())

        return record

    layers = [(block.name, model.get_submodule(block.name)) for block in blocks[1:]]
    hooks = [layers[0][1].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [layer.register_forward_hook(after(name)) for name, layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
    for name, found in parts.items():
        outputs[name] = torch.cat([each.flatten(0, -2) for each in found])


def _gradients(
    inventory: Inventory,
    step: int,
    moments: Mapping[str, Mapping[str, torch.Tensor]],
    norm: float,
    clip: float | None,
) -> Results:
    """Return the gradients of a step from first moments, before they were clipped.

    With clipping, one wrong gradient changes all others. After the first step, first moments are
    the clipped gradients times a constant; later ones are compared as they are.
    """
    kind = "gradient" if step == 1 else "first moment"
    factor = 1.0 if clip is None or step > 1 else max(norm / clip, 1.0)
    return {
        Quantity(kind, name, step): factor * moments[name]["exp_avg"]
        for name in _backward_order(inventory)
        if name in moments
    }


def _updates(
    inventory: Inventory,
    step: int,
    masters: Mapping[str, torch.Tensor],
    moments: Mapping[str, Mapping[str, torch.Tensor]],
    initial: Mapping[str, torch.Tensor],
) -> Results:
    """Return copies of second moments, and how far weights are from their initial values."""
    names = _backward_order(inventory)
    second = {
        Quantity("second moment", name, step): moments[name]["exp_avg_sq"].clone()
        for name in names
        if name in moments
    }
    return second | {Quantity("update", n, step): masters[n] - initial[n] for n in names}


def _backward_order(inventory: Inventory) -> list[str]:
    return [t.name for block in reversed(inventory.blocks) for t in block.tensors]


# The engine.


class _RecordingModel(SplitModel):
    """A model that keeps the outputs of the embedding and of the layers in forward passes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.outputs: dict[int, list[torch.Tensor]] = {}
        self._recorded: dict[int, list[Calls]] = {}  # by block, the micro-batches so far

    def start_step(self) -> None:
        """Forget the outputs of the step before."""
        self.outputs.clear()
        self._recorded.clear()

    def embed(self, micro: MicroBatch) -> tuple[torch.Tensor, Calls]:
        hidden, calls = super().embed(micro)
        if not torch.is_grad_enabled():  # backward passes compute the same again
            self._record(0, hidden)
        return hidden, calls

    def routed_layer(
        self, index: int, hidden: torch.Tensor, calls: Calls
    ) -> tuple[torch.Tensor, Routing]:
        out, routing = super().routed_layer(index, hidden, calls)
        recorded = self._recorded.setdefault(1 + index, [])
        # Forward and backward have gradients, so only the first time tells them apart.
        if not any(calls is each for each in recorded):
            recorded.append(calls)
            self._record(1 + index, out)
        return out, routing

    def _record(self, block: int, out: torch.Tensor) -> None:
        self.outputs.setdefault(block, []).append(out.detach().float().flatten(0, -2))


def train_with_engine(
    live: nn.Module, inventory: Inventory, plan: Plan, device: Device, batches: Sequence[Batch]
) -> Results:
    """Train a model with an engine, which takes its weights; nothing is left on the device."""
    workload = plan.workload
    dtype = weight_dtype(workload.dtype)
    weights = {name: value.clone() for name, value in live.state_dict().items()}
    numerics = workload.numerics
    bare = LiveModel(live).copy_without_weights(
        device.torch_device, dtype, own_attention=inventory.own_attention
    )
    split_model = _RecordingModel(
        bare, inventory, mlp_tile=numerics.mlp_tile, compiled=numerics.compiled,
        deterministic=numerics.deterministic, recomputes=True,
    )  # fmt: skip
    settings = EngineSettings(
        optimizer=optimizer_options(workload), grouping=decay_matrices, sweep_threads=1
    )
    try:
        with Engine(plan, inventory, split_model, device, settings) as engine:
            set_weights(engine.access, inventory, weights)
            return _train(engine, split_model, batches)
    finally:
        split_model.start_step()
        del live, bare, split_model
        gc.collect()  # the compiler leaves cycles that hold tensors
        device.release(0)
        device.reset_peak()


def _train(engine: Engine, model: _RecordingModel, batches: Sequence[Batch]) -> Results:
    if not engine.scale.fixed:
        engine.scale.value = LOSS_SCALE
    inventory, results = engine.inventory, Results()
    initial = {name: _master(state) for name, state in engine.state.items()}
    for step, batch in enumerate(batches, 1):
        model.start_step()
        loss = engine.step(batch.for_engine())
        for block, parts in sorted(model.outputs.items()):
            name = inventory.blocks[block].name
            results[Quantity("output", name, step)] = torch.cat(parts).cpu()
        results[Quantity("loss", "", step)] = loss
        if step in (1, len(batches)):
            states = dict(engine.state.items())  # carries out the update first
            moments = {name: state for name, state in states.items() if "exp_avg" in state}
            masters = {name: _master(state) for name, state in states.items()}
            results |= _gradients(inventory, step, moments, engine.grad_norm, engine.workload.clip)
            results |= _updates(inventory, step, masters, moments, initial)
    return results


def _master(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return state.get("master", state["weight"]).float()


def streaming_plan(inventory: Inventory, workload: Workload, rounds: int) -> Plan:
    """Return a plan that streams every other layer, and keeps the rest on the device.

    Of the rest, the first micro-batch of a round is not recomputed. Results of attention are saved
    where they can be: in DRAM for layers that are streamed, and on the device for the rest.
    """
    machine = cpu_machine(discover())
    budget = Budget(hbm=2 * GiB, dram=2 * GiB, cxl=0, nvme=())
    evaluator = PlanEvaluator(inventory, workload, machine, budget, unbounded=True)
    homes = [
        _locations(block, Location.HBM if number and number % 2 == 0 else Location.DRAM)
        for number, block in enumerate(inventory.blocks)
    ]
    rounds = rounds if inventory.may_have_rounds else 1
    kept = [int(at.activation is Location.HBM and workload.may_keep) for at in homes]
    saved = tuple(at.activation for at in homes) if workload.may_save_attention else ()
    candidate = Candidate(tuple(homes), rounds, kept=tuple(kept), attention=saved)
    return plan_result(evaluator, candidate).plan


def _locations(block: Block, home: Location) -> BlockLocations:
    trained = bool(block.parameters(True))
    return BlockLocations(
        weight=home if block.tensors else None,
        state=home if trained else None,
        gradient=home if trained else None,
        activation=home if block.kind == "layer" else None,
    )
