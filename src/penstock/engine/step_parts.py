"""The parts of a step, one micro-batch each, run by the engine's own code.

A step repeats a few parts: the embedding, each kind of layer, and the head with the loss, forward
and backward. Running each of them once shows how much working memory a step needs: with fake
tensors, which have shapes and no data, before there is a GPU (`penstock.engine.trace_memory`), or
on the GPU itself, at the real size.

What the plan allocates elsewhere is made by `prepare`: weights, hidden states, gradient sums, the
batch and the arguments of layers. What `run` allocates in addition is working memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from penstock.engine.batches import split_batch
from penstock.engine.determinism import deterministic_kernels
from penstock.engine.device import Device
from penstock.engine.gradients import GradientSums, differentiate
from penstock.engine.loss import ChunkedLoss, GradientSink, LossFunction, count_targets
from penstock.engine.step_state import SavedForward
from penstock.model.experts import Routing
from penstock.model.inventory import Inventory
from penstock.model.split import MicroBatch, SplitModel
from penstock.model.varlen_attention import DocumentSpans
from penstock.plan.cuda_allocator import ROUNDING
from penstock.plan.workload import Workload
from penstock.units import round_up

Phase = Literal["forward", "backward"]

SHORT_DOCUMENT = 2
"""Number of tokens of the first of the two documents in each row of a packed example. The other is
as long as it can be: where scores of attention are materialized, they take memory by the square of
a document's length."""


class StepPart(ABC):
    """One pass of one block over one micro-batch.

    Call `prepare`, then `run` as often as you like, then `release`. Every run allocates the same
    memory, except that the first run of a compiled layer compiles it.
    """

    phase: Phase

    def __init__(self, step: _Step, block: int, micro: MicroBatch) -> None:
        self._step, self.block, self.micro = step, block, micro
        self._model, self._inventory = step.split_model, step.inventory
        self._parameters: dict[str, nn.Parameter] = {}
        self._sums = GradientSums(step.inventory, step.workload.formats(), step.device)

    @property
    def name(self) -> str:
        """Name of the block; for a kind of layer, that of the first layer of the kind."""
        return self._inventory.blocks[self.block].name

    @property
    def packed(self) -> bool:
        """Whether documents are passed to attention, as they are for packed rows."""
        return self.micro.bounds is not None

    @abstractmethod
    def prepare(self) -> None:
        """Allocate what the plan allocates elsewhere."""

    def run(self) -> None:
        """Compute the part once, with the kernels that a step uses."""
        with deterministic_kernels(self._step.workload.numerics.deterministic):
            self._compute()

    @abstractmethod
    def _compute(self) -> None: ...

    def forget(self) -> None:
        """Drop what the last run has left for later parts of a step."""
        return

    def release(self) -> None:
        """Drop everything that `prepare` made."""
        self._model.release()
        self._parameters = {}
        self._sums.start_step()
        self.micro.calls = self.micro.router_sums = None

    def _make_weights(self, *blocks: int) -> dict[str, nn.Parameter]:
        return {
            t.name: nn.Parameter(self._zeros(*t.shape), requires_grad=t.trainable)
            for block in blocks
            for t in self._inventory.blocks[block].tensors
        }

    def _make_stand_ins(self) -> dict[str, nn.Parameter]:
        """Return the embedding's parameters as zeros that take no memory."""
        return {
            t.name: nn.Parameter(self._zeros().expand(t.shape).data, requires_grad=t.trainable)
            for t in self._inventory.blocks[0].tensors
        }

    def _open_sums(self, *blocks: int) -> None:
        for block in blocks:
            count = self._inventory.blocks[block].flat_elements(True)
            flat = torch.zeros(count, dtype=torch.float32, device=self._step.device.torch_device)
            self._sums.open(block, flat, fresh=False)

    def _make_hidden(self) -> torch.Tensor:
        rows, length = self.micro.shape
        return self._zeros(rows, length, self._inventory.hidden)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._model.dtype, device=self._step.device.torch_device)

    def _find_calls(self) -> None:
        """Find out how the model calls its layers."""
        self._model.bind(self._make_stand_ins())
        with torch.no_grad():
            self.micro.calls = self._model.embed(self.micro)[1]


