"""Where the gradient sums of this rank lie, and where they go when they are complete."""

from __future__ import annotations

import torch

from penstock.engine.allocate import EngineMemory
from penstock.engine.spans import role_dtype
from penstock.engine.step_state import StepState
from penstock.plan.lifetimes import BufferKey, BufferKind, SumPart
from penstock.roles import Role


class GradientBuffers:
    """The gradient buffers of a step on the device.

    The thread that adds gradients uses `sum` and `end_sum`: the computing thread or, with several
    ranks, the lane that exchanges them.
    """

    def __init__(self, memory: EngineMemory) -> None:
        self._memory, self._tiers = memory, memory.tiers
        self._wide = memory.tiers.formats.wide_gradient
        self._accumulates = memory.tiers.plan.workload.accumulate
        self._type = role_dtype(Role.WEIGHT, memory.tiers.formats)

    def sum(self, step: StepState, part: SumPart) -> torch.Tensor:
        """Return the fp32 sum of what this rank owns of a block's gradient.

        It lies in the pool of gradient buffers, or where the gradient is stored if that is on the
        device and in fp32 as well.
        """
        if part.block in step.program.held:
            return self._memory.held.sum(part.block)
        nbytes = 4 * self._owned(part.block)
        if self._wide and self._tiers.on_device(part.block, Role.GRADIENT):
            data = self._tiers.data(part.block, Role.GRADIENT)[:nbytes]
        else:
            kind = BufferKind.GRADIENT if self._wide else BufferKind.GRADIENT_SUM
            data = self._buffer(step, BufferKey(kind, part.block, part.start), nbytes)
        return data.view(torch.float32)

    def end_sum(self, step: StepState, part: SumPart) -> tuple[torch.Tensor | None, bool]:
        """Return where to round a sum, None to leave it in fp32, and whether it is the last.

        What leaves the device is noted where the lane that offloads gradients finds it.
        """
        if part.block in step.program.held:  # it stays where it is until the update
            return None, False
        block, on_device = part.block, self._tiers.on_device(part.block, Role.GRADIENT)
        last_round = step.program.operations[part.at].round == len(step.rounds) - 1
        last = last_round and not self._accumulates
        if self._wide:
            if not on_device:
                step.outgoing_gradients[block] = self.sum(step, part).view(torch.uint8)
            return None, last
        if on_device:
            return self._tiers.span(block, Role.GRADIENT).all(), last
        nbytes = self._tiers.formats.nbytes(Role.GRADIENT, self._owned(block))
        outgoing = self._buffer(step, BufferKey(BufferKind.GRADIENT, block, part.at), nbytes)
        step.outgoing_gradients[block] = outgoing
        return outgoing.view(self._type), last

    def sent(self, step: StepState, part: SumPart) -> torch.Tensor:
        """Return a block's gradient of one micro-batch, of which every rank owns a shard."""
        return self._exchanged(step, BufferKey(BufferKind.SENT, part.block, part.computed_at), part)

    def received(self, step: StepState, part: SumPart) -> torch.Tensor:
        """Return this rank's shard of a block's gradient, of one micro-batch of each rank."""
        return self._exchanged(step, BufferKey(BufferKind.RECEIVED, part.block, part.at), part)

    def _exchanged(self, step: StepState, key: BufferKey, part: SumPart) -> torch.Tensor:
        dtype = torch.float32 if step.program.is_chunked(part) else self._type
        count = self._tiers.inventory.blocks[part.block].flat_elements(True)
        return self._buffer(step, key, count * dtype.itemsize).view(dtype)

    def _buffer(self, step: StepState, key: BufferKey, nbytes: int) -> torch.Tensor:
        offset = step.program.gradients.offset(key)
        return self._memory.gradient_pool[offset : offset + nbytes]

    def _owned(self, block: int) -> int:
        return self._tiers.inventory.blocks[block].shard_elements(True)
