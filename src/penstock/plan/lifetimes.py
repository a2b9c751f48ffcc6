"""Derive from a schedule when each temporary buffer is in use.

The planner sizes the buffer pools from these lists, and the engine lays its buffers out from the
same lists, so the engine allocates exactly what the plan counted. Time is measured in operations:
moment `n` is the start of operation `n` of the schedule.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from penstock.model.inventory import Block, Inventory
from penstock.plan.packing import Lifetime
from penstock.plan.placement import Placement
from penstock.plan.schedule import Operation, Schedule, Verb
from penstock.roles import EXTENT, Formats, Role
from penstock.units import round_up


class BufferKind(StrEnum):
    """What a temporary buffer holds."""

    WEIGHT = "weight"
    """The streamed weights of one block, in HBM."""

    GRADIENT_SUM = "sum"
    """The fp32 sum of one block's gradients over the micro-batches of a round, in HBM."""

    GRADIENT = "gradient"
    """One block's gradient on its way out of HBM, in the format it is stored in."""

    SENT = "sent"
    """One block's gradient of one micro-batch, until every rank has its shard of it, in HBM."""

    RECEIVED = "received"
    """The rank's own shard of one block's gradients, of one micro-batch of each rank, in HBM."""

    STAGING = "staged"
    """One piece of a block between NVMe and its next destination, in host memory."""

    STATES = "states"
    """One piece of a block that is stored in host memory while the GPU sweeps it, in HBM."""


class BufferKey(NamedTuple):
    """Identifies one temporary buffer within a schedule."""

    kind: BufferKind
    """What the buffer holds."""

    block: int
    """Index of the block it belongs to."""

    start: int
    """Index of the operation that begins to use it. One block can have several buffers of a kind
    in a step, and even two at the same time in staging, so the block alone is not unique."""


BufferLifetime = Lifetime[BufferKey]


def weight_lifetimes(schedule: Schedule, placement: Placement) -> list[BufferLifetime]:
    """List the buffers of streamed weights in HBM: each lives from fetch to drop."""
    fetched_at: dict[int, int] = {}
    lifetimes = []
    for at, operation in enumerate(schedule.operations):
        if operation.roles != (Role.WEIGHT,) or operation.block in schedule.held:
            continue
        if operation.verb is Verb.FETCH:
            # A weight that is fetched in pieces has one buffer, which the first piece begins.
            fetched_at.setdefault(operation.block, at)
        elif operation.verb is Verb.DROP:
            home = placement.blocks[operation.block].streamed
            assert home is not None
            key = BufferKey(BufferKind.WEIGHT, operation.block, fetched_at.pop(operation.block))
            # A rank stores its shard and computes with those of all ranks.
            lifetimes.append(_lifetime(key, schedule.ranks * home.nbytes, last=at))
    return lifetimes


class SumPart(NamedTuple):
    """An operation that adds to the gradient sum of a block."""

    at: int
    """Index of the operation."""

    block: int
    """The block whose gradient it adds to."""

    start: int
    """Index of the operation that began the sum, or brought it to HBM."""

    computed_at: int
    """Index of the computation that produced the gradients; `at` itself with one rank."""

    completes: bool
    """Whether the sum is complete, for this round."""


def gradient_sums(inventory: Inventory, schedule: Schedule) -> Iterator[SumPart]:
    """Yield what adds to gradients: computations or, with several ranks, the exchanges after them.

    The sum of a tied embedding begins with the head's part and ends with the embedding's own.
    """
    started_at: dict[int, int] = {}
    computed_at = 0
    adding = (Verb.LOSS, Verb.BACKWARD) if schedule.ranks == 1 else (Verb.EXCHANGE,)
    for at, operation in enumerate(schedule.operations):
        verb, block = operation.verb, operation.block
        if verb is Verb.FETCH and operation.roles == (Role.GRADIENT,):
            started_at.setdefault(block, at)
        if verb in (Verb.LOSS, Verb.BACKWARD):
            computed_at = at
        if verb in adding:
            tied = schedule.operations[computed_at].verb is Verb.LOSS and inventory.tied
            for each in (0, block) if tied else (block,):
                if inventory.blocks[each].shard_elements(True):
                    start = started_at.setdefault(each, at)
                    yield SumPart(at, each, start, computed_at, completes=each == block)
            started_at.pop(block, None)