class EmbeddingForward(StepPart):
    """Computes the input of the first layer, and the arguments of all layers."""

    phase: Phase = "forward"

    def prepare(self) -> None:
        self._parameters = self._make_weights(0)
        self._into = self._make_hidden()

    def _compute(self) -> None:
        self._model.bind(self._parameters)
        with torch.no_grad():
            hidden, self.micro.calls = self._model.embed(self.micro)
        self._into.copy_(hidden)

    def forget(self) -> None:
        self.micro.calls = None

    def release(self) -> None:
        super().release()
        del self._into


class EmbeddingBackward(StepPart):
    """Computes the gradients of the embedding's tables."""

    phase: Phase = "backward"

    def prepare(self) -> None:
        needs_weights = bool(self._inventory.backward_owners[0])
        self._parameters = self._make_weights(0) if needs_weights else self._make_stand_ins()
        self._open_sums(0)
        self._gradient = self._make_hidden()

    def _compute(self) -> None:
        self._model.bind(self._parameters)
        with torch.enable_grad():
            out = self._model.embed(self.micro)[0]
        differentiate(out, self._gradient, None, self._parameters, self._sums.add)

    def release(self) -> None:
        super().release()
        del self._gradient


class LayerForward(StepPart):
    """Computes a layer's output, and leaves what is saved for its backward pass."""

    phase: Phase = "forward"

    @property
    def index(self) -> int:
        """Number of the layer, counted from 0."""
        return self.block - 1

    @property
    def saves(self) -> bool:
        """Whether it computes what backward differentiates."""
        return self._step.workload.numerics.forward == "training"

    def prepare(self) -> None:
        self._find_calls()
        self._parameters = self._make_weights(self.block)
        self._model.bind(self._parameters)
        self.source, self._into = self._make_hidden(), self._make_hidden()
        self._saved: SavedForward | None = None
        self._model.start_router_sums(self.micro)

    def _compute(self) -> None:
        if self.saves:
            out, source, routing = self._differentiable()
            edge = get_gradient_edge(out)
            self._saved = SavedForward(edge, source, self._parameters, routing.logits)
        else:
            assert self.micro.calls is not None
            with torch.no_grad():
                out, routing = self._model.routed_layer(self.index, self.source, self.micro.calls)
        self._add_routing(routing)
        self._into.copy_(out.detach())

    def _differentiable(self) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        assert self.micro.calls is not None
        with torch.enable_grad():
            source = self.source.detach().requires_grad_()
            out, routing = self._model.routed_layer(self.index, source, self.micro.calls)
            return out, source, routing

    def forget(self) -> None:
        self._saved = None

    def _add_routing(self, routing: Routing) -> None:
        if self.micro.router_sums is not None:
            self.micro.router_sums.add_all(routing.logits)

    def release(self) -> None:
        super().release()
        del self.source, self._into, self._saved


class LayerBackward(LayerForward):
    """Recomputes a layer from its input, and differentiates it."""

    phase: Phase = "backward"

    def prepare(self) -> None:
        super().prepare()
        self._open_sums(self.block)

    def _compute(self) -> None:
        out, source, routing = self._differentiable()
        others: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self.micro.router_sums is not None:
            self._add_routing(routing)  # a step has done so in forward
            factor = count_targets(self.micro.targets)
            others = self.micro.router_sums.logit_gradients(routing.logits, factor)
        differentiate(
            out, self._into, source, self._parameters, self._sums.add, into=self._into,
            others=others,
        )  # fmt: skip


class HeadForward(StepPart):
    """Computes the loss of a micro-batch, for an evaluation."""

    phase: Phase = "forward"

    def prepare(self) -> None:
        blocks = self._owners()
        self._parameters = self._make_weights(*blocks)
        self._open_sums(*blocks)
        self._hidden = self._make_hidden()

    def _compute(self) -> None:
        self._model.bind_head(self._parameters)
        self._step.loss.forward(*self._flat())

    def release(self) -> None:
        super().release()
        del self._hidden

    def _flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._hidden.view(-1, self._inventory.hidden), self.micro.targets.view(-1)

    def _owners(self) -> list[int]:
        """Return the blocks that own the head's tensors: itself, and the embedding if tied."""
        borrowed = set(self._inventory.blocks[self.block].borrows)
        blocks = self._inventory.blocks[: self.block]
        lenders = [i for i, b in enumerate(blocks) if borrowed & {t.name for t in b.tensors}]
        return [*lenders, self.block]


