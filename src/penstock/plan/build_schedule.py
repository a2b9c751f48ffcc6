"""Writes the schedule of a step from a placement. Room: decide.

Reads top to bottom like the step itself: forward through the blocks, the head, and back.
"""

from __future__ import annotations

from penstock.model.inventory import Inventory
from penstock.plan.placement import Placement
from penstock.plan.schedule import Operation, Phase, Schedule, Verb
from penstock.plan.weight_window import PlacementIndex, WeightWindow
from penstock.roles import TRAINED, Role


def step_schedule(
    inventory: Inventory, placement: Placement, *, pending: bool = True, adds: bool = False
) -> Schedule:
    """The order of one step. Pure: the same arguments give the same list.

    Without `pending` there is nothing to sweep: the first step, or one after a pause in which the
    sweeps were finished. With `adds`, gradients of an earlier call are there, and are added to.
    """
    writer = _Writer(PlacementIndex.of(inventory, placement), pending=pending, adds=adds)
    for round in range(placement.rounds):
        writer.pass_forward(round)
        writer.pass_backward(round)
    return writer.finished()


def evaluation_schedule(inventory: Inventory, placement: Placement) -> Schedule:
    """One pass forward, with the loss and no gradients. Sweeps are finished before it."""
    facts = PlacementIndex.of(inventory, placement)
    writer = _Writer(facts, pending=False, backward=False)
    writer.pass_forward(0)
    writer.turn(0)
    return writer.finished()


def sweep_schedule(inventory: Inventory, placement: Placement) -> Schedule:
    """Every pending sweep and nothing else: before saving, evaluating or reading a parameter."""
    writer = _Writer(PlacementIndex.of(inventory, placement), sends=False)
    for block in range(len(inventory.blocks)):
        writer.sweep(block)
    return writer.finished()