def gradient_lifetimes(
    inventory: Inventory, schedule: Schedule, placement: Placement, formats: Formats
) -> list[BufferLifetime]:
    """List the gradient buffers in HBM: fp32 sums, and gradients on their way out.

    A block's gradients are summed in fp32 while its backward runs, then rounded to the stored
    format and offloaded. If the stored format is fp32 (several rounds, or accumulation over
    calls), the sum itself is offloaded, and fetched again for the next round to add to. The sum
    of a tied embedding lives from the head's backward to the embedding's own.

    With several ranks, these are of the rank's own shard, and there are two buffers more: the
    gradient of one micro-batch on its way to the ranks, and what arrives from them.
    """
    elements = [block.shard_elements(True) for block in inventory.blocks]
    leaving_since: dict[int, int] = {}
    sums: dict[int, list[SumPart]] = defaultdict(list)
    for part in gradient_sums(inventory, schedule):
        sums[part.at].append(part)
    # With an fp32 gradient one buffer is the sum and also what leaves.
    in_place = formats.wide_gradient
    sent: dict[int, list[tuple[BufferKey, int]]] = defaultdict(list)
    lifetimes: list[BufferLifetime] = []
    for at, operation in enumerate(schedule.operations):
        for part in sums.get(at, ()):
            if part.block in schedule.held:
                continue
            if schedule.ranks > 1:
                nbytes = exchanged_nbytes(inventory, schedule.operations, formats, part)
                nbytes = round_up(nbytes, EXTENT)
                received = BufferKey(BufferKind.RECEIVED, part.block, at)
                lifetimes.append(_lifetime(received, nbytes, last=at))
                key = BufferKey(BufferKind.SENT, part.block, part.computed_at)
                sent[operation.block].append((key, nbytes))
            if part.completes and not in_place:
                nbytes = round_up(4 * elements[part.block], EXTENT)
                key = BufferKey(BufferKind.GRADIENT_SUM, part.block, part.start)
                lifetimes.append(_lifetime(key, nbytes, last=at))
            if part.completes:
                leaving_since[part.block] = part.start if in_place else at
        if operation.verb is Verb.DROP and not operation.roles:
            buffers = sent.pop(operation.block)
            lifetimes += [_lifetime(key, nbytes, last=at) for key, nbytes in buffers]
        elif operation.verb is Verb.DROP and operation.roles == (Role.GRADIENT,):
            block = operation.block
            nbytes = formats.at_rest(Role.GRADIENT, elements[block])
            key = BufferKey(BufferKind.GRADIENT, block, leaving_since.pop(block))
            lifetimes.append(_lifetime(key, nbytes, last=at))
    return lifetimes


def exchanged_nbytes(
    inventory: Inventory, operations: Sequence[Operation], formats: Formats, part: SumPart
) -> int:
    """Return the bytes of a block's gradient of one micro-batch, as ranks exchange it."""
    width = 4 if is_chunked(operations, part) else formats.weight_format.weight
    return width * inventory.blocks[part.block].flat_elements(True)


def is_chunked(operations: Sequence[Operation], part: SumPart) -> bool:
    """Return whether a micro-batch's gradient is a sum over the chunks of the loss, in fp32.

    All other gradients have the type of the weights: autograd returns them.
    """
    return operations[part.computed_at].verb is Verb.LOSS


def staging_lifetimes(
    inventory: Inventory, schedule: Schedule, placement: Placement, formats: Formats
) -> list[BufferLifetime]:
    """List the host staging buffers: each lives from a read off NVMe to its release."""
    # A queue, because a block may be read again before its first read is released.
    reads: dict[tuple[int, int | None, tuple[Role, ...]], deque[int]] = defaultdict(deque)
    lifetimes = []
    for at, operation in enumerate(schedule.operations):
        piece = (operation.block, operation.piece, operation.roles)
        if operation.verb is Verb.READ:
            reads[piece].append(at)
        elif operation.verb is Verb.RELEASE:
            nbytes = staged_nbytes(inventory, operation, placement, formats)
            key = BufferKey(BufferKind.STAGING, operation.block, reads[piece].popleft())
            lifetimes.append(_lifetime(key, nbytes, last=at))
    return lifetimes


def staged_nbytes(
    inventory: Inventory, operation: Operation, placement: Placement, formats: Formats
) -> int:
    """Return the bytes of host staging that an operation on a piece uses."""
    block = inventory.blocks[operation.block]
    start, stop, _ = operation_span(block, operation, placement)
    return sum(
        formats.at_rest(role, block.role_elements(role, start, stop)) for role in operation.roles
    )


def state_lifetimes(
    inventory: Inventory, schedule: Schedule, placement: Placement, formats: Formats
) -> list[BufferLifetime]:
    """List the buffers of states in HBM that the GPU sweeps: each lives from fetch to drop.

    All have the size of the largest piece. So every schedule packs them without gaps, and none
    needs more of them than a training step does.
    """
    fetches: dict[tuple[int, int | None], int] = {}
    spans: list[tuple[BufferKey, int]] = []
    nbytes = 0
    for at, operation in enumerate(schedule.operations):
        piece = (operation.block, operation.piece)
        if operation.verb is Verb.FETCH and operation.gpu:
            fetches[piece] = at
            nbytes = max(nbytes, staged_nbytes(inventory, operation, placement, formats))
        elif operation.verb is Verb.DROP and operation.gpu:
            spans.append((BufferKey(BufferKind.STATES, operation.block, fetches.pop(piece)), at))
    return [_lifetime(key, nbytes, last=last) for key, last in spans]


def operation_span(
    block: Block, operation: Operation, placement: Placement
) -> tuple[int, int, bool]:
    """Return `piece_span` of an operation's piece, in host staging or on its way to the GPU."""
    assert operation.piece is not None
    if operation.gpu:
        return (*block.pieces(placement.gpu_piece_elements)[operation.piece], True)
    return piece_span(block, operation.piece, placement)


def piece_span(block: Block, piece: int, placement: Placement) -> tuple[int, int, bool]:
    """Return a piece's first element, the one past its last, and whether it is trainable.

    Trainable and frozen tensors have separate flat buffers; the elements count within one of them.
    Pieces of the trainable buffer are numbered first.
    """
    trained = block.pieces(placement.piece_elements)
    if piece < len(trained):
        return (*trained[piece], True)
    frozen = block.pieces(placement.piece_elements, trainable=False)
    return (*frozen[piece - len(trained)], False)


def _lifetime(key: BufferKey, nbytes: int, *, last: int) -> BufferLifetime:
    """Return the lifetime of a buffer that operation `last` still needs."""
    return Lifetime(key=key, nbytes=nbytes, start=key.start, end=last + 1)