class HeadBackward(HeadForward):
    """Computes the loss of a micro-batch and its gradient."""

    phase: Phase = "backward"

    def _compute(self) -> None:
        self._model.bind_head(self._parameters)
        sink = GradientSink(self._parameters, self._sums.add)
        hidden, targets = self._flat()
        if self._step.workload.has_head_sum:
            self._sums.start_micro_batch()
        self._step.loss.backward(hidden, targets, sink, targets.numel(), 1.0)
        self._sums.end_micro_batch()


class _Step:
    """What all parts of a step share."""

    def __init__(
        self,
        split_model: SplitModel,
        inventory: Inventory,
        workload: Workload,
        device: Device,
        function: LossFunction | None,
    ) -> None:
        self.split_model, self.inventory = split_model, inventory
        self.workload, self.device = workload, device
        numerics = workload.numerics
        self.loss = ChunkedLoss(
            split_model.logits,
            numerics.loss_chunk,
            function,
            fused=numerics.loss_kernel == "fused",
            label_smoothing=numerics.label_smoothing,
        )


def example_micro_batches(
    inventory: Inventory, workload: Workload, device: torch.device
) -> list[MicroBatch]:
    """Return full micro-batches of one document per row, and of packed rows.

    Penstock's own attention takes both in the same way: there is one example.
    """
    shape = (workload.numerics.micro_batch, workload.context)
    one = replace(workload, batch=workload.numerics.micro_batch, world=1)
    # Different tokens: the gradient of the embedding needs memory for each that occurs.
    ids = (torch.arange(shape[0] * shape[1]) % inventory.vocabulary).view(shape)
    plain = torch.arange(workload.context)
    packed = torch.cat([plain[:SHORT_DOCUMENT], plain[:-SHORT_DOCUMENT]])
    rows = (packed,) if workload.numerics.attention == "varlen" else (plain, packed)
    batches = [{"input_ids": ids, "position_ids": row.expand(shape)} for row in rows]
    return [split_batch(batch, one, inventory, 1, device).rounds[0][0] for batch in batches]


def input_nbytes(micro: MicroBatch) -> int:
    """Return the bytes of a micro-batch on the device, in what the allocator rounds sizes up to."""
    tensors = [micro.input_ids, micro.position_ids, micro.targets]
    if micro.noise_scales is not None:
        tensors.append(micro.noise_scales)
    if isinstance(micro.bounds, DocumentSpans):
        tensors.append(micro.bounds.spans)
    return sum(round_up(t.numel() * t.element_size(), ROUNDING) for t in tensors)


def step_parts(
    split_model: SplitModel,
    inventory: Inventory,
    workload: Workload,
    device: Device,
    *,
    loss: LossFunction | None = None,
    micros: Sequence[MicroBatch] | None = None,
) -> list[StepPart]:
    """Return the parts of a step, each kind of layer once for each way to fill a micro-batch.

    Args:
        split_model: The model. Parts bind weights of their own to it.
        inventory: The model's inventory.
        workload: What to train.
        device: The device that computes.
        loss: Loss function of the user, if any.
        micros: Micro-batches to compute; by default, `example_micro_batches`. The embedding and the
            head use the first one.
    """
    split_model.train(True)
    if micros is None:
        micros = example_micro_batches(inventory, workload, device.torch_device)
    step = _Step(split_model, inventory, workload, device, loss)
    head = len(inventory.blocks) - 1
    parts: list[StepPart] = [
        EmbeddingForward(step, 0, micros[0]),
        EmbeddingBackward(step, 0, micros[0]),
    ]
    for block in first_blocks(split_model):
        for micro in micros:
            parts += [LayerForward(step, block, micro), LayerBackward(step, block, micro)]
    if workload.caller_loss is None:  # otherwise the caller computes the head
        parts += [HeadForward(step, head, micros[0]), HeadBackward(step, head, micros[0])]
    return parts


def first_blocks(split_model: SplitModel) -> list[int]:
    """Return the block number of the first layer of each kind.

    Layers are of one kind if they run the same code and train the same tensors.
    """
    firsts: dict[object, int] = {}
    blocks = split_model.inventory.layers
    for index, kind in enumerate(split_model.layer_kinds):
        trained = tuple(tensor.trainable for tensor in blocks[index].tensors)
        firsts.setdefault((kind, trained), index + 1)
    return list(firsts.values())
