"""What the lanes do: read and write NVMe, sweep on the CPU, copy to and from the device.

Every operation that moves data or sweeps on the CPU ends up in one method of `Mover`:

| lane           | method                | moves                                             |
|----------------|-----------------------|---------------------------------------------------|
| `read`         | `read`                | weights and states from NVMe to host staging      |
| `sweep`        | `sweep`               | nothing: it runs the optimizer sweep on the CPU   |
| `write`        | `write`               | swept weights and states from staging to NVMe     |
| `fetch`        | `fetch`               | weights, or earlier gradient sums, to the device  |
| `fetch inputs` | `fetch_activations`   | activations from host memory or NVMe to the device|
| `drain`        | `offload_gradient`    | gradients from the device to host memory or NVMe  |
| `drain inputs` | `offload_activations` | activations from the device to host memory or NVMe|
| `fetch attention` | `fetch_attention`  | results of attention from host memory to the device|
| `drain attention` | `offload_attention`| results of attention from the device to host memory|
| `fetch states` | `fetch_states`        | weights, states, gradients to be swept on the device|
| `gpu sweep`    | `sweep_states`        | nothing: it sweeps what was fetched, on the device|
| `drain states` | `offload_states`      | swept weights and states from the device to host memory|
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

from penstock.engine.allocate import EngineMemory
from penstock.engine.device import DeviceSweep
from penstock.engine.disk_pipe import DiskPipe
from penstock.engine.pending_update import PendingUpdate, make_segments
from penstock.engine.program import Program
from penstock.engine.spans import Span
from penstock.engine.step_state import StepState, attention_key
from penstock.engine.tensor_updates import TensorUpdates
from penstock.engine.ticket_board import StoppedError
from penstock.errors import NonFiniteMasterError
from penstock.optim import sweep
from penstock.optim.sweep import PreparedSweep
from penstock.plan.lifetimes import BufferKey, BufferKind, operation_span
from penstock.plan.schedule import Operation, Verb
from penstock.roles import MOMENTS, STATE, WEIGHTS, Role
from penstock.storage.layout import Extent
from penstock.storage.tickets import StoreTicket
from penstock.ticket import Finished, Ticket, TicketGroup

Move = Callable[[Extent, torch.Tensor], None]

SWEPT_ROLES = (Role.WEIGHT, *STATE, Role.GRADIENT)
"""Roles that an optimizer sweep reads or writes."""


class Mover:
    """Carries out the operations of the lanes. Each method runs in its lane's thread."""

    def __init__(self, memory: EngineMemory) -> None:
        self._memory, self._tiers, self._device = memory, memory.tiers, memory.device
        self._pipes: dict[str, DiskPipe] = memory.pipes
        # Guards `_sweeps`, and makes "check that the step has not failed, then start a sweep" one
        # action, so that no sweep starts after `end_sweeps` has returned.
        self._sweep_lock = threading.Lock()
        self._sweeps: deque[Ticket[object]] = deque()

    # NVMe and host staging.

    def read(self, step: StepState, at: int, op: Operation) -> None:
        """Start reading one piece of a block from NVMe into its part of the staging memory."""
        self._wait_on_host(step, at)
        store, piece = self._memory.store, op.piece
        assert piece is not None
        transfers = (
            store.start_read(self._tiers.extent(op.block, role, piece), span.data.numpy())
            for role, span in self._piece_spans(step.program, at, op).items()
        )
        step.tickets.post(at, _start_all(transfers))

    def write(self, step: StepState, at: int, op: Operation) -> None:
        """Start writing one swept piece from the staging memory back to NVMe."""
        self._wait_on_host(step, at)
        self._start_write(step, at, op)

    def write_back(self, step: StepState, at: int, op: Operation) -> None:
        """Do what `write` would have done, after a failure, and wait for the disk."""
        try:
            ticket = self._start_write(step, at, op)
        except BaseException as error:
            self.note_lost(step, at, op, f"{type(error).__name__}: {error}")
            raise
        ticket.wait()

    def note_lost(self, step: StepState, at: int, op: Operation, why: str) -> None:
        """Let nothing continue with the old states of a swept piece that could not be written."""
        assert op.piece is not None
        for role in self._spans_read_for(step.program, at):
            if role in op.roles:
                extent = self._tiers.extent(op.block, role, op.piece)
                self._memory.store.note_lost(extent, why)

    def _start_write(self, step: StepState, at: int, op: Operation) -> TicketGroup:
        store, piece = self._memory.store, op.piece
        assert piece is not None
        spans = self._spans_read_for(step.program, at)
        ticket = _start_all(
            store.start_write(self._tiers.extent(op.block, role, piece), spans[role].data.numpy())
            for role in op.roles
            if role in spans
        )
        step.tickets.post(at, ticket)
        return ticket

    # The optimizer sweep on the CPU.

    def sweep(self, step: StepState, at: int, op: Operation) -> None:
        """Start the optimizer sweep of a block, or of one piece of it, on the CPU.

        The lane does not wait for the sweep: it prepares the next one meanwhile, and the pool's
        threads go from one sweep to the next without a gap. Every sweep that was started has ended
        when the step ends, however it ends (`end_sweeps`). A refused element does not undo the
        update of the others.
        """
        self._wait_on_host(step, at)
        pending = step.pending
        assert pending is not None
        part = pending.part_to_sweep(op)
        if part is None:
            # An earlier step swept this block and failed later: nothing is left to do, and nothing
            # appears in the timeline.
            del step.started[at]
            step.tickets.post(at, Finished(None))
            return
        if self._memory.updates is not None:
            self._update_tensors(step, at, op, self._memory.updates)
            return
        prepared = self._prepare_sweep(step, at, op, pending)
        key = (op.block, op.piece)
        refused = part == "moments" and any(map(_refused_some, pending.late[key]))
        with self._sweep_lock:
            if step.tickets.failed is not None:  # perhaps nobody waits for sweeps any more
                raise StoppedError
            # Each sweep of a step has a block or a piece of its own, so they share no memory. Only
            # the two parts of a divided sweep do, and the second has waited for the first.
            ticket = prepared.start(
                pending.constants(prepared.segments), pool=self._memory.sweep_pool,
                independent=True, part=part, after_refusal=refused,
            )  # fmt: skip
            self._sweeps.append(ticket)
            pending.done.add(key)
            step.swept_in_staging.add(step.program.read_of[at])
            if part == "weights":
                pending.late[key] = [ticket]
            elif part == "moments":
                del pending.late[key]
        step.tickets.post(at, ticket)

    def _prepare_sweep(
        self, step: StepState, at: int, op: Operation, pending: PendingUpdate
    ) -> PreparedSweep:
        """Return the sweep of a block or a piece. Unless it passes through staging, it is kept."""
        key = (op.block, op.piece)
        if (known := self._memory.sweeps.get(key)) is not None:
            return known
        roles, start, stop = self.spans_to_sweep(step, at, op)
        segments = make_segments(self._tiers.inventory, op.block, pending, roles, start, stop)
        prepared = PreparedSweep(pending.rule, segments)
        if step.program.read_of[at] < 0:  # otherwise its tensors are elsewhere in the next step
            self._memory.sweeps[key] = prepared
        return prepared

    def _update_tensors(
        self, step: StepState, at: int, op: Operation, updates: TensorUpdates
    ) -> None:
        """Start the sweep of a block, or a piece of it, whose tensors are updated as a whole.

        The device updates those, and what is updated element by element is swept where it is.
        """
        pending = step.pending
        assert pending is not None
        roles, start, stop = self.spans_to_sweep(step, at, op)
        segments = make_segments(self._tiers.inventory, op.block, pending, roles, start, stop)
        on_device = self._tiers.on_device(op.block, Role.WEIGHT)
        swept: Ticket[object] | None = None
        if segments and on_device:
            prepared = self._device.prepare_sweep(pending.rule, segments, self._memory.sweep_pool)
            swept = prepared.start(pending.constants(segments))
            step.device_sweeps.append(swept)
        with self._sweep_lock:
            if step.tickets.failed is not None:  # perhaps nobody waits for sweeps any more
                raise StoppedError
            if segments and not on_device:
                pool = self._memory.sweep_pool
                swept = sweep.start(pending.rule, segments, pool=pool, independent=True)
                self._sweeps.append(swept)
            refused = updates.issue(op.block, pending, roles, start, stop)
            issued = self._device.record()
            self._sweeps.append(issued)
            pending.done.add((op.block, op.piece))
            step.swept_in_staging.add(step.program.read_of[at])
        step.device_sweeps.append(refused)
        # A lane that needs the weights can wait for a record on the device, and for a sweep on the
        # CPU on the host only.
        on_host = swept is not None and not on_device
        step.tickets.post(at, TicketGroup([swept, issued]) if on_host and swept else issued)

    # The optimizer sweep on the device, over what is stored in host memory.

    def fetch_states(self, step: StepState, at: int, op: Operation) -> None:
        """Copy one piece of a block, everything that its sweep needs, to the device."""
        if self._skip_swept(step, at, op):
            return
        self._order_on_stream(step, at)
        for role, into in self._piece_spans(step.program, at, op).items():
            self._copy_span(into, self._tiers.span(op.block, role), into)
        step.tickets.post(at, self._device.record())

    def sweep_states(self, step: StepState, at: int, op: Operation) -> None:
        """Start the optimizer sweep of one piece on the device.

        If its moments are updated later, the sweep computes them all the same, but they stay here.
        """
        if self._skip_swept(step, at, op):
            return
        self._order_on_stream(step, at)
        pending = step.pending
        assert pending is not None
        prepared = self._prepare_state_sweep(step, at, op, pending)
        swept = prepared.start(pending.constants(prepared.segments))
        step.device_sweeps.append(swept)
        step.state_sweeps[op.block, op.piece] = swept
        step.tickets.post(at, self._device.record())

    def _prepare_state_sweep(
        self, step: StepState, at: int, op: Operation, pending: PendingUpdate
    ) -> DeviceSweep:
        """Return the sweep of one piece in its buffer on the device, which is kept.

        A piece has the same buffer in every step with the same program.
        """
        assert op.piece is not None
        buffer = BufferKey(BufferKind.STATES, op.block, step.program.read_of[at])
        key = (op.block, op.piece, step.program.states.offset(buffer))
        if (known := self._memory.state_sweeps.get(key)) is not None:
            return known
        start, stop, _ = self._span_of(op)
        first = self._tiers.first_element(op.block, True)
        roles = self._spans_read_for(step.program, at)
        args = (self._tiers.inventory, op.block, pending, roles, first + start, first + stop)
        segments = make_segments(*args)
        prepared = self._device.prepare_sweep(pending.rule, segments, self._memory.sweep_pool)
        self._memory.state_sweeps[key] = prepared
        return prepared

    def offload_states(self, step: StepState, at: int, op: Operation) -> None:
        """Copy one swept piece back to where it is stored.

        Only now does the piece count as swept: after a failure before this, host memory still has
        the states of the previous update, and the next step sweeps them again.
        """
        if self._skip_swept(step, at, op):
            return
        self._order_on_stream(step, at)
        pending = step.pending
        assert pending is not None
        spans = self._spans_read_for(step.program, at)
        for role in op.roles:
            if role in spans:
                self._copy_span(self._tiers.span(op.block, role), spans[role], spans[role])
        if op.roles == WEIGHTS:
            # The CPU updates the moments of the block when all of its pieces are offloaded.
            swept = step.state_sweeps[op.block, op.piece]
            pending.late.setdefault((op.block, None), []).append(swept)
        pending.done.add((op.block, op.piece))
        step.tickets.post(at, self._device.record())

    def _skip_swept(self, step: StepState, at: int, op: Operation) -> bool:
        """Return whether an earlier step swept this piece and failed later, and post a ticket."""
        assert step.pending is not None
        if (op.block, op.piece) not in step.pending.done:
            return False
        step.tickets.post(at, Finished(None))
        return True

    def _copy_span(self, into: Span, source: Span, part: Span) -> None:
        """Copy the elements of `part`, and the bases of 8-bit moments, between two spans."""
        elements = (part.first, part.first + part.count)
        self._device.copy(into.values(*elements), source.values(*elements))
        bases, source_bases = into.bases(*elements), source.bases(*elements)
        if bases is not None and source_bases is not None:
            self._device.copy(bases, source_bases)

    def end_sweeps(self) -> None:
        """Block until no sweep runs. A failed step starts no sweep after this returns.

        Everything marked as done in the pending update is then done, and memory may be released.
        """
        with self._sweep_lock:
            while self._sweeps:
                self._sweeps[0].settle()
                self._sweeps.popleft()  # only now: an interrupt must not lose a running sweep

    def spans_to_sweep(
        self, step: StepState, at: int, op: Operation
    ) -> tuple[dict[Role, Span], int, int]:
        """Return where each role is for the sweep of a block or a piece, and its element range.

        The range is in the block's flat buffer, and inside this rank's shard.
        """
        first = self._tiers.first_element(op.block, True)
        start, stop, roles = 0, self._owned_elements(op.block), {}
        if op.piece is not None:
            start, stop, _ = self._tiers.piece_span(op.block, op.piece)
        staged = step.program.read_of[at] >= 0  # otherwise it is swept where it is stored
        if staged:
            roles = self._spans_read_for(step.program, at)
        # Weights that the sweep does not need are not read from NVMe.
        unread = WEIGHTS if staged and op.roles == MOMENTS else ()
        for role in SWEPT_ROLES:
            has = self._tiers.has(op.block, role)
            # What is on NVMe is in staging, if the piece has any of it.
            if has and role not in unread and not self._tiers.on_disk(op.block, role):
                roles[role] = self._tiers.span(op.block, role)
        if unread:
            no_bytes = self._memory.staging[:0]
            roles[Role.WEIGHT] = Span(
                Role.WEIGHT, no_bytes, first + start, stop - start, self._tiers.formats
            )
        return roles, first + start, first + stop

    def _spans_read_for(self, program: Program, at: int) -> dict[Role, Span]:
        """Return the roles of the piece that operation `at` works on, in the piece's buffer."""
        read = program.read_of[at]
        return self._piece_spans(program, read, program.operations[read])

    def _piece_spans(self, program: Program, read: int, op: Operation) -> dict[Role, Span]:
        """Return the roles of a piece: they lie one after another in its buffer.

        The buffer is in host staging, or on the device if the device sweeps the piece.
        """
        start, stop, trained = self._span_of(op)
        before = self._tiers.first_element(op.block, trained)
        block = self._tiers.inventory.blocks[op.block]
        if op.gpu:
            pool = self._memory.states
            offset = program.states.offset(BufferKey(BufferKind.STATES, op.block, read))
        else:
            pool = self._memory.staging
            offset = program.staging.offset(BufferKey(BufferKind.STAGING, op.block, read))
        spans = {}
        for role in op.roles:
            low, high = block.role_span(role, start, stop)
            nbytes = self._tiers.formats.at_rest(role, high - low)
            data = pool[offset : offset + nbytes]
            if nbytes:
                spans[role] = Span(role, data, before + low, high - low, self._tiers.formats)
            offset += nbytes
        return spans

    def _span_of(self, op: Operation) -> tuple[int, int, bool]:
        """Return a piece's first element in the shard, its end, and whether it is trainable."""
        blocks = self._tiers.inventory.blocks
        return operation_span(blocks[op.block], op, self._tiers.plan.placement)

    # To the device.

    def fetch(self, step: StepState, at: int, op: Operation) -> None:
        """Copy a block's weights, or one piece of them, into its weight slot on the device."""
        if op.roles == (Role.GRADIENT,):
            self._fetch_gradient(step, at, op)
            return
        self._order_on_stream(step, at)
        if op.block in step.program.held:
            into = self._memory.held.span(op.block)
        else:
            key = BufferKey(BufferKind.WEIGHT, op.block, step.program.buffer_start[at])
            into = self._memory.weights.span(op.block, step.program.weights.offset(key))
        if op.piece is None:
            sources = self._tiers.streamed_spans(op.block)
        else:
            sources = (self._spans_read_for(step.program, at)[Role.WEIGHT],)
        for source in sources:
            own = into.values(source.first, source.first + source.count)
            self._device.copy(own, source.all())
        step.tickets.post(at, self._device.record())

    def _fetch_gradient(self, step: StepState, at: int, op: Operation) -> None:
        """Copy a block's gradient sum to the device, for the next round to add to."""
        self._order_on_stream(step, at)
        nbytes = 4 * self._owned_elements(op.block)
        offset = step.program.gradients.offset(BufferKey(BufferKind.GRADIENT, op.block, at))
        into = self._memory.gradient_pool[offset : offset + nbytes]
        if self._tiers.on_disk(op.block, Role.GRADIENT):
            self._move_gradient_pieces(op.block, into, self._pipes["fetch"].read)
        else:
            self._device.copy(into, self._tiers.data(op.block, Role.GRADIENT)[:nbytes])
        step.tickets.post(at, self._device.record())

    def fetch_activations(self, step: StepState, at: int, op: Operation) -> None:
        """Copy a block's activations to the device, one micro-batch after another.

        They pass through the two slots of the ring that backward leaves free, so each waits until
        backward has used the activation two places before it.
        """
        self._order_after_needs(step, at)
        backward = step.program.at[Verb.BACKWARD, op.block, op.round, None]
        # The computing thread sets `activation_slots` before it posts this ticket.
        last_layer = len(self._tiers.inventory.blocks) - 2
        last_forward = step.program.at.get((Verb.FORWARD, last_layer, op.round, None))
        if last_forward is not None:  # a separate backward pass begins with slots that are set
            step.tickets.order_after(last_forward, self._device)
        for micro, (rows, length) in enumerate(step.shapes(op.round)):
            slot, previous_user = step.reserve_activation_slot(op.round, (backward, micro))
            if previous_user is not None:
                step.tickets.order_after(previous_user, self._device)
            step.started[at, micro] = self._device.record()
            into = self._memory.hidden.slot(slot, rows, length)
            if self._tiers.on_disk(op.block, Role.ACTIVATION):
                extent = self._tiers.extent(op.block, Role.ACTIVATION, step.first_home + micro)
                self._pipes["fetch inputs"].read(extent, _as_bytes(into))
            else:
                home = step.first_home + micro
                source = self._memory.hidden.home(op.block, home, rows, length)
                self._device.copy(into, source)
            step.tickets.post((at, micro), self._device.record())
        step.tickets.post(at, self._device.record())

    def fetch_attention(self, step: StepState, at: int, op: Operation) -> None:
        """Copy the results of a block's attention to the device, one micro-batch after another.

        They pass through one slot, so each waits until backward has copied the one before it.
        """
        self._order_after_needs(step, at)
        backward, results = (
            step.program.at[Verb.BACKWARD, op.block, op.round, None],
            self._memory.attention,
        )
        for micro, tokens in self._attended(step, op):
            if step.attention_user is not None:
                step.tickets.order_after(step.attention_user, self._device)
            step.attention_user = attention_key(backward, micro)
            step.started[at, micro] = self._device.record()
            source = results.home(op.block, micro, tokens)
            self._device.copy(results.slot(op.block, tokens), source)
            step.tickets.post((at, micro), self._device.record())
        step.tickets.post(at, self._device.record())

    def _attended(self, step: StepState, op: Operation) -> Iterator[tuple[int, int]]:
        """Yield the micro-batches whose results of attention are saved, and their tokens."""
        for micro, (rows, length) in enumerate(step.shapes(op.round)):
            if self._memory.attention.saves(op.block, micro):
                yield micro, rows * length

    # From the device.

    def offload_gradient(self, step: StepState, at: int, op: Operation) -> None:
        """Copy a block's gradient to the place where it waits for the optimizer sweep."""
        self._order_on_stream(step, at)
        source = step.outgoing_gradients[op.block]
        if self._tiers.on_disk(op.block, Role.GRADIENT):
            self._move_gradient_pieces(op.block, source, self._pipes["drain"].write)
            self._pipes["drain"].finish()
        else:
            into = self._tiers.data(op.block, Role.GRADIENT)[: source.numel()]
            self._device.copy(into, source)
        step.tickets.post(at, self._device.record())

    def offload_activations(self, step: StepState, at: int, op: Operation) -> None:
        """Copy a block's activations to where they live, as soon as each micro-batch is computed.

        Activations on NVMe are written here, through the pipe of this lane.
        """
        computed = step.program.at[Verb.FORWARD, op.block - 1, op.round, None]
        on_disk = self._tiers.on_disk(op.block, Role.ACTIVATION)
        for micro, (rows, length) in enumerate(step.shapes(op.round)):
            step.tickets.order_after((computed, micro), self._device)
            step.started[at, micro] = self._device.record()
            slot = step.hidden_slots[op.round, op.block, micro]
            source = self._memory.hidden.slot(slot, rows, length)
            if on_disk:
                extent = self._tiers.extent(op.block, Role.ACTIVATION, step.first_home + micro)
                self._pipes["drain inputs"].write(extent, _as_bytes(source))
            else:
                home = step.first_home + micro
                into = self._memory.hidden.home(op.block, home, rows, length)
                self._device.copy(into, source)
            # The slot may be overwritten after this ticket; the disk may still be writing.
            step.tickets.post((at, micro), self._device.record())
        if on_disk:
            self._pipes["drain inputs"].finish()
        step.tickets.post(at, self._device.record())

    def offload_attention(self, step: StepState, at: int, op: Operation) -> None:
        """Copy the results of a block's attention to where they live.

        Each is copied as soon as it is computed, while the rest of the layer computes.
        """
        computed = step.program.at[Verb.FORWARD, op.block, op.round, None]
        results = self._memory.attention
        for micro, tokens in self._attended(step, op):
            step.tickets.order_after(attention_key(computed, micro), self._device)
            step.started[at, micro] = self._device.record()
            into = results.home(op.block, micro, tokens)
            self._device.copy(into, results.slot(op.block, tokens))
            step.tickets.post((at, micro), self._device.record())
        step.tickets.post(at, self._device.record())

    def _move_gradient_pieces(self, block: int, data: torch.Tensor, move: Move) -> None:
        """Move a gradient to or from NVMe, where it lies in the pieces in which it is swept."""
        width = 4 if self._tiers.formats.wide_gradient else 2
        for piece in self._tiers.pieces(block, Role.GRADIENT):
            start, stop, _ = self._tiers.piece_span(block, piece)
            extent = self._tiers.extent(block, Role.GRADIENT, piece)
            move(extent, data[width * start : width * stop])

    # Waiting.

    def _order_after_needs(self, step: StepState, at: int) -> None:
        """Order this lane's next work after everything that the operation needs."""
        for need in step.program.needs[at]:
            step.tickets.order_after(need, self._device)

    def _order_on_stream(self, step: StepState, at: int) -> None:
        """Order the operation after its needs on the device, and note its start."""
        self._order_after_needs(step, at)
        step.started[at] = self._device.record()

    def _wait_on_host(self, step: StepState, at: int) -> None:
        """Block until the operation's needs have finished: for work of the CPU and the disks."""
        for need in step.program.needs[at]:
            step.tickets.wait(need)
        step.started[at] = Finished(None)

    def _owned_elements(self, block: int) -> int:
        return self._tiers.inventory.blocks[block].shard_elements(True)


def _start_all(transfers: Iterable[StoreTicket]) -> TicketGroup:
    """Start transfers one after another, and return one ticket for all of them."""
    started: list[StoreTicket] = []
    try:
        for ticket in transfers:
            started.append(ticket)
    except BaseException:
        # Nobody else knows those that were started. Until they have ended, the staging memory is in
        # use, and the store refuses to write the same bytes again.
        TicketGroup(started).settle()
        raise
    return TicketGroup(started)


def _refused_some(swept: Ticket[object]) -> bool:
    """Wait for a sweep, and return whether it refused an element."""
    try:
        swept.wait()
    except NonFiniteMasterError:
        return True
    return False


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
