"""What ranks do together in a step: gather weights, exchange gradients, and meet.

All of it runs in the thread of the lane `ranks`, in the order of the schedule, which is the same on
every rank.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from penstock.engine.allocate import EngineMemory
from penstock.engine.gradient_buffers import GradientBuffers
from penstock.engine.gradients import add_in_order
from penstock.engine.report import StepReport, share
from penstock.engine.spans import Span
from penstock.engine.step_state import StepState
from penstock.plan.buffers import micro_batches_by_round
from penstock.plan.lifetimes import BufferKey, BufferKind, SumPart
from penstock.plan.schedule import Operation, Verb
from penstock.roles import Role


class RankExchange:
    """Carries out the operations of the lane `ranks`."""

    def __init__(self, memory: EngineMemory, buffers: GradientBuffers) -> None:
        self._memory, self._tiers, self._buffers = memory, memory.tiers, buffers
        self._device, self._ranks = memory.device, memory.ranks
        plan = memory.tiers.plan
        self._most_losses = sum(micro_batches_by_round(plan.workload, plan.placement.rounds))

    def run(self, step: StepState, at: int, op: Operation) -> None:
        """Carry out one operation together with the other ranks."""
        match op.verb:
            case Verb.GATHER:
                self._gather(step, at, op)
            case Verb.EXCHANGE:
                self._exchange(step, at, op)
            case _:
                self._meet(step, at)

    # Weights.

    def _gather(self, step: StepState, at: int, op: Operation) -> None:
        """Complete a block's weights, in its slot or where they are resident."""
        for need in step.program.needs[at]:
            step.tickets.order_after(need, self._device)
        step.started[at] = self._device.record()
        stored = self._tiers.peer_weights(op.block)
        if stored is None:
            for shards in self._shared_weights(step, at, op.block):
                self._ranks.gather(shards)
        else:
            self._read_peer_weights(self._slot(step, at, op.block), stored)
        step.tickets.post(at, self._device.record())

    def _read_peer_weights(self, slot: Span, stored: tuple[Span, ...]) -> None:
        """Copy the shards of all other ranks from where they are stored, in shared host memory.

        This rank has fetched its own shard, so its sweep of the block has ended. Once all ranks
        have come here, all shards are up to date. They stay so until all ranks have met at the end
        of the program: a block is swept once, before it is gathered for the first time.
        """
        assert self._ranks.memory is not None
        self._ranks.memory.arrive()
        for span in stored:
            self._device.copy(slot.values(span.first, span.first + span.count), span.all())

    def _slot(self, step: StepState, at: int, block: int) -> Span:
        key = BufferKey(BufferKind.WEIGHT, block, step.program.buffer_start[at])
        return self._memory.weights.span(block, step.program.weights.offset(key))

    def _shared_weights(self, step: StepState, at: int, block: int) -> list[torch.Tensor]:
        """Return the flat buffers of which this rank has only its own shard."""
        spec = self._tiers.inventory.blocks[block]
        trained = spec.flat_elements(True)
        if self._tiers.on_device(block, Role.WEIGHT):  # frozen weights are whole, and stay so
            return [self._tiers.span(block, Role.WEIGHT).values(0, trained)]
        slot = self._slot(step, at, block)
        ends = (0, trained, trained + spec.flat_elements(False))
        return [slot.values(low, high) for low, high in pairwise(ends) if low < high]

    # Gradients.

    def _exchange(self, step: StepState, at: int, op: Operation) -> None:
        """Add up the gradients of a computation, micro-batch by micro-batch while it runs.

        In each wave, every rank sends the gradient of one micro-batch. Ranks have their
        micro-batches in turn, so the waves are in the order of the batch, and so are the ranks in a
        wave. The last wave may have fewer micro-batches than there are ranks.
        """
        parts = step.program.sums[at]
        computed_at = parts[0].computed_at
        for need in step.program.needs[at]:
            if need != computed_at:  # which posts a ticket for each micro-batch
                step.tickets.order_after(need, self._device)
        count, world = step.round_sizes[op.round], self._ranks.world
        for wave, first in enumerate(range(0, count, world)):
            senders = min(world, count - first)
            if self._ranks.rank < senders:
                step.tickets.order_after((computed_at, wave), self._device)
            if wave == 0:
                step.started[at] = self._device.record()
            self._exchange_wave(step, parts, wave, senders)
        for part in parts:
            if part.completes:
                self._end_sum(step, part)
        step.tickets.post(at, self._device.record())

    def _exchange_wave(
        self, step: StepState, parts: tuple[SumPart, ...], wave: int, senders: int
    ) -> None:
        for part in parts:
            sent, received = self._buffers.sent(step, part), self._buffers.received(step, part)
            self._ranks.exchange(sent, received, senders)
        # The next micro-batch may overwrite what was sent.
        step.tickets.post((parts[0].at, wave), self._device.record())
        for part in parts:
            arrived = self._buffers.received(step, part).view(self._ranks.world, -1)
            begins = step.fresh and part.start == part.at and self._round(step, part) == 0
            total = self._buffers.sum(step, part)
            add_in_order(total, list(arrived[:senders]), fresh=begins and wave == 0)

    def _end_sum(self, step: StepState, part: SumPart) -> None:
        block, total = part.block, self._buffers.sum(step, part)
        first = self._tiers.first_element(block, True)
        gradients = self._memory.gradients
        gradients.set_unused_to_zero(block, total, first, step.unused.get(block, set()))
        into, last = self._buffers.end_sum(step, part)
        gradients.round_sum(block, total, into, last=last, first=first)

    def _round(self, step: StepState, part: SumPart) -> int:
        return step.program.operations[part.at].round

    # The end of a step.

    def _meet(self, step: StepState, at: int) -> None:
        for need in step.program.needs[at]:
            step.tickets.order_after(need, self._device)
        step.started[at] = self._device.record()
        if self._ranks.memory is not None:
            # After the meeting, other ranks may update the weights that this one has read.
            self._device.record().wait()
        report = own_report(self._memory, step)
        step.report = share(report, self._ranks, self._most_losses)
        step.tickets.post(at, self._device.record())


def own_report(memory: EngineMemory, step: StepState) -> StepReport:
    """Return this rank's report of a step whose computations have been issued; wait for them."""
    numbers, losses = [number for number, _ in step.losses], [loss for _, loss in step.losses]
    values = torch.stack(losses).tolist() if losses else []
    stats = memory.gradients.gather_stats()
    return StepReport(stats, tuple(zip(numbers, values, strict=True)))
