"""Build the schedule of a step from a placement.

`_ScheduleBuilder` reads from top to bottom like the step itself: forward through the blocks, the
head, then backward through the blocks.
"""

from __future__ import annotations

from collections import deque

from penstock.model.inventory import Inventory
from penstock.plan.placement import Placement
from penstock.plan.placement_index import Passes, PlacementIndex, WeightWindow
from penstock.plan.schedule import Operation, Phase, Schedule, Verb
from penstock.roles import MOMENTS, TRAINED, WEIGHTS, Role


def step_schedule(
    inventory: Inventory, placement: Placement, *, pending: bool = True, adds: bool = False
) -> Schedule:
    """Build the schedule of one training step. Equal arguments give equal schedules.

    Args:
        inventory: The model.
        placement: Where everything is stored.
        pending: Whether the previous step's optimizer sweeps are still to run. They are not before
            the first step, nor after `sweep_schedule` has run.
        adds: Whether gradients of an earlier call exist, to which this call adds.
    """
    builder = _ScheduleBuilder(PlacementIndex.of(inventory, placement), pending=pending, adds=adds)
    for round in range(placement.rounds):
        builder.pass_forward(round)
        builder.pass_backward(round)
    builder.meet()
    return builder.finished()


def evaluation_schedule(inventory: Inventory, placement: Placement) -> Schedule:
    """Build the schedule of an evaluation: one forward pass with the loss and no gradients.

    Pending optimizer sweeps must have run before.
    """
    index = PlacementIndex.of(inventory, placement)
    builder = _ScheduleBuilder(index, pending=False, passes="evaluation")
    builder.pass_forward(0)
    builder.head(0)
    builder.meet()
    return builder.finished()


def forward_schedule(
    inventory: Inventory, placement: Placement, *, pending: bool = True, keeps: bool = True
) -> Schedule:
    """Build the schedule of a forward pass through the embedding and the layers, without the head.

    The caller computes the head and the loss from what it leaves.

    Args:
        inventory: The model.
        placement: Where everything is stored. It must have one round.
        pending: Whether optimizer sweeps of streamed blocks are still to run.
        keeps: Whether activations are kept for a backward pass.
    """
    builder = _caller_loss_builder(inventory, placement, "forward", pending=pending)
    builder.keeps_activations = keeps
    builder.pass_forward(0)
    return builder.finished()


def backward_schedule(inventory: Inventory, placement: Placement, *, adds: bool) -> Schedule:
    """Build the schedule of a backward pass from the output of the last layer to the embedding.

    With `adds`, gradients of earlier passes exist, to which this one adds.
    """
    builder = _caller_loss_builder(inventory, placement, "backward", pending=False, adds=adds)
    builder.layers_backward(0)
    return builder.finished()


def offload_held_schedule(inventory: Inventory, placement: Placement) -> Schedule:
    """Build a schedule that moves the gradient sums of held blocks to where they are stored."""
    builder = _caller_loss_builder(inventory, placement, "backward", pending=False)
    for block in sorted(builder.held):
        if builder.index.gradient_leaves(block):
            builder.emit(Verb.OFFLOAD, block, (Role.GRADIENT,), "backward")
    return builder.finished()


def fetch_held_schedule(inventory: Inventory, placement: Placement, *, pending: bool) -> Schedule:
    """Build a schedule that brings the weights of held blocks up to date: sweep, then fetch."""
    builder = _caller_loss_builder(inventory, placement, "forward", pending=pending)
    held, builder.held = builder.held, frozenset()
    builder.interleaves = False  # other blocks are swept when their own weights are fetched
    for block in sorted(held):
        builder.fetch_weight(block, "forward", 0)
    builder.held = held
    return builder.finished()


def held_blocks(inventory: Inventory) -> frozenset[int]:
    """Return the blocks with whose weights a caller's own loss computes: those of the head."""
    return frozenset(inventory.weight_owners[-1])


