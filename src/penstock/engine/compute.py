"""Forward, loss and backward of one block at a time, one micro-batch after another.

This code runs in the thread that called the engine. It launches kernels and must not wait for the
device: other lanes' work is ordered before it on the device (`TicketBoard.order_after`), and only
work of the host, such as a sweep on the CPU, blocks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.engine.allocate import EngineMemory
from penstock.engine.gradient_buffers import GradientBuffers
from penstock.engine.gradients import differentiate
from penstock.engine.hidden_states import EXTRA_SLOTS
from penstock.engine.interrupts import delayed_interrupts
from penstock.engine.loss import ChunkedLoss, GradientSink, TokenValues, count_targets
from penstock.engine.pending_update import make_segments
from penstock.engine.step_state import SavedForward, StepState
from penstock.engine.transfer import Mover
from penstock.model.attention_replay import handle_no_attention
from penstock.model.experts import Routing
from penstock.model.split import MicroBatch, SplitModel
from penstock.model.unneeded_outputs import skip_nothing, skipping_unneeded
from penstock.optim.rules import draw_key
from penstock.plan.lifetimes import BufferKey, BufferKind, SumPart
from penstock.plan.placement_index import PlacementIndex
from penstock.plan.schedule import Operation, Verb
from penstock.roles import Role

_BY_MICRO_BATCH = ((Role.ACTIVATION,), (Role.ATTENTION,))
"""Roles of fetches that post a ticket for each micro-batch."""

_SEED_MASK = (1 << 63) - 1

_NOISE = 1 << 31
"""Stands for the number of a block in the seed of the noise on embeddings. No block has it."""


class Computer:
    """Carries out the operations of the compute lane, in order."""

    def __init__(
        self,
        memory: EngineMemory,
        split_model: SplitModel,
        loss: ChunkedLoss,
        mover: Mover,
        placement: PlacementIndex,
        buffers: GradientBuffers,
    ) -> None:
        self._memory, self._tiers, self._device = memory, memory.tiers, memory.device
        self._model, self._loss, self._mover, self._placement = split_model, loss, mover, placement
        self._buffers = buffers
        self._weight_offsets: dict[int, int] = {}  # block -> offset of its weights in the pool
        self._head = placement.count - 1
        workload = memory.tiers.plan.workload
        self._has_head_sum = workload.has_head_sum
        self._differentiable = workload.numerics.forward == "training"
        self.seed = 0
        """Seed of dropout and of the noise on embeddings."""

    def start(self, step: StepState) -> None:
        """Forget the previous step."""
        self.leave_modes()
        self._weight_offsets.clear()
        self._memory.weights.dequantized.forget()
        self._memory.gradients.start_step(step.weight)

    @staticmethod
    def leave_modes() -> None:
        """Let this thread compute as usual, also if Ctrl-C has ended a step between two calls."""
        skip_nothing()
        handle_no_attention()

    def note(self, step: StepState, at: int, op: Operation) -> None:
        """Note where another lane puts a block's weights.

        The computing thread passes over all operations in the order of the schedule, so the notes
        are right for the computations that follow, however far the other lane has come.
        """
        fetches = op.verb is Verb.FETCH and op.roles == (Role.WEIGHT,)
        if fetches and op.block not in step.program.held:
            key = BufferKey(BufferKind.WEIGHT, op.block, step.program.buffer_start[at])
            self._weight_offsets[op.block] = step.program.weights.offset(key)

    def compute(self, step: StepState, at: int, op: Operation) -> None:
        """Issue one computation after everything it needs, and post its ticket."""
        for need in step.program.needs[at]:
            other = step.program.operations[need]
            # Activations arrive one micro-batch after another; backward waits for each separately.
            if not (other.verb is Verb.FETCH and other.roles in _BY_MICRO_BATCH):
                step.tickets.order_after(need, self._device)
        step.started[at] = self._device.record()
        work: Callable[[StepState, int, Operation], None] = {
            Verb.SWEEP: self._sweep,
            Verb.FORWARD: self._forward,
            Verb.LOSS: self._head_loss,
            Verb.BACKWARD: self._backward,
        }[op.verb]
        work(step, at, op)
        step.tickets.post(at, self._device.record())

    # The optimizer sweep of states that live on the device.

    def _sweep(self, step: StepState, at: int, op: Operation) -> None:
        pending = step.pending
        assert pending is not None
        if (op.block, op.piece) in pending.done:
            del step.started[at]  # an earlier step swept it and failed later
            return
        prepared = self._memory.device_sweeps.get((op.block, op.piece))
        if prepared is None:
            roles, start, stop = self._mover.spans_to_sweep(step, at, op)
            segments = make_segments(self._tiers.inventory, op.block, pending, roles, start, stop)
            pool = self._memory.sweep_pool
            prepared = self._device.prepare_sweep(pending.rule, segments, pool)
            self._memory.device_sweeps[op.block, op.piece] = prepared
        constants = pending.constants(prepared.segments)
        # Otherwise Ctrl-C could end this after some kernels were launched and before the block
        # counts as swept, and the next step would update it again.
        with delayed_interrupts():
            step.device_sweeps.append(prepared.start(constants))
            pending.done.add((op.block, op.piece))

    # Forward.

    def _forward(self, step: StepState, at: int, op: Operation) -> None:
        hidden = self._memory.hidden
        if op.block == 0:
            hidden.start_round(keeps=step.keeps_activations)
            # The plan has memory for the arguments of layers, rotary tables for example, of one
            # round.
            for done in step.rounds[: op.round]:
                for micro in done:
                    micro.calls = None
        self._bind_weights(op.block)
        for index, micro in enumerate(step.rounds[op.round]):
            out = self._output(step, at, op, index, micro)
            slot, previous = hidden.next_slot(op.block + 1, index)
            if slot is None:
                into = hidden.home(op.block + 1, step.first_home + index, *micro.shape)
            else:
                step.hidden_slots[op.round, op.block + 1, index] = slot
                if previous is not None:
                    self._wait_until_offloaded(step, op.round, previous)
                into = hidden.slot(slot, *micro.shape)
            into.copy_(out)
            del out  # before the next micro-batch allocates its own
            # The offload lane reads `hidden_slots` after it has seen this ticket.
            step.tickets.post((at, index), self._device.record())
        if op.block == self._head - 1:
            hidden.start_backward(len(step.rounds[op.round]))
            step.activation_slots[op.round] = [
                hidden.activation_slot(i) for i in range(EXTRA_SLOTS)
            ]

    def _output(
        self, step: StepState, at: int, op: Operation, index: int, micro: MicroBatch
    ) -> torch.Tensor:
        self._seed_dropout(step, op.block, micro)
        if op.block == 0:
            # Kept until the micro-batch's backward, which recomputes the embedding.
            micro.noise_key = self._key(step, _NOISE, micro)
            # The arguments of all layers, rotary embeddings for example, come with the embedding.
            with torch.no_grad():
                hidden, micro.calls = self._model.embed(micro)
            self._model.start_router_sums(micro)
            return hidden
        slot = self._memory.hidden.slot_of(op.block, index)
        source = self._block_input(op.block, step.first_home + index, micro, slot)
        if not (self._differentiable and step.keeps_activations):
            with torch.no_grad():
                out, routing = self._layer(op.block, source, micro)
            self._note_routing(step, op.block, micro, routing)
            return out
        # Always the computation that backward differentiates, whether it is kept or repeated.
        # Without gradients, a compiler would make other kernels, which may round differently.
        with self._memory.attention.recording(step, at, index, micro):
            out, source, routing = self._differentiable_layer(op.block, source, micro)
        self._note_routing(step, op.block, micro, routing)
        if out.requires_grad and index < self._placement.placement.blocks[op.block].kept:
            saved = SavedForward(
                get_gradient_edge(out), source, self._parameters(op.block), routing.logits
            )
            step.saved[op.round, op.block, index] = saved
        return out.detach()

    def _layer(
        self, block: int, source: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, Routing]:
        assert micro.calls is not None
        return self._model.routed_layer(block - 1, source, micro.calls)

    def _differentiable_layer(
        self, block: int, source: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        """Return the layer's output, its input, to which the gradient leads, and its routing."""
        with torch.enable_grad():
            source = source.detach().requires_grad_()
            out, routing = self._layer(block, source, micro)
            return out, source, routing

    def _note_routing(
        self, step: StepState, block: int, micro: MicroBatch, routing: Routing
    ) -> None:
        """Add what a layer's forward pass says about its experts to the sums of the step."""
        if micro.router_sums is not None:
            micro.router_sums.add_all(routing.logits)
        step.count_rows(block, routing.offsets)

    def _wait_until_offloaded(self, step: StepState, round: int, previous: tuple[int, int]) -> None:
        """Order the next write to a slot after the copy that takes its old content away."""
        block, micro = previous
        offload = step.program.at.get((Verb.OFFLOAD, block, round, Role.ACTIVATION))
        if offload is not None:
            step.tickets.order_after((offload, micro), self._device)

    # The head: forward and backward together, since the logits exist only chunk by chunk.

    def _head_loss(self, step: StepState, at: int, op: Operation) -> None:
        hidden, micros = self._memory.hidden, step.rounds[op.round]
        owners = self._placement.owners(self._head)
        parameters = {k: v for owner in owners for k, v in self._parameters(owner).items()}
        self._model.bind_head(parameters)
        with_backward = op.phase == "backward"
        self._open_sums(step, at)
        for index, micro in enumerate(micros):
            states = hidden.slot(hidden.gradient_slot(index), *micro.shape)
            flat, targets = states.view(-1, states.shape[-1]), micro.targets.view(-1)
            values = self._token_values(step, micro)
            if with_backward:
                sums = self._memory.gradients
                self._open_sent(step, at, index)
                # A micro-batch that begins its sums needs no others.
                if self._has_head_sum and not (self._begins_sums(step, at) and index == 0):
                    sums.start_micro_batch()
                sink = GradientSink(parameters, sums.add)
                total = self._loss.backward(
                    flat, targets, sink, step.num_items, step.loss_scale, values
                )
                sums.end_micro_batch()
                self._close_sent(step, at)
            elif step.logits is not None:
                step.logits[micro.number] = self._loss.logits(flat).view(*micro.shape, -1)
                continue
            else:
                total = self._loss.forward(flat, targets, values)
            if micro.router_sums is not None:
                # So that the step's loss is the mean of the losses that transformers computes for
                # its micro-batches, weighted by their tokens with a target.
                total = total + micro.router_sums.loss() * count_targets(targets)
            step.losses.append((micro.number, total))
            if at in step.program.exchange_of:
                step.tickets.post((at, index), self._device.record())
        self._close_sums(step, at)

    def _token_values(self, step: StepState, micro: MicroBatch) -> TokenValues | None:
        """Allocate what the loss turn says about each token of a micro-batch, if it is asked."""
        if step.token_values is None:
            return None
        tokens = micro.targets.numel()
        values = step.token_values[micro.number] = TokenValues.empty(tokens, micro.targets.device)
        return values

    # Backward.

    def _backward(self, step: StepState, at: int, op: Operation) -> None:
        hidden, sums = self._memory.hidden, self._memory.gradients
        self._open_sums(step, at)
        if self._placement.owned_in_backward[op.block]:
            parameters = self._parameters(op.block)
        else:  # a linear embedding: its gradients do not depend on its weights
            parameters = self._memory.weights.stand_ins(op.block)
        self._model.bind(parameters)
        fetch = step.program.at.get((Verb.FETCH, op.block, op.round, Role.ACTIVATION))
        for index, micro in enumerate(step.rounds[op.round]):
            slot = None
            if fetch is not None:
                step.tickets.order_after((fetch, index), self._device)
                slot = step.use_activation_slot(op.round)
                if index == 0:  # the operation begins when its first activation has arrived
                    step.started[at] = self._device.record()
            out, source, logits = self._saved_or_recomputed(step, at, index, micro, slot)
            others = self._router_gradients(step, micro, logits)
            self._open_sent(step, at, index)
            gradient = hidden.slot(hidden.gradient_slot(index), *micro.shape)
            # The gradient of the block's output makes room for that of its input, in the same slot.
            differentiate(out, gradient, source, parameters, sums.add, into=gradient, others=others)
            del out, source, logits, others  # before the next micro-batch allocates its own
            self._close_sent(step, at)
            step.tickets.post((at, index), self._device.record())
        self._close_sums(step, at)

    def _saved_or_recomputed(
        self, step: StepState, at: int, index: int, micro: MicroBatch, slot: int | None
    ) -> tuple[torch.Tensor | GradientEdge, torch.Tensor | None, Sequence[torch.Tensor]]:
        """Return the block's output, its input, and the logits of its routers.

        The embedding has no input to differentiate.
        """
        op = step.program.operations[at]
        saved = step.saved.pop((op.round, op.block, index), None)
        if saved is not None:
            # Autograd would not notice weights that have moved, and return no gradients for them.
            assert saved.parameters is self._parameters(op.block), f"block {op.block} has moved"
            return saved.out, saved.source, saved.logits
        self._seed_dropout(step, op.block, micro)
        if op.block == 0:
            with torch.enable_grad():
                return self._model.embed(micro)[0], None, ()
        source = self._block_input(op.block, step.first_home + index, micro, slot)
        # What this returns is differentiated, and its values are never read.
        with self._memory.attention.replaying(step, at, index, micro), skipping_unneeded():
            out, source, routing = self._differentiable_layer(op.block, source, micro)
        return out, source, routing.logits

    def _router_gradients(
        self, step: StepState, micro: MicroBatch, logits: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the logits of routers, each with the gradient of the auxiliary loss."""
        sums = micro.router_sums
        if sums is None:
            return []
        factor = count_targets(micro.targets) * (step.loss_scale / step.num_items)
        return sums.logit_gradients(logits, factor)

    # Gradient sums.

    def _open_sums(self, step: StepState, at: int) -> None:
        """Begin or continue the sums to which a computation adds; with several ranks, none."""
        for part in step.program.sums.get(at, ()):
            if not self._memory.gradients.is_open(part.block):  # as a tied embedding's may be
                flat = self._buffers.sum(step, part)
                held = self._memory.held.untouched.get(part.block)
                fresh = held is None and self._begins_sums(step, at)
                self._memory.gradients.open(part.block, flat, fresh=fresh, untouched=held)

    def _close_sums(self, step: StepState, at: int) -> None:
        """End the sums that are complete, and leave them where the next lane finds them."""
        for part in step.program.sums.get(at, ()):
            if part.completes:
                into, last = self._buffers.end_sum(step, part)
                self._memory.gradients.close(part.block, into, last=last)

    def _begins_sums(self, step: StepState, at: int) -> bool:
        """Return whether what a computation adds to is empty before its first micro-batch."""
        sends = at in step.program.exchange_of
        return sends or (step.fresh and step.program.operations[at].round == 0)

    # With several ranks, the gradients of each micro-batch are sent to them.

    def _open_sent(self, step: StepState, at: int, index: int) -> None:
        """Let the gradients of a micro-batch go where they are sent from."""
        for part in self._sent(step, at):
            # The last micro-batch's gradient must have left the buffer, but not before this one's
            # has been computed.
            key = (part.at, index - 1)
            wait = partial(step.tickets.order_after, key, self._device) if index else None
            flat = self._buffers.sent(step, part)
            self._memory.gradients.open(part.block, flat, fresh=True, wait=wait)

    def _close_sent(self, step: StepState, at: int) -> None:
        """Complete the gradients of a micro-batch; they are sent after its ticket is posted."""
        for part in self._sent(step, at):
            unused = self._memory.gradients.close_micro_batch(part.block)
            step.note_unused(part.block, unused)

    def _sent(self, step: StepState, at: int) -> tuple[SumPart, ...]:
        exchange = step.program.exchange_of.get(at)
        return () if exchange is None else step.program.sums[exchange]

    # Weights and block inputs.

    def _bind_weights(self, block: int) -> None:
        for owner in self._placement.owners(block):
            self._model.bind(self._parameters(owner))

    def _parameters(self, owner: int) -> dict[str, torch.nn.Parameter]:
        slots, split = self._memory.weights, self._tiers.is_split(owner)
        trained = self._tiers.span(owner, Role.WEIGHT) if split else None
        if owner in self._memory.held.blocks:
            return slots.parameters(owner, self._memory.held.span(owner), trained)
        if self._tiers.on_device(owner, Role.WEIGHT) and not split:
            return slots.parameters(owner, self._tiers.span(owner, Role.WEIGHT))
        return slots.parameters(owner, slots.span(owner, self._weight_offsets[owner]), trained)

    def _block_input(
        self, block: int, index: int, micro: MicroBatch, slot: int | None
    ) -> torch.Tensor:
        if slot is None:
            return self._memory.hidden.home(block, index, *micro.shape)
        return self._memory.hidden.slot(slot, *micro.shape)

    def _seed_dropout(self, step: StepState, block: int, micro: MicroBatch) -> None:
        """Seed dropout by block and micro-batch, so that the recomputation drops the same elements.

        The generator's state cannot be kept: other blocks draw from it in between, in an order
        that depends on the plan.
        """
        if not self._model.drops_out:
            return
        self._device.seed(self._key(step, block, micro))

    def _key(self, step: StepState, block: int, micro: MicroBatch) -> int:
        """Return the seed of what a block draws for a micro-batch, under any plan."""
        return draw_key(self.seed, step.batch_number, (block << 32) + micro.number) & _SEED_MASK