class _Writer:
    """Appends operations and remembers what later ones must wait for."""

    def __init__(
        self,
        facts: PlacementIndex,
        *,
        pending: bool = True,
        backward: bool = True,
        sends: bool = True,
        adds: bool = False,
    ) -> None:
        self.facts = facts
        self.pending, self.backward, self.sends, self.adds = pending, backward, sends, adds
        self.listed: list[Operation] = []
        self.window = WeightWindow(facts, backward=backward)
        self.use = 0
        self.computed: dict[int, int] = {}  # block -> its last computation
        self.swept: dict[int, tuple[int, ...]] = {}  # block -> its sweeps
        self.written: dict[tuple[int, int], tuple[int, ...]] = {}  # block and piece -> its write
        self.fetched: dict[tuple[int, Role], tuple[int, ...]] = {}  # in HBM now, and since when
        self.drained: dict[tuple[int, Role], int] = {}  # out of HBM, and since when
        self.staged: list[tuple[Operation, tuple[int, ...]]] = []  # reads, and what holds them
        self.leaving: list[tuple[int, int]] = []  # gradients on their way out, oldest first

    # The two passes.

    def pass_forward(self, round: int) -> None:
        for i in range(self.facts.count - 1):
            self.bring("forward", round)
            # The output of block i goes where the input of block i - 1 was.
            leaves = self.drained.get((i - 1, Role.INPUT))
            waits = self.weights_of(i) + (() if leaves is None else (leaves,))
            self.compute(Verb.FORWARD, i, "forward", round, waits)
            if self.backward and self.facts.offloads_input(i + 1):
                self.drain(i + 1, Role.INPUT, "forward", round, after=self.computed[i])

    def turn(self, round: int) -> None:
        last = self.facts.count - 1
        phase: Phase = "backward" if self.backward else "forward"
        self.bring(phase, round)
        waits = self.weights_of(last)
        for block in self.facts.adds_to(last):
            waits += self.in_hbm(block, Role.GRADIENT)
        self.compute(Verb.LOSS, last, phase, round, waits)

    def pass_backward(self, round: int) -> None:
        last = self.facts.count - 1
        self.turn(round)
        self.send_gradient(last, round)
        for i in range(last - 1, -1, -1):
            self.bring("backward", round)
            self.make_room_for_gradient(round, keep=1)
            waits = self.weights_of(i) if i > 0 else ()
            waits += self.in_hbm(i, Role.INPUT) + self.in_hbm(i, Role.GRADIENT)
            self.compute(Verb.BACKWARD, i, "backward", round, waits)
            self.drop(i, Role.INPUT, "backward", round)
            self.send_gradient(i, round)
        self.make_room_for_gradient(round, keep=0)

    def finished(self) -> Schedule:
        """Drops what is left, and hands the list over."""
        phase: Phase = "backward" if self.backward else "forward"
        round = self.window.uses[-1].round
        for block, role in list(self.fetched):
            self.drop(block, role, phase, round)
        self.release(phase, round, keep=0)
        return Schedule(operations=tuple(self.listed))

    # Bringing blocks in, as far ahead as the plan says.

    def bring(self, phase: Phase, round: int) -> None:
        for distance, use in enumerate(self.window.next_uses(self.use)):
            for owner in use.owners:
                self.fetch_weight(owner, phase, round)
            if use.backward and distance <= 1:
                self.fetch_for_backward(use.block, use.round)
        self.use += 1

    def fetch_weight(self, owner: int, phase: Phase, round: int) -> None:
        if self.facts.weight_in_hbm(owner):
            self.sweep(owner)
            return
        if (owner, Role.WEIGHT) in self.fetched:
            return
        for gone in self.window.evict(owner, self.use, self.fetched):
            self.drop(gone, Role.WEIGHT, phase, round)
        if not self.facts.weight_on_nvme(owner):
            self.sweep(owner)
            self.fetch(owner, Role.WEIGHT, phase, round, after=self.swept.get(owner, ()))
        elif self.sweep(owner):  # which sends what it wrote straight on
            self.fetch_staged_weight(owner, phase, round, first=self.facts.pieces[owner])
        else:
            self.fetch_staged_weight(owner, phase, round, first=0)

    def fetch_staged_weight(self, owner: int, phase: Phase, round: int, first: int) -> None:
        for piece in range(first, self.facts.pieces[owner] + self.facts.frozen_pieces[owner]):
            self.release(phase, round, keep=self.facts.placement.pieces_staged - 1)
            # It may have been written only now.
            after = self.written.get((owner, piece), ())
            weight = (Role.WEIGHT,)
            read = self.emit(Verb.READ, owner, weight, phase, round, piece=piece, after=after)
            at = self.emit(Verb.FETCH, owner, weight, phase, round, piece=piece, after=(read,))
            self.fetched[owner, Role.WEIGHT] = (*self.in_hbm(owner, Role.WEIGHT), at)
            self.staged.append((self.listed[read], (at,)))

    def fetch_for_backward(self, block: int, round: int) -> None:
        wanted = [(block, Role.INPUT)] if self.facts.offloads_input(block) else []
        if round > 0 or self.adds:
            added = (b for b in self.facts.adds_to(block) if self.facts.gradient_leaves(b))
            wanted += [(b, Role.GRADIENT) for b in added]
        for key in wanted:
            if key not in self.fetched:
                # The buffers of the block two before are free by then.
                after = tuple(self.computed[b] for b in (block + 2,) if b in self.computed)
                left = (self.drained[key],) if key in self.drained else ()
                self.fetch(*key, "backward", round, after=after + left)

    # The sweep, in pieces where it passes through staging.

    def sweep(self, block: int) -> bool:
        """False if there is nothing to sweep, or it is done already."""
        side = self.facts.placement.blocks[block].sweep
        if block in self.swept or side == "none" or not self.pending:
            return False
        staged = self.facts.staged_roles(block)
        if staged:
            pieces = range(self.facts.pieces[block])
            self.swept[block] = tuple(self.sweep_piece(block, p, staged) for p in pieces)
        else:
            swept = self.emit(Verb.SWEEP, block, TRAINED, "forward", gpu=side == "gpu")
            self.swept[block] = (swept,)
        return True

    def sweep_piece(self, block: int, piece: int, staged: tuple[Role, ...]) -> int:
        self.release("forward", 0, keep=self.facts.placement.pieces_staged - 1)
        read = self.emit(Verb.READ, block, staged, "forward", piece=piece)
        swept = self.emit(Verb.SWEEP, block, TRAINED, "forward", piece=piece, after=(read,))
        holds: tuple[int, ...] = (swept,)
        back = tuple(role for role in staged if role is not Role.GRADIENT)
        if back:
            holds = (self.emit(Verb.WRITE, block, back, "forward", piece=piece, after=holds),)
        if Role.WEIGHT in staged and self.sends:
            self.written[block, piece] = holds
            at = self.emit(
                Verb.FETCH, block, (Role.WEIGHT,), "forward", piece=piece, after=(swept,)
            )
            self.fetched[block, Role.WEIGHT] = (*self.in_hbm(block, Role.WEIGHT), at)
            holds += (at,)
        self.staged.append((self.listed[read], holds))
        return swept

    def release(self, phase: Phase, round: int, keep: int) -> None:
        while len(self.staged) > keep:
            read, holds = self.staged.pop(0)
            roles, piece = read.roles, read.piece
            self.emit(Verb.RELEASE, read.block, roles, phase, round, piece=piece, after=holds)

    # Gradients out.

    def send_gradient(self, block: int, round: int) -> None:
        if self.facts.gradient_leaves(block):
            self.drain(block, Role.GRADIENT, "backward", round, after=self.computed[block])
            self.fetched.pop((block, Role.GRADIENT), None)  # its buffer goes with the drain
            self.leaving.append((block, self.drained[block, Role.GRADIENT]))

    def make_room_for_gradient(self, round: int, keep: int) -> None:
        while len(self.leaving) > keep:
            block, drained = self.leaving.pop(0)
            self.emit(Verb.DROP, block, (Role.GRADIENT,), "backward", round, after=(drained,))

    # The verbs.

    def fetch(
        self, block: int, role: Role, phase: Phase, round: int, after: tuple[int, ...]
    ) -> None:
        at = self.emit(Verb.FETCH, block, (role,), phase, round, after=after)
        self.fetched[block, role] = (at,)

    def drain(self, block: int, role: Role, phase: Phase, round: int, after: int) -> None:
        at = self.emit(Verb.DRAIN, block, (role,), phase, round, after=(after,))
        self.drained[block, role] = at

    def drop(self, block: int, role: Role, phase: Phase, round: int) -> None:
        if self.fetched.pop((block, role), None) is not None:
            users = self.facts.users(block) if role is Role.WEIGHT else (block,)
            after = tuple(self.computed[b] for b in users if b in self.computed)
            self.emit(Verb.DROP, block, (role,), phase, round, after=after)

    def compute(
        self, verb: Verb, block: int, phase: Phase, round: int, waits: tuple[int, ...]
    ) -> None:
        self.computed[block] = self.emit(verb, block, (), phase, round, after=waits)

    def weights_of(self, block: int) -> tuple[int, ...]:
        """What must have ended before it can compute: a fetch, or the GPU's own sweep."""
        owners = self.facts.owners(block)
        fetched = tuple(at for o in owners for at in self.in_hbm(o, Role.WEIGHT))
        resident = (o for o in owners if self.facts.weight_in_hbm(o))
        return fetched + tuple(at for o in resident for at in self.swept.get(o, ()))

    def in_hbm(self, block: int, role: Role) -> tuple[int, ...]:
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
        self.listed.append(Operation(verb, block, roles, phase, round, piece, gpu, after))
        return len(self.listed) - 1