def sweep_schedule(inventory: Inventory, placement: Placement) -> Schedule:
    """Build a schedule of all pending optimizer sweeps and nothing else.

    It runs before saving, evaluating or reading a parameter.
    """
    builder = _ScheduleBuilder(PlacementIndex.of(inventory, placement), fetches=False)
    for block in range(len(inventory.blocks)):
        builder.sweep(block)
    return builder.finished()


def _caller_loss_builder(
    inventory: Inventory, placement: Placement, passes: Passes, *,
    pending: bool, adds: bool = False,
) -> _ScheduleBuilder:  # fmt: skip
    """Return a builder of one of the passes around a loss that the caller computes."""
    assert placement.rounds == 1, "the caller's forward and backward are one round"
    index = PlacementIndex.of(inventory, placement)
    builder = _ScheduleBuilder(index, pending=pending, passes=passes, adds=adds)
    builder.held = held_blocks(inventory)
    return builder


class _ScheduleBuilder:
    """Appends operations, and keeps track of what later ones must wait for."""

    def __init__(
        self,
        index: PlacementIndex,
        *,
        pending: bool = True,
        passes: Passes = "step",
        fetches: bool = True,
        adds: bool = False,
    ) -> None:
        self.index = index
        self.pending, self.fetches, self.adds = pending, fetches, adds
        self.backward = passes in ("step", "backward")
        self.divides_sweeps = passes == "step" and fetches
        """Whether moments may be updated later than weights, in the backward pass that follows."""
        self.keeps_activations = passes == "step"
        """Whether the forward pass stores activations for a backward pass."""
        self.held: frozenset[int] = frozenset()
        """See `Schedule.held`."""
        self.interleaves = True
        """Whether sweeps of blocks in host memory may run between pieces of an earlier block."""
        self.operations: list[Operation] = []
        self.window = WeightWindow(index, passes=passes)
        self.use = 0
        # All of these hold indices of operations.
        self.computed: dict[int, int] = {}
        """Last computation of each block."""
        self.swept: dict[int, tuple[int, ...]] = {}
        """Sweeps of each block."""
        self.late: dict[int, tuple[int, ...]] = {}
        """Sweeps of the moments of each block whose weights were swept before."""
        self.late_pieces: deque[tuple[int, int, int]] = deque()
        """Pieces with moments on NVMe that are still to be swept, in the order in which backward
        replaces their gradients: the block, the piece, and the sweep of its weights."""
        self.late_count = 0
        """Number of such pieces in the whole step."""
        self.updated: dict[int, tuple[int, ...]] = {}
        """What has updated the weights of each block that is resident in HBM."""
        self.summed: dict[int, int] = {}
        """Operation that has last added to the gradient of each block."""
        self.written: dict[tuple[int, int], tuple[int, ...]] = {}
        """Write of each block and piece."""
        self.fetched: dict[tuple[int, Role], tuple[int, ...]] = {}
        """Fetches of what is in HBM now."""
        self.offloaded: dict[tuple[int, Role], int] = {}
        """Offload of what is outside HBM now."""
        self.staged: list[tuple[Operation, tuple[int, ...]]] = []
        """Reads whose staging buffer is in use, and the operations that still need it."""
        self.passing: list[tuple[Operation, int]] = []
        """Fetches of states whose buffer in HBM is in use, and the offload of each, oldest
        first."""
        self.leaving: list[tuple[int, int]] = []
        """Blocks whose gradient leaves HBM, and the offload of each, oldest first."""
        self.sent: list[tuple[int, int]] = []
        """Blocks whose computation's gradients are sent to the ranks, and the exchange of each,
        oldest first."""

    # The two passes.

    def pass_forward(self, round: int) -> None:
        """Append forward through all blocks but the head."""
        for i in range(self.index.count - 1):
            self.prefetch("forward", round)
            waits = self.weights_of(self.index.owners(i))
            # The output of block i overwrites the input of block i - 1, which must have left. The
            # results of attention have one slot, which is written early in a block: those of block
            # i - 1 leave while it computes, and those of block i - 2 have left before block i.
            for key in ((i - 1, Role.ACTIVATION), (i - 2, Role.ATTENTION)):
                waits += (self.offloaded[key],) if key in self.offloaded else ()
            self.compute(Verb.FORWARD, i, "forward", round, waits)
            if self.keeps_activations and self.index.offloads_attention(i):
                self.offload(i, Role.ATTENTION, "forward", round, after=self.computed[i])
            if self.keeps_activations and self.index.offloads_activation(i + 1):
                self.offload(i + 1, Role.ACTIVATION, "forward", round, after=self.computed[i])

    def head(self, round: int) -> None:
        """Append the head with the loss, where forward turns into backward."""
        last = self.index.count - 1
        phase: Phase = "backward" if self.backward else "forward"
        self.prefetch(phase, round)
        waits = self.weights_of(self.index.owners(last))
        blocks = self.index.adds_to(last) if self.backward else ()
        self.compute(Verb.LOSS, last, phase, round, waits + self.sums_so_far(blocks))
        self.exchange(blocks, last, round)

    def pass_backward(self, round: int) -> None:
        """Append the head and backward through all other blocks."""
        self.head(round)
        if round == 0:
            self.sweep_late_moments()
        self.sweep_late_pieces(self.index.count - 1)
        self.offload_gradient(self.index.count - 1, round)
        self.layers_backward(round)

    def layers_backward(self, round: int) -> None:
        """Append backward through all blocks but the head."""
        for i in range(self.index.count - 2, -1, -1):
            self.prefetch("backward", round)
            # One gradient may still be leaving while the next is computed.
            self.drop_gradients(round, keep=1)
            self.drop_sent(round, keep=1)
            waits = self.weights_of(self.index.owned_in_backward[i])
            waits += self.in_hbm(i, Role.ACTIVATION) + self.in_hbm(i, Role.ATTENTION)
            blocks = self.index.adds_to(i)
            self.compute(Verb.BACKWARD, i, "backward", round, waits + self.sums_so_far(blocks))
            self.sweep_late_pieces(i)
            self.exchange(blocks, i, round)
            self.drop(i, Role.ACTIVATION, "backward", round)
            self.drop(i, Role.ATTENTION, "backward", round)
            self.offload_gradient(i, round)
        self.drop_gradients(round, keep=0)
        self.drop_sent(round, keep=0)

    def finished(self) -> Schedule:
        """Drop and release everything that is left, and return the schedule."""
        phase: Phase = "backward" if self.backward else "forward"
        round = self.window.uses[-1].round
        for block, role in list(self.fetched):
            self.drop(block, role, phase, round)
        self.release(phase, round, keep=0)
        self.drop_states(phase, round, keep=0)
        return Schedule(tuple(self.operations), self.index.ranks, self.held)

    # Fetches, as far ahead as the placement says.

    def prefetch(self, phase: Phase, round: int) -> None:
        """Append the fetches that may run while the next computation does."""
        for distance, use in enumerate(self.window.next_uses(self.use)):
            for owner in use.owners:
                self.fetch_weight(owner, phase, round)
            # Activations and gradients come at most one block ahead, whatever `ahead` is.
            if use.backward and distance <= 1:
                self.fetch_for_backward(use.block, use.round)
        self.use += 1

    def fetch_weight(self, owner: int, phase: Phase, round: int) -> None:
        """Append what makes a block's updated weights available in HBM."""
        if owner in self.held:  # up to date before the schedule begins (`fetch_held_schedule`)
            return
        if self.index.weight_in_hbm(owner):
            self.sweep(owner)
            return
        if (owner, Role.WEIGHT) in self.fetched:
            return
        for evicted in self.window.evict(owner, self.use, self.fetched):
            self.drop(evicted, Role.WEIGHT, phase, round)
        if self.index.is_split(owner):
            # The GPU sweeps what is resident. What is fetched is frozen and waits for nothing.
            self.sweep(owner)
            if self.index.weight_on_nvme(owner):
                self.fetch_staged_weight(owner, phase, round, first=self.index.pieces[owner])
            else:
                self.fetch(owner, Role.WEIGHT, phase, round, after=())
        elif not self.index.weight_on_nvme(owner):
            self.sweep(owner)
            self.fetch(owner, Role.WEIGHT, phase, round, after=self.swept.get(owner, ()))
        elif self.sweep(owner):
            # The sweep has fetched the trainable pieces from staging. Only frozen ones remain.
            self.fetch_staged_weight(owner, phase, round, first=self.index.pieces[owner])
        else:
            self.fetch_staged_weight(owner, phase, round, first=0)
        if self.index.ranks > 1:
            fetched = self.in_hbm(owner, Role.WEIGHT)
            self.fetched[owner, Role.WEIGHT] = (self.gather(owner, phase, round, fetched),)

    def fetch_staged_weight(self, owner: int, phase: Phase, round: int, first: int) -> None:
        """Append reads and fetches of a weight on NVMe, from piece `first` on."""
        for piece in range(first, self.index.pieces[owner] + self.index.frozen_pieces[owner]):
            self.release(phase, round, keep=self.index.placement.pieces_staged - 1)
            # The sweep may have written this piece earlier in the same step.
            after = self.written.get((owner, piece), ())
            weight = (Role.WEIGHT,)
            read = self.emit(Verb.READ, owner, weight, phase, round, piece=piece, after=after)
            at = self.emit(Verb.FETCH, owner, weight, phase, round, piece=piece, after=(read,))
            self.fetched[owner, Role.WEIGHT] = (*self.in_hbm(owner, Role.WEIGHT), at)
            self.staged.append((self.operations[read], (at,)))

    def fetch_for_backward(self, block: int, round: int) -> None:
        """Append fetches of what a backward needs: activations, attention, gradient sums."""
        wanted = [(block, Role.ACTIVATION)] if self.index.offloads_activation(block) else []
        wanted += [(block, Role.ATTENTION)] if self.index.offloads_attention(block) else []
        if round > 0 or self.adds:
            added = (b for b in self.index.adds_to(block) if self.gradient_leaves(b))
            wanted += [(b, Role.GRADIENT) for b in added]
        for key in wanted:
            if key not in self.fetched:
                # Once block + 2 has computed, its buffers are free for this one.
                after = tuple(self.computed[b] for b in (block + 2,) if b in self.computed)
                offloaded = (self.offloaded[key],) if key in self.offloaded else ()
                self.fetch(*key, "backward", round, after=after + offloaded)

    # Optimizer sweeps, in pieces if they pass through staging.

    def sweep(self, block: int) -> bool:
        """Append the block's optimizer sweep.

        Returns False if there is nothing to sweep or the sweep is already in the schedule.
        """
        side = self.index.placement.blocks[block].sweep
        if block in self.swept or side == "none" or not self.pending:
            return False
        staged = self.index.staged_roles(block)
        if staged:
            self.swept[block] = self.sweep_staged(block, staged)
        elif self.index.interleaves(block):
            pieces = range(self.index.pieces[block])
            self.swept[block] = tuple(self.sweep_part(block, p) for p in pieces)
        elif self.index.streams_states(block):
            pieces = range(self.index.pieces[block])
            self.swept[block] = tuple(self.sweep_states(block, p) for p in pieces)
            if self.index.has_late_moments(block) and not self.divides_sweeps:
                self.sweep_moments(block, "forward")
        else:
            # Updates of whole tensors share a workspace, so all of them are on one lane.
            gpu = side == "gpu" and not self.index.whole_tensors
            late = self.divides_sweeps and self.index.has_late_moments(block)
            roles = WEIGHTS if late else TRAINED
            self.swept[block] = (self.emit(Verb.SWEEP, block, roles, "forward", gpu=gpu),)
        if self.index.weight_in_hbm(block) or self.index.is_split(block):
            # A rank has swept its own shard of the weights, and computes with all of them.
            self.updated[block] = self.swept[block]
            if self.index.ranks > 1:
                self.updated[block] = (self.gather(block, "forward", 0, self.swept[block]),)
        return True

    def sweep_late_moments(self) -> None:
        """Append the sweeps of moments, in the order in which backward replaces the gradients.

        They follow all sweeps of weights on their lane, so they never delay a forward pass. Those
        of moments on NVMe are only noted here: `sweep_late_pieces` appends them.
        """
        for block in sorted(self.swept, reverse=True):
            if self.operations[self.swept[block][0]].roles != WEIGHTS:
                continue
            if self.index.staged_roles(block):
                pieces = enumerate(self.swept[block])
                self.late_pieces.extend((block, piece, swept) for piece, swept in pieces)
            else:
                self.sweep_moments(block, "backward")
        self.late_count = len(self.late_pieces)

    def sweep_moments(self, block: int, phase: Phase) -> None:
        """Append the sweep of a block's moments on the CPU, after that of its weights."""
        swept = self.emit(Verb.SWEEP, block, MOMENTS, phase, after=self.swept[block])
        self.late[block] = (swept,)

    def sweep_late_pieces(self, block: int) -> None:
        """Append the sweeps of moments on NVMe that run while backward computes a block.

        Reads of weights and gradients for later blocks wait behind these reads, so they are spread
        over backward. They end before its last quarter, or the step would wait for their writes.
        This block's own come first of all, because its new gradient is about to replace the old.
        """
        count = self.index.count
        left = self.late_count * max(0, 4 * block - count) // (3 * count)
        while self.late_pieces and (
            len(self.late_pieces) > left or self.late_pieces[0][0] >= block
        ):
            self.sweep_late_piece(*self.late_pieces.popleft())

    def sweep_late_piece(self, block: int, piece: int, after: int) -> None:
        """Append read, sweep and write of one piece's moments, after the sweep of its weights."""
        self.release("backward", 0, keep=self.index.placement.pieces_staged - 1)
        staged = self.index.staged_roles(block)
        reads = tuple(role for role in staged if role not in WEIGHTS)
        read = self.emit(Verb.READ, block, reads, "backward", piece=piece)
        swept = self.emit(Verb.SWEEP, block, MOMENTS, "backward", piece=piece, after=(read, after))
        back = tuple(role for role in staged if role in MOMENTS)
        write = self.emit(Verb.WRITE, block, back, "backward", piece=piece, after=(swept,))
        self.staged.append((self.operations[read], (write,)))
        self.late[block] = (*self.late.get(block, ()), swept)

    def sweep_staged(self, block: int, staged: tuple[Role, ...]) -> tuple[int, ...]:
        """Append the sweep of a block that passes through staging, and return its indices.

        Sweeps of the following blocks in host memory are spread over its pieces. The disk takes
        longer for a piece than the CPU does, so there is time for them. After the last piece, the
        next pieces from the disk would have to wait for them.
        """
        between = self.index.between_staged(block) if self.interleaves else ()
        parts = [
            (other, part)
            for other in between
            if other not in self.swept and other not in self.held
            for part in range(self.index.pieces[other])
        ]
        count, swept = self.index.pieces[block], []
        for piece in range(count):
            for other, part in parts[
                len(parts) * piece // count : len(parts) * (piece + 1) // count
            ]:
                self.swept[other] = (*self.swept.get(other, ()), self.sweep_part(other, part))
            swept.append(self.sweep_piece(block, piece, staged))
        return tuple(swept)

    def sweep_part(self, block: int, piece: int) -> int:
        """Append the sweep of one piece of a block in host memory, and return its index."""
        return self.emit(Verb.SWEEP, block, TRAINED, "forward", piece=piece)

    def sweep_piece(self, block: int, piece: int, staged: tuple[Role, ...]) -> int:
        """Append read, sweep, write and fetch of one piece, and return the sweep's index."""
        self.release("forward", 0, keep=self.index.placement.pieces_staged - 1)
        late = self.divides_sweeps and self.index.has_late_moments(block)
        roles = WEIGHTS if late else TRAINED
        read = self.emit(Verb.READ, block, staged, "forward", piece=piece)
        swept = self.emit(Verb.SWEEP, block, roles, "forward", piece=piece, after=(read,))
        users: tuple[int, ...] = (swept,)
        back = tuple(role for role in staged if role in roles and role is not Role.GRADIENT)
        if back:
            users = (self.emit(Verb.WRITE, block, back, "forward", piece=piece, after=users),)
        if Role.WEIGHT in staged and self.fetches:
            # Fetch the updated weights from staging: reading them again would cost NVMe traffic.
            self.written[block, piece] = users
            at = self.emit(
                Verb.FETCH, block, (Role.WEIGHT,), "forward", piece=piece, after=(swept,)
            )
            self.fetched[block, Role.WEIGHT] = (*self.in_hbm(block, Role.WEIGHT), at)
            users += (at,)
        self.staged.append((self.operations[read], users))
        return swept

    def sweep_states(self, block: int, piece: int) -> int:
        """Append fetch, sweep and offload of one piece that the GPU sweeps.

        Returns the index of the offload: what needs the swept weights finds them in host memory.
        With late moments, only the weights are offloaded: the moments in host memory stay as they
        are until the CPU updates them.
        """
        self.drop_states("forward", 0, keep=self.index.placement.pieces_staged - 1)
        fetched = self.emit(Verb.FETCH, block, TRAINED, "forward", piece=piece, gpu=True)
        swept = self.emit(
            Verb.SWEEP, block, TRAINED, "forward", piece=piece, gpu=True, after=(fetched,)
        )
        offloaded = self.emit(
            Verb.OFFLOAD,
            block,
            self.index.swept_on_gpu(block),
            "forward",
            piece=piece,
            gpu=True,
            after=(swept,),
        )
        self.passing.append((self.operations[fetched], offloaded))
        return offloaded

    def drop_states(self, phase: Phase, round: int, keep: int) -> None:
        """Drop the oldest pieces of states in HBM until `keep` are left."""
        while len(self.passing) > keep:
            fetch, offloaded = self.passing.pop(0)
            self.emit(
                Verb.DROP, fetch.block, fetch.roles, phase, round,
                piece=fetch.piece, gpu=True, after=(offloaded,),
            )  # fmt: skip

    def release(self, phase: Phase, round: int, keep: int) -> None:
        """Release the oldest staging buffers until `keep` are left."""
        while len(self.staged) > keep:
            read, users = self.staged.pop(0)
            roles, piece = read.roles, read.piece
            self.emit(Verb.RELEASE, read.block, roles, phase, round, piece=piece, after=users)

    # What all ranks do together.

    def gather(self, block: int, phase: Phase, round: int, after: tuple[int, ...]) -> int:
        """Append what completes a block's weights, and return its index."""
        return self.emit(Verb.GATHER, block, (Role.WEIGHT,), phase, round, after=after)

    def sums_so_far(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Return what a computation that adds to the gradients of blocks waits for.

        With several ranks it does not add to them; the exchange that follows does.
        """
        if self.index.ranks > 1:
            return ()
        return tuple(at for block in blocks for at in self.in_hbm(block, Role.GRADIENT))

    def exchange(self, blocks: tuple[int, ...], computed: int, round: int) -> None:
        """Append the exchange of the gradients that a block's computation has just produced.

        One operation exchanges those of all blocks to which the computation adds: it proceeds
        micro-batch by micro-batch while the computation runs.
        """
        summed = self.computed[computed]
        if self.index.ranks > 1 and blocks:
            after = tuple(at for block in blocks for at in self.in_hbm(block, Role.GRADIENT))
            summed = self.emit(
                Verb.EXCHANGE, computed, (Role.GRADIENT,), "backward", round,
                after=(summed, *after),
            )  # fmt: skip
            self.sent.append((computed, summed))
        self.summed |= dict.fromkeys(blocks, summed)

    def drop_sent(self, round: int, keep: int) -> None:
        """Drop what the oldest computations have sent to the ranks, until `keep` are left.

        While it is sent, the next computation has a buffer of its own.
        """
        while len(self.sent) > keep:
            block, exchange = self.sent.pop(0)
            self.emit(Verb.DROP, block, (), "backward", round, after=(exchange,))

    def meet(self) -> None:
        """Append the meeting of all ranks at the end of a step or of an evaluation."""
        if self.index.ranks > 1:
            head = self.index.count - 1
            after = tuple(sorted({self.computed[head], *self.summed.values()}))
            last = self.operations[-1]
            self.emit(Verb.MEET, head, (), last.phase, last.round, after=after)

    # Gradients leave HBM.

    def offload_gradient(self, block: int, round: int) -> None:
        """Append the offload of a block's gradient, unless it is stored in HBM."""
        if self.gradient_leaves(block):
            # The sweep of the moments still reads the gradient of the previous step.
            after = (self.summed[block], *self.late.get(block, ()))
            at = self.emit(Verb.OFFLOAD, block, (Role.GRADIENT,), "backward", round, after=after)
            self.offloaded[block, Role.GRADIENT] = at
            self.fetched.pop((block, Role.GRADIENT), None)  # the offload now owns its buffer
            self.leaving.append((block, self.offloaded[block, Role.GRADIENT]))

    def gradient_leaves(self, block: int) -> bool:
        """Return whether the schedule itself moves the block's gradient out of HBM."""
        return self.index.gradient_leaves(block) and block not in self.held

    def drop_gradients(self, round: int, keep: int) -> None:
        """Drop the oldest gradient buffers until `keep` are left."""
        while len(self.leaving) > keep:
            block, offloaded = self.leaving.pop(0)
            self.emit(Verb.DROP, block, (Role.GRADIENT,), "backward", round, after=(offloaded,))

    # Single operations.

    def fetch(
        self, block: int, role: Role, phase: Phase, round: int, after: tuple[int, ...]
    ) -> None:
        """Append a fetch of a whole role."""
        at = self.emit(Verb.FETCH, block, (role,), phase, round, after=after)
        self.fetched[block, role] = (at,)

    def offload(self, block: int, role: Role, phase: Phase, round: int, after: int) -> None:
        """Append the offload of a whole role."""
        at = self.emit(Verb.OFFLOAD, block, (role,), phase, round, after=(after,))
        self.offloaded[block, role] = at

    def drop(self, block: int, role: Role, phase: Phase, round: int) -> None:
        """Append a drop of what is in HBM, after the last computation that uses it."""
        if self.fetched.pop((block, role), None) is not None:
            users = self.index.users(block) if role is Role.WEIGHT else (block,)
            after = tuple(self.computed[b] for b in users if b in self.computed)
            self.emit(Verb.DROP, block, (role,), phase, round, after=after)

    def compute(
        self, verb: Verb, block: int, phase: Phase, round: int, waits: tuple[int, ...]
    ) -> None:
        """Append a computation."""
        self.computed[block] = self.emit(verb, block, (), phase, round, after=waits)

    def weights_of(self, owners: tuple[int, ...]) -> tuple[int, ...]:
        """Return what makes the weights of blocks available: fetches, or sweeps on the GPU."""
        fetched = tuple(at for o in owners for at in self.in_hbm(o, Role.WEIGHT))
        return fetched + tuple(at for o in owners for at in self.updated.get(o, ()))

    def in_hbm(self, block: int, role: Role) -> tuple[int, ...]:
        """Return the fetches that brought a role into HBM; empty if it is not there."""
        return self.fetched.get((block, role), ())

    def emit(
        self,
        verb: Verb,
        block: int,
        roles: tuple[Role, ...],
        phase: Phase,
        round: int = 0,
        *,
        piece: int | None = None,
        gpu: bool = False,
        after: tuple[int, ...] = (),
    ) -> int:
        """Append an operation and return its index."""
        self.operations.append(Operation(verb, block, roles, phase, round, piece, gpu, after))
        return len(self.operations) - 1
