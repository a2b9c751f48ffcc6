"""From when to when each passing buffer is needed, read off a schedule. Room: decide.

The engine lays its buffers out by the same lists, so what is planned is what is taken. The clock
counts the schedule's operations; a name says what it is, of which block, since which operation.
"""

from __future__ import annotations

from collections import defaultdict, deque

from penstock.model.inventory import Block, Inventory
from penstock.plan.packing import Lifetime
from penstock.plan.placement import Placement
from penstock.plan.schedule import Operation, Schedule, Verb
from penstock.roles import EXTENT, Formats, Role
from penstock.units import round_up


def weight_lifetimes(schedule: Schedule, placement: Placement) -> list[Lifetime]:
    """Streamed weights in HBM: from fetch to drop."""
    since: dict[int, int] = {}
    found = []
    for at, operation in enumerate(schedule.operations):
        if operation.roles != (Role.WEIGHT,):
            continue
        if operation.verb is Verb.FETCH:
            since.setdefault(operation.block, at)
        elif operation.verb is Verb.DROP:
            home = placement.blocks[operation.block].home(Role.WEIGHT)
            assert home is not None
            start = since.pop(operation.block)
            found.append(_lifetime("weight", operation.block, home.nbytes, start, at))
    return found


def gradient_lifetimes(
    inventory: Inventory, schedule: Schedule, placement: Placement, formats: Formats
) -> list[Lifetime]:
    """Gradients in HBM: an fp32 sum while a block computes, and what is on its way out.

    With several rounds the sum rests in fp32, comes back for the next round and is added to in
    place. A tied embedding's sum lives from the head to the embedding's own backward.
    """
    elements = [block.flat_elements(True) for block in inventory.blocks]
    tied = inventory.tied
    sums: dict[int, int] = {}  # block -> where its fp32 sum began
    leaving: dict[int, int] = {}
    found = []
    for at, operation in enumerate(schedule.operations):
        block = operation.block
        if operation.verb is Verb.FETCH and operation.roles == (Role.GRADIENT,):
            sums.setdefault(block, at)
        elif operation.verb in (Verb.LOSS, Verb.BACKWARD):
            if operation.verb is Verb.LOSS and tied:
                sums.setdefault(0, at)
            start = sums.pop(block, at)
            in_place = formats.wide_gradient  # what rests, or is on its way there, is the sum
            if elements[block] and not in_place:
                nbytes = round_up(4 * elements[block], EXTENT)
                found.append(_lifetime("sum", block, nbytes, start, at))
            leaving[block] = start if in_place else at
        elif operation.verb is Verb.DROP and operation.roles == (Role.GRADIENT,):
            nbytes = formats.at_rest(Role.GRADIENT, elements[block])
            found.append(_lifetime("gradient", block, nbytes, leaving.pop(block), at))
    return found


def staging_lifetimes(
    inventory: Inventory, schedule: Schedule, placement: Placement, formats: Formats
) -> list[Lifetime]:
    """Host staging: from a read off NVMe until it is released."""
    # A block may be read again while its first reading still waits to be released.
    since: dict[tuple[int, int | None, tuple[Role, ...]], deque[int]] = defaultdict(deque)
    found = []
    for at, operation in enumerate(schedule.operations):
        key = (operation.block, operation.piece, operation.roles)
        if operation.verb is Verb.READ:
            since[key].append(at)
        elif operation.verb is Verb.RELEASE:
            nbytes = staged_nbytes(inventory, operation, placement, formats)
            start = since[key].popleft()
            found.append(_lifetime("staged", operation.block, nbytes, start, at))
    return found


def staged_nbytes(
    inventory: Inventory, operation: Operation, placement: Placement, formats: Formats
) -> int:
    """Host bytes that one read, and what is done with it, needs."""
    assert operation.piece is not None
    start, stop, _ = piece_span(inventory.blocks[operation.block], operation.piece, placement)
    return sum(formats.at_rest(role, stop - start) for role in operation.roles)


def piece_span(block: Block, piece: int, placement: Placement) -> tuple[int, int, bool]:
    """Its elements, and whether they are of the trainable buffer or of the frozen one."""
    trained = block.pieces(placement.piece_elements)
    if piece < len(trained):
        return (*trained[piece], True)
    frozen = block.pieces(placement.piece_elements, trainable=False)
    return (*frozen[piece - len(trained)], False)


def _lifetime(what: str, block: int, nbytes: int, first: int, last: int) -> Lifetime:
    """Of what is there for both operations and those between."""
    return Lifetime(name=f"{what} {block} @{first}", nbytes=nbytes, start=first, end=last + 1)
