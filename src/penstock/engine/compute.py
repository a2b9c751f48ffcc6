"""Forward, loss and backward of one block, micro-batch by micro-batch. Room: move.

Runs in the thread that called the engine. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.engine.allocate import EngineMemory, StepState
from penstock.engine.gradients import differentiate
from penstock.engine.hidden_states import EXTRA
from penstock.engine.loss import ChunkedLoss, Into
from penstock.engine.pending_update import segments
from penstock.engine.transfer import Mover
from penstock.model.split import MicroBatch, SplitModel
from penstock.optim.rules import draw_key
from penstock.plan.lifetimes import BufferKey, BufferKind
from penstock.plan.schedule import Operation, Verb
from penstock.plan.weight_window import PlacementIndex
from penstock.roles import Role


class Computer:
    """Carries out the operations of the compute lane, in order."""

    def __init__(
        self,
        taken: EngineMemory,
        body: SplitModel,
        loss: ChunkedLoss,
        mover: Mover,
        facts: PlacementIndex,
    ) -> None:
        self._taken, self._homes, self._device = taken, taken.homes, taken.device
        self._body, self._loss, self._mover, self._facts = body, loss, mover, facts
        self._fetched: dict[int, int] = {}  # block -> offset of its weights in the pool
        self._sums: dict[int, int] = {}  # block -> operation that began its sum
        self._last = facts.count - 1
        self._wide = taken.homes.formats.wide_gradient
        self._accumulates = taken.homes.plan.workload.accumulate
        self.seed = 0

    def start(self) -> None:
        self._fetched.clear()
        self._sums.clear()
        self._taken.gradients.start_step()

    def note(self, run: StepState, at: int, op: Operation) -> None:
        """Keep track of what other lanes bring and drop, in the order of the schedule."""
        if op.verb is Verb.FETCH and op.roles == (Role.WEIGHT,):
            start = run.program.buffer_start[at]
            key = BufferKey(BufferKind.WEIGHT, op.block, start)
            offset = run.program.weights.offset(key)
            self._fetched[op.block] = offset
        elif op.verb is Verb.FETCH and op.roles == (Role.GRADIENT,):
            self._sums[op.block] = at

    def compute(self, run: StepState, at: int, op: Operation) -> None:
        for need in run.program.needs[at]:
            other = run.program.operations[need]
            # Inputs come back micro-batch by micro-batch: each is waited for on its own.
            if not (other.verb is Verb.FETCH and other.roles == (Role.INPUT,)):
                run.marks.come_after(need, self._device)
        run.began[at] = self._device.mark()
        work: Callable[[StepState, int, Operation], None] = {
            Verb.SWEEP: self._sweep,
            Verb.FORWARD: self._forward,
            Verb.LOSS: self._turn,
            Verb.BACKWARD: self._backward,
        }[op.verb]
        work(run, at, op)
        run.marks.put(at, self._device.mark())

    # The sweep of what rests on the device.

    def _sweep(self, run: StepState, at: int, op: Operation) -> None:
        pending = run.pending
        assert pending is not None
        if (op.block, op.piece) in pending.done:
            del run.began[at]  # a run that failed has done it
            return
        roles, start, stop = self._mover.swept_roles(run, at, op)
        parts = segments(self._homes.inventory, op.block, pending, roles, start, stop)
        run.swept.append(self._device.sweep(pending.rule, parts, self._taken.pool))
        pending.done.add((op.block, op.piece))

    # Forward.

    def _forward(self, run: StepState, at: int, op: Operation) -> None:
        if op.block == 0:
            self._taken.hidden.start_round()
        self._bind(op.block)
        for index, micro in enumerate(run.rounds[op.round]):
            with torch.no_grad():
                out = self._output(run, op.block, index, micro)
            slot, before = self._taken.hidden.next_slot(op.block + 1, index)
            if slot is None:
                into = self._taken.hidden.home(op.block + 1, index, *micro.shape)
            else:
                run.slots[op.round, op.block + 1, index] = slot
                if before is not None:
                    self._wait_until_drained(run, op.round, before)
                into = self._taken.hidden.slot(slot, *micro.shape)
            into.copy_(out)
            run.marks.put((at, index), self._device.mark())
        if op.block == self._last - 1:
            self._taken.hidden.turn(len(run.rounds[op.round]))
            run.turned[op.round] = [self._taken.hidden.input_slot(i) for i in range(EXTRA)]

    def _output(self, run: StepState, block: int, index: int, micro: MicroBatch) -> torch.Tensor:
        self._reseed(run, block, micro)
        if block == 0:
            hidden, micro.calls = self._body.embed(micro)
            return hidden
        slot = self._taken.hidden.slot_of(block, index)
        source = self._input(block, index, micro, slot)
        assert micro.calls is not None
        return self._body.layer(block - 1, source, micro.calls)

    def _wait_until_drained(self, run: StepState, round: int, before: tuple[int, int]) -> None:
        block, micro = before
        drain = run.program.at.get((Verb.DRAIN, block, round, Role.INPUT))
        if drain is not None:
            run.marks.come_after((drain, micro), self._device)

    # The turn.

    def _turn(self, run: StepState, at: int, op: Operation) -> None:
        hidden, micros = self._taken.hidden, run.rounds[op.round]
        owners = self._facts.owners(self._last)
        parameters = {k: v for o in owners for k, v in self._parameters(o).items()}
        self._body.bind_head(parameters)
        differentiate = op.phase == "backward"
        if differentiate:
            for block in self._facts.adds_to(self._last):
                self._open(run, at, op, block)
        for index, micro in enumerate(micros):
            states = hidden.slot(hidden.gradient_slot(index), *micro.shape)
            flat, targets = states.view(-1, states.shape[-1]), micro.targets.view(-1)
            if differentiate:
                into = Into(parameters, self._taken.gradients.add)
                total = self._loss.backward(flat, targets, into, run.items, run.scale)
            else:
                total = self._loss.forward(flat, targets)
            run.loss = total if run.loss is None else run.loss + total
        if differentiate and self._homes.has(self._last, Role.GRADIENT):
            self._close(run, at, op, self._last)

    # Backward.

    def _backward(self, run: StepState, at: int, op: Operation) -> None:
        trained = self._homes.has(op.block, Role.GRADIENT)
        if trained and not self._taken.gradients.is_open(op.block):
            self._open(run, at, op, op.block)
        if op.block == 0:  # tables are linear: their gradient does not depend on them
            parameters = self._taken.weights.stand_ins(0)
        else:
            parameters = self._parameters(op.block)
        self._body.bind(parameters)
        fetch = run.program.at.get((Verb.FETCH, op.block, op.round, Role.INPUT))
        for index, micro in enumerate(run.rounds[op.round]):
            slot = None
            if fetch is not None:
                run.marks.come_after((fetch, index), self._device)
                slot = run.input_slot(op.round)
                if index == 0:
                    run.began[at] = self._device.mark()
            out, source = self._recompute(run, op.block, index, micro, slot)
            into = self._taken.hidden.gradient_slot(index)
            gradient = self._taken.hidden.slot(into, *micro.shape)
            add = self._taken.gradients.add
            back = differentiate(out, gradient, source, parameters, add)
            if back is not None:
                gradient.copy_(back)
            del out, source, back
            run.marks.put((at, index), self._device.mark())
        if trained:
            self._close(run, at, op, op.block)

    def _recompute(
        self, run: StepState, block: int, index: int, micro: MicroBatch, slot: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What leaves the block, from what enters it; the embedding has no such input."""
        self._reseed(run, block, micro)
        with torch.enable_grad():
            if block == 0:
                return self._body.embed(micro)[0], None
            source = self._input(block, index, micro, slot).detach().requires_grad_()
            assert micro.calls is not None
            return self._body.layer(block - 1, source, micro.calls), source

    # Gradients.

    def _open(self, run: StepState, at: int, op: Operation, block: int) -> None:
        """A place for the block's sum: in the pool, or where it rests if that is in fp32 too."""
        began = self._sums.setdefault(block, at)
        count = self._homes.inventory.blocks[block].flat_elements(True)
        if self._wide and self._homes.on_device(block, Role.GRADIENT):
            data = self._homes.data(block, Role.GRADIENT)
        else:
            kind = BufferKind.GRADIENT if self._wide else BufferKind.GRADIENT_SUM
            offset = run.program.gradients.offset(BufferKey(kind, block, began))
            data = self._taken.gradient_pool[offset : offset + 4 * count]
        flat = data[: 4 * count].view(torch.float32)
        self._taken.gradients.open(block, flat, fresh=run.fresh and op.round == 0)

    def _close(self, run: StepState, at: int, op: Operation, block: int) -> None:
        began = self._sums.pop(block)
        count = self._homes.inventory.blocks[block].flat_elements(True)
        last = op.round == len(run.rounds) - 1 and not self._accumulates
        if self._wide:
            self._taken.gradients.close(block, None, last=last)
            if not self._homes.on_device(block, Role.GRADIENT):
                key = BufferKey(BufferKind.GRADIENT, block, began)
                offset = run.program.gradients.offset(key)
                run.leaving[block] = self._taken.gradient_pool[offset : offset + 4 * count]
            return
        if self._homes.on_device(block, Role.GRADIENT):
            into = self._homes.span(block, Role.GRADIENT).values(0, count)
        else:
            key = BufferKey(BufferKind.GRADIENT, block, at)
            offset = run.program.gradients.offset(key)
            run.leaving[block] = self._taken.gradient_pool[offset : offset + 2 * count]
            into = run.leaving[block].view(self._body.dtype)
        self._taken.gradients.close(block, into, last=last)

    # Weights and inputs.

    def _bind(self, block: int) -> None:
        for owner in self._facts.owners(block):
            self._body.bind(self._parameters(owner))

    def _parameters(self, owner: int) -> dict[str, torch.nn.Parameter]:
        if self._homes.on_device(owner, Role.WEIGHT):
            span = self._homes.span(owner, Role.WEIGHT)
        else:
            span = self._taken.weights.span(owner, self._fetched[owner])
        return self._taken.weights.parameters(owner, span)

    def _input(self, block: int, index: int, micro: MicroBatch, slot: int | None) -> torch.Tensor:
        if slot is None:
            return self._taken.hidden.home(block, index, *micro.shape)
        return self._taken.hidden.slot(slot, *micro.shape)

    def _reseed(self, run: StepState, block: int, micro: MicroBatch) -> None:
        """Dropout is the same when backward recomputes, whatever was drawn between."""
        if not self._body.drops_out:
            return
        self._device.seed(draw_key(self.seed, run.step, (block << 32) + micro.number) & _SEED_MASK)


_SEED_MASK = (1 << 63) - 1
