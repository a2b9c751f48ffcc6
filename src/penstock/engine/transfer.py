"""A sweep on the CPU that was started and not waited for. Room: move."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from penstock.engine.allocate import EngineMemory, StepState
from penstock.engine.device import Moment
from penstock.engine.disk_pipe import DiskPipe, Tickets
from penstock.engine.marks import StoppedError
from penstock.engine.pending_update import segments
from penstock.engine.program import Program
from penstock.engine.spans import Span
from penstock.errors import NonFiniteMasterError
from penstock.optim import sweep
from penstock.optim.sweep import SweepTicket
from penstock.plan.lifetimes import BufferKey, BufferKind
from penstock.plan.schedule import Operation, Verb
from penstock.roles import STATE, Role
from penstock.storage.layout import Extent


class HostSweep:
    """As a mark. It may still wait for its turn: those before it begin first. Once it has ended it
    keeps none of its tensors: marks live as long as a traceback."""

    def __init__(self, ticket: SweepTicket) -> None:
        self._ticket: SweepTicket | None = ticket
        self._span = (0.0, 0.0)
        self._refused: tuple[str, int] | None = None

    def settle(self) -> None:
        self.end()
        if self._refused is not None:
            raise NonFiniteMasterError(*self._refused)

    def end(self) -> None:
        """As `settle`, whatever came of it. Several threads may."""
        ticket = self._ticket
        if ticket is None:
            return
        try:
            ticket.wait()
        except NonFiniteMasterError as problem:
            self._refused = problem.name, problem.index
        self._span = ticket.began, ticket.ended
        self._ticket = None

    def span(self) -> tuple[Moment, Moment]:
        """When it began and ended. Only once it is settled."""
        began, ended = self._span
        return Moment(began), Moment(ended)


# --------
# Jobs of the lanes that move bytes: reads, writes, sweeps, copies in and out. Room: move.

Move = Callable[[Extent, torch.Tensor], None]

SWEPT = (Role.WEIGHT, *STATE, Role.GRADIENT)


class Mover:
    """Carries out operations that do not compute. Each method runs in its lane's thread."""

    def __init__(self, taken: EngineMemory) -> None:
        self._taken, self._homes, self._device = taken, taken.homes, taken.device
        self._pipes: dict[str, DiskPipe] = taken.pipes
        self._starting = threading.Lock()  # guards the next
        self._sweeps: deque[HostSweep] = deque()

    # Host staging and disks.

    def read(self, run: StepState, at: int, op: Operation) -> None:
        self._settle(run, at)
        store, piece = self._taken.store, op.piece
        assert piece is not None
        tickets = [
            store.start_read(self._homes.extent(op.block, role, piece), span.data.numpy())
            for role, span in self._staged(run.program, at, op).items()
        ]
        run.marks.put(at, Tickets(tickets))

    def write(self, run: StepState, at: int, op: Operation) -> None:
        self._settle(run, at)
        self._start_write(run, at, op)

    def write_now(self, run: StepState, at: int, op: Operation) -> None:
        """After a failure, what `write` would have done."""
        self._start_write(run, at, op).settle()

    def _start_write(self, run: StepState, at: int, op: Operation) -> Tickets:
        store, piece = self._taken.store, op.piece
        assert piece is not None
        read = run.program.read_of[at]
        spans = self._staged(run.program, read, run.program.operations[read])
        tickets = [
            store.start_write(self._homes.extent(op.block, role, piece), spans[role].data.numpy())
            for role in op.roles
        ]
        under_way = Tickets(tickets)
        run.marks.put(at, under_way)
        return under_way

    def sweep(self, run: StepState, at: int, op: Operation) -> None:
        """On the CPU. What is in staging was read by the operation before.

        Nobody waits for it here: the next one is made ready meanwhile, and the threads that sweep
        go from one to the other. What was started is done when the run has ended, whatever ends it;
        an element that was refused does not undo the others.
        """
        self._settle(run, at)
        pending = run.pending
        assert pending is not None
        if (op.block, op.piece) in pending.done:
            del run.began[at]  # a run that failed has done it: nothing is moved now
            run.marks.put(at, Moment())
            return
        roles, start, stop = self.swept_roles(run, at, op)
        parts = segments(self._homes.inventory, op.block, pending, roles, start, stop)
        with self._starting:
            if run.marks.failed is not None:  # nobody may wait for it any more
                raise StoppedError
            ticket = sweep.start(pending.rule, parts, pool=self._taken.pool, independent=True)
            under_way = HostSweep(ticket)
            self._sweeps.append(under_way)
            pending.done.add((op.block, op.piece))
            run.swept_now.add((op.block, op.piece))
        run.marks.put(at, under_way)

    def end_sweeps(self) -> None:
        """No sweep runs when this returns, and none of a failed run is started later: what counts
        as done is done, and memory may go."""
        with self._starting:
            while self._sweeps:
                self._sweeps[0].end()
                self._sweeps.popleft()

    def swept_roles(
        self, run: StepState, at: int, op: Operation
    ) -> tuple[dict[Role, Span], int, int]:
        """Where each role is for a sweep of the block or of a piece of it."""
        stop = self._homes.inventory.blocks[op.block].flat_elements(True)
        start, roles = 0, {}
        if op.piece is not None:
            start, stop, _ = self._homes.piece_span(op.block, op.piece)
            read = run.program.read_of[at]
            roles = self._staged(run.program, read, run.program.operations[read])
        for role in SWEPT:
            if role not in roles and self._homes.has(op.block, role):
                roles[role] = self._homes.span(op.block, role)
        return roles, start, stop

    def _staged(self, program: Program, read: int, op: Operation) -> dict[Role, Span]:
        """The roles of a piece, one after the other in its part of the staging pool."""
        assert op.piece is not None
        start, stop, trained = self._homes.piece_span(op.block, op.piece)
        first = start if trained else start + self._trained(op.block)
        offset = program.staging.offset(BufferKey(BufferKind.STAGING, op.block, read))
        found = {}
        for role in op.roles:
            nbytes = self._homes.formats.at_rest(role, stop - start)
            data = self._taken.staging[offset : offset + nbytes]
            found[role] = Span(role, data, first, stop - start, self._homes.formats)
            offset += nbytes
        return found

    # Into the device.

    def fetch(self, run: StepState, at: int, op: Operation) -> None:
        if op.roles == (Role.GRADIENT,):
            self._fetch_gradient(run, at, op)
            return
        self._wait(run, at)
        key = BufferKey(BufferKind.WEIGHT, op.block, run.program.buffer_start[at])
        offset = run.program.weights.offset(key)
        into = self._taken.weights.span(op.block, offset)
        if op.piece is None:
            self._device.copy(
                into.data, self._homes.span(op.block, Role.WEIGHT).data[: into.nbytes]
            )
        else:
            read = run.program.read_of[at]
            source = self._staged(run.program, read, run.program.operations[read])[Role.WEIGHT]
            low, high = source.first, source.first + source.count
            self._device.copy(into.values(low, high), source.values(low, high))
        run.marks.put(at, self._device.mark())

    def _fetch_gradient(self, run: StepState, at: int, op: Operation) -> None:
        """The sum so far, for the next round to add to."""
        self._wait(run, at)
        count = 4 * self._trained(op.block)
        key = BufferKey(BufferKind.GRADIENT, op.block, at)
        offset = run.program.gradients.offset(key)
        into = self._taken.gradient_pool[offset : offset + count]
        if self._homes.on_disk(op.block, Role.GRADIENT):
            self._each_piece(op.block, into, self._pipes["fetch"].read)
        else:
            self._device.copy(into, self._homes.data(op.block, Role.GRADIENT)[:count])
        run.marks.put(at, self._device.mark())

    def fetch_inputs(self, run: StepState, at: int, op: Operation) -> None:
        """Micro-batch by micro-batch, through two slots."""
        self._come_after(run, at)
        computed = run.program.at[Verb.BACKWARD, op.block, op.round, None]
        last = len(self._homes.inventory.blocks) - 2
        run.marks.come_after(run.program.at[Verb.FORWARD, last, op.round, None], self._device)
        for micro, (rows, length) in enumerate(run.shapes(op.round)):
            slot, freed = run.next_input(op.round, (computed, micro))
            if freed is not None:
                run.marks.come_after(freed, self._device)
            run.began[at, micro] = self._device.mark()
            into = self._taken.hidden.slot(slot, rows, length)
            if self._homes.on_disk(op.block, Role.INPUT):
                extent = self._homes.extent(op.block, Role.INPUT, micro)
                self._pipes["fetch inputs"].read(extent, _bytes(into))
            else:
                source = self._taken.hidden.home(op.block, micro, rows, length)
                self._device.copy(into, source)
            run.marks.put((at, micro), self._device.mark())
        run.marks.put(at, self._device.mark())

    # Out of it.

    def drain(self, run: StepState, at: int, op: Operation) -> None:
        """A block's gradient, to where it waits for the sweep."""
        self._wait(run, at)
        source = run.leaving[op.block]
        if self._homes.on_disk(op.block, Role.GRADIENT):
            self._each_piece(op.block, source, self._pipes["drain"].write)
            self._pipes["drain"].finish()
        else:
            into = self._homes.data(op.block, Role.GRADIENT)[: source.numel()]
            self._device.copy(into, source)
        run.marks.put(at, self._device.mark())

    def drain_inputs(self, run: StepState, at: int, op: Operation) -> None:
        """Micro-batch by micro-batch, as soon as the block before has made it."""
        computed = run.program.at[Verb.FORWARD, op.block - 1, op.round, None]
        on_disk = self._homes.on_disk(op.block, Role.INPUT)
        for micro, (rows, length) in enumerate(run.shapes(op.round)):
            run.marks.come_after((computed, micro), self._device)
            run.began[at, micro] = self._device.mark()
            source = self._taken.hidden.slot(run.slots[op.round, op.block, micro], rows, length)
            if on_disk:
                extent = self._homes.extent(op.block, Role.INPUT, micro)
                self._pipes["drain inputs"].write(extent, _bytes(source))
            else:
                into = self._taken.hidden.home(op.block, micro, rows, length)
                self._device.copy(into, source)
            run.marks.put((at, micro), self._device.mark())
        if on_disk:
            self._pipes["drain inputs"].finish()
        run.marks.put(at, self._device.mark())

    # Waiting.

    def _each_piece(self, block: int, data: torch.Tensor, move: Move) -> None:
        """A gradient on disk is cut as its sweep is."""
        width = 4 if self._homes.formats.wide_gradient else 2
        for piece in self._homes.pieces(block, Role.GRADIENT):
            start, stop, _ = self._homes.piece_span(block, piece)
            extent = self._homes.extent(block, Role.GRADIENT, piece)
            move(extent, data[width * start : width * stop])

    def _come_after(self, run: StepState, at: int) -> None:
        """What is issued next on this lane comes after all that the operation needs."""
        for need in run.program.needs[at]:
            run.marks.come_after(need, self._device)

    def _wait(self, run: StepState, at: int) -> None:
        """The same, and the operation begins then."""
        self._come_after(run, at)
        run.began[at] = self._device.mark()

    def _settle(self, run: StepState, at: int) -> None:
        """As `_wait`, for work of the host's own."""
        for need in run.program.needs[at]:
            run.marks.settle(need)
        run.began[at] = Moment()

    def _trained(self, block: int) -> int:
        return self._homes.inventory.blocks[block].flat_elements(True)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
