"""Size the memory that a step needs in addition to what is stored: buffers and working memory.

All of it is allocated once, before the first step, and held for the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from penstock.errors import PlanError
from penstock.model.attention_sizes import attention_result_nbytes
from penstock.model.inventory import Block, Inventory
from penstock.packed_weights import scratch_nbytes
from penstock.plan.build_schedule import (
    backward_schedule,
    fetch_held_schedule,
    forward_schedule,
    held_blocks,
    step_schedule,
)
from penstock.plan.cuda_allocator import PAGE, SMALL_PAGE
from penstock.plan.lifetimes import (
    BufferLifetime,
    gradient_lifetimes,
    staging_lifetimes,
    state_lifetimes,
    weight_lifetimes,
)
from penstock.plan.packing import pack
from penstock.plan.placement import Placement
from penstock.plan.schedule import Schedule
from penstock.plan.update_workspace import PRODUCTS, WORKSPACE, UpdateWorkspace
from penstock.plan.working_memory import WorkingMemory
from penstock.plan.workload import Workload
from penstock.roles import EXTENT, Formats, Role
from penstock.tiers import Tier
from penstock.units import KiB, MiB, round_up

T = TypeVar("T")

CUDA_CONTEXT = 784 * MiB
"""Bytes of the CUDA context, cuBLAS and their kernels, until a rehearsal has measured them. With
CUDA 13 on an H200, rehearsals of 12 models measured 780 to 782 MiB."""

CONTEXT = "CUDA context"
"""Name of the pool that stands for the CUDA context."""

ALLOCATOR_PAGES = 3 * (PAGE + SMALL_PAGE)
"""Bytes that PyTorch's allocator may reserve beyond the tensors and the gaps between them, however
small the model. Each of these is less than a large and a small page:
- the end of the stream that allocates the fixed buffers, which are never freed and have no gaps;
- what the allocator demands to be free in the compute stream. It compares a whole request with its
  limit, although part of the request may fit in pages that are mapped already;
- the pages by which it may exceed its limit, because it compares a request before it rounds it up
  to pages (`Plan.allocator_nbytes` leaves these out)."""

SAVED = "saved activations"
"""Name of the pool for what kept forward passes save for backward. PyTorch allocates it as it
computes."""

PIPE_HALF = 16 * MiB
"""Maximum size of one half of a pipe between the device and NVMe. While one half is copied, the
other is written or read."""

PIPE_UNIT = 64 * KiB
"""Halves of a pipe are multiples of this: the unit of a store."""


STATES = "states in flight"
"""Name of the pool for states in host memory that the GPU sweeps."""

ATTENTION_SLOT = "attention results in flight"
"""Name of the pool for results of attention that are stored outside HBM, on their way out or
in."""

NCCL = "NCCL buffers"
"""Name of the pool that stands for NCCL's own memory, which is outside torch's allocator."""

NCCL_NBYTES = 512 * MiB
"""Bytes of HBM that NCCL's communicator of one group is assumed to need. Not measured."""

MAILBOXES = "rank mailboxes"
"""Name of the pool of shared host memory through which a rank passes gradients to the others of its
machine (`penstock.distributed.shared_ranks`)."""

MAILBOX = 64 * MiB
"""Maximum size of that pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPool:
    """Memory of one tier that is allocated once and held for the run."""

    tier: Tier
    """The tier."""

    what: str
    """What the memory is used for."""

    nbytes: int
    """Size in bytes."""

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise PlanError("nbytes", f"must be 0 or more, got {self.nbytes}")


def plan_pools(
    inventory: Inventory,
    workload: Workload,
    placement: Placement,
    schedule: Schedule,
    memory: WorkingMemory,
    *,
    context_nbytes: int = CUDA_CONTEXT,
) -> tuple[BufferPool, ...]:
    """List all pools that a step needs, in the order in which `penstock plan` shows them.

    `memory` is the model's working memory with this workload. `context_nbytes` is the size of the
    CUDA context, or 0 on a machine without a GPU.
    """
    inventory = workload.stored(inventory)
    formats = workload.formats(placement.rounds)
    schedules, staged = _sizing_schedules(inventory, workload, placement, schedule)
    weights = max(_packed_nbytes(weight_lifetimes(each, placement)) for each in schedules)
    gradients = max(
        _packed_nbytes(gradient_lifetimes(inventory, each, placement, formats))
        for each in schedules
    )
    staging = max(
        _packed_nbytes(staging_lifetimes(inventory, each, placement, formats)) for each in staged
    )
    states = max(
        _packed_nbytes(state_lifetimes(inventory, each, placement, formats)) for each in staged
    )
    measured = memory_pools(workload, placement, memory, context_nbytes=context_nbytes)
    collective = placement.transport == "collective" and context_nbytes > 0
    hbm = {
        CONTEXT: measured.pop(CONTEXT),
        NCCL: NCCL_NBYTES if collective else 0,
        "weight slots": weights,
        "dequantized weights": sum(dequantized_nbytes(inventory, formats)),
        "gradient buffers": gradients,
        STATES: states_nbytes(states, on_gpu=context_nbytes > 0),
        "hidden states in flight": hidden_nbytes(inventory, workload, placement.rounds),
        ATTENTION_SLOT: attention_slot_nbytes(inventory, workload, placement),
        **_caller_loss_pools(inventory, workload, placement),
        WORKSPACE: _workspace_nbytes(inventory, workload, on_gpu=context_nbytes > 0),
        **measured,
    }
    pipes = pipe_lanes(workload, placement)
    dram = {
        "NVMe staging": staging,
        "NVMe pipes": len(pipes) * pipe_nbytes(inventory, workload, placement),
        MAILBOXES: mailboxes_nbytes(inventory, workload, placement),
    }
    pools = [BufferPool(tier=Tier.HBM, what=k, nbytes=v) for k, v in hbm.items()]
    pools += [BufferPool(tier=Tier.DRAM, what=k, nbytes=v) for k, v in dram.items()]
    return tuple(pool for pool in pools if pool.nbytes)


def states_nbytes(packed: int, *, on_gpu: bool) -> int:
    """Return the size of the pool for states that the GPU sweeps, from that of their buffers.

    The stream of these sweeps has a page of its own for what the kernels report.
    """
    return packed + SMALL_PAGE if packed and on_gpu else packed


def _sizing_schedules(
    inventory: Inventory, workload: Workload, placement: Placement, schedule: Schedule
) -> tuple[list[Schedule], list[Schedule]]:
    """Return the schedules that need the most buffers, and those that need the most staging."""
    if workload.caller_loss is not None:
        forward = forward_schedule(inventory, placement)
        backward = [backward_schedule(inventory, placement, adds=adds) for adds in (False, True)]
        held = fetch_held_schedule(inventory, placement, pending=True)
        return [forward, *backward], [forward, held]
    sizing = [schedule]
    if any(block.late_moments for block in placement.blocks):
        # A step with nothing to sweep has the same buffers. But its backward pass has fewer
        # operations, so their lifetimes are shorter, and may pack into more bytes.
        sizing.append(step_schedule(inventory, placement, pending=False))
    if workload.accumulate:
        sizing.append(step_schedule(inventory, placement, pending=False, adds=True))
    return sizing, [schedule]


def _workspace_nbytes(inventory: Inventory, workload: Workload, *, on_gpu: bool) -> int:
    """Return the bytes for updates of whole tensors; 0 if the optimizer needs none."""
    sizes = UpdateWorkspace.of(inventory, workload)
    if sizes is None:
        return 0
    products = PRODUCTS if on_gpu and sizes.matrix else 0
    return round_up(sizes.nbytes + sizes.temporaries + products, EXTENT)


def _caller_loss_pools(
    inventory: Inventory, workload: Workload, placement: Placement
) -> dict[str, int]:
    """Return the pools in HBM for a loss that the caller computes, by name."""
    if workload.caller_loss is None:
        return {}
    held = held_blocks(inventory)
    return {
        "head weights": sum(held_weight_nbytes(placement, block) for block in held),
        "head gradients": sum(held_sum_nbytes(inventory, placement, block) for block in held),
        "your loss": workload.caller_loss.nbytes,
        "your modules": workload.caller_loss.resident,
    }


def dequantized_nbytes(inventory: Inventory, formats: Formats) -> tuple[int, int]:
    """Return the bytes of the dequantized weights of a block, and of scratch memory for them.

    One block computes at a time, so there is memory for those of the largest one.
    """
    elements = max(block.dequantized_elements for block in inventory.blocks)
    largest = max((t.elements for b in inventory.blocks for t in b.quantized), default=0)
    scratch = scratch_nbytes(largest) if largest else 0
    return formats.at_rest(Role.WEIGHT, elements), round_up(scratch, EXTENT)


def held_weight_nbytes(placement: Placement, block: int) -> int:
    """Return the bytes of a held block's weights in HBM; 0 if they are stored there anyway."""
    at = placement.blocks[block]
    assert at.streamed is not None
    return 0 if at.all_on(Role.WEIGHT, Tier.HBM) and not at.is_split else at.streamed.nbytes


def held_sum_nbytes(inventory: Inventory, placement: Placement, block: int) -> int:
    """Return the bytes of a held block's gradient sum in HBM; 0 if it is stored there anyway."""
    stored_there = placement.blocks[block].all_on(Role.GRADIENT, Tier.HBM)
    elements = inventory.blocks[block].flat_elements(True)
    return 0 if stored_there else round_up(4 * elements, EXTENT)


def memory_pools(
    workload: Workload, placement: Placement, memory: WorkingMemory, *, context_nbytes: int
) -> dict[str, int]:
    """Return the pools in HBM that follow from working memory, by name."""
    on_gpu = context_nbytes > 0
    return {
        CONTEXT: context_nbytes,
        "batch and layer arguments": arguments_nbytes(workload, placement.rounds, memory),
        "working memory": memory.peak,
        SAVED: saved_nbytes(workload, placement, memory),
        "library buffers": memory.libraries if on_gpu else 0,
        "allocator slack": memory.gaps + ALLOCATOR_PAGES if on_gpu else 0,
    }


def saved_nbytes(workload: Workload, placement: Placement, memory: WorkingMemory) -> int:
    """Return the bytes of HBM for what kept forward passes save, in addition to working memory.

    Working memory is for the part that needs the most. Saved tensors may take what is left of it
    while other parts are computed. So the last layers need the least: their tensors are gone before
    the other layers are recomputed.
    """
    each = micro_batches_per_round(workload, placement.rounds)
    kept = [min(block.kept, each) for block in placement.blocks[1:-1]]
    if not any(kept):
        return 0
    saved = memory.saved
    if saved is None:
        raise PlanError("kept", "needs working memory that says what a forward pass saves")
    forward, backward = (
        max(getattr(part, name) for part in memory.layers) for name in ("forward", "backward")
    )
    live = peak = 0
    for count in kept:
        # The figures of a part contain what its own micro-batch saves.
        live += count * saved
        peak = max(peak, live + forward - (saved if count == each else 0))
    peak = max(peak, live + memory.parts[-1].backward)
    for count in reversed(kept):
        if count:
            peak = max(peak, live - saved + backward)
        live -= count * saved
        if count < each:
            peak = max(peak, live + backward)
    return round_up(max(0, peak - memory.peak), EXTENT)


class PlannedRoom(NamedTuple):
    """The room that a plan has for what a part of the model allocates."""

    working: int
    """Bytes for tensors."""
    gaps: int
    """Bytes for the gaps between them."""


def planned_room(pools: Iterable[BufferPool]) -> PlannedRoom:
    """Return the room for working memory in a plan's pools."""
    sizes = {pool.what: pool.nbytes for pool in pools}
    slack = sizes.get("allocator slack", 0)
    return PlannedRoom(sizes.get("working memory", 0), max(0, slack - ALLOCATOR_PAGES))


# Activations.


def deal_micro_batches(
    micros: Sequence[T], workload: Workload, rounds: int, rank: int = 0
) -> list[Sequence[T]]:
    """Return the micro-batches that a rank computes, by round.

    Every round is as large as that of a full batch until no micro-batches are left, and deals its
    own to the ranks in turn. Rank 0 gets the most.
    """
    each = -(-workload.micro_batches // rounds)
    world = workload.world
    return [micros[r * each : (r + 1) * each][rank::world] for r in range(rounds)]


def micro_batches_by_round(workload: Workload, rounds: int) -> list[int]:
    """Return how many micro-batches of a full batch rank 0 computes in each round."""
    dealt = deal_micro_batches(range(workload.micro_batches), workload, rounds)
    return [len(micros) for micros in dealt]


def micro_batches_per_round(workload: Workload, rounds: int) -> int:
    """Return the number of micro-batches of the largest round, on the rank that has the most."""
    return micro_batches_by_round(workload, rounds)[0]


def micro_nbytes(inventory: Inventory, workload: Workload) -> int:
    """Return the bytes of one block's activation for one micro-batch."""
    tokens = workload.numerics.micro_batch * workload.context
    return workload.formats().at_rest(Role.ACTIVATION, tokens * inventory.hidden)


def activation_nbytes(inventory: Inventory, workload: Workload, rounds: int) -> int:
    """Return the bytes of one block's activations for all micro-batches that it is kept for.

    They are those of a round, and those of every forward pass that may await its backward pass.
    """
    return activation_slots(workload, rounds) * micro_nbytes(inventory, workload)


def activation_slots(workload: Workload, rounds: int) -> int:
    """Return the number of micro-batches for which a block's activation has memory."""
    return workload.live_forwards * micro_batches_per_round(workload, rounds)


def attention_micro_nbytes(block: Block, workload: Workload) -> int:
    """Return the bytes of what a layer's attention returns for one full micro-batch."""
    nbytes = attention_result_nbytes(
        tokens=workload.numerics.micro_batch * workload.context,
        query_width=block.query_width,
        heads=block.heads,
        element=workload.formats().weight_format.weight,
    )
    return round_up(nbytes, EXTENT)


def attention_slot_nbytes(inventory: Inventory, workload: Workload, placement: Placement) -> int:
    """Return the bytes of HBM through which results of attention leave and return.

    There is one slot for all layers. Results are copied to it and from it early in a layer, and are
    offloaded or fetched during the rest of the layer.
    """
    return max(
        (
            attention_micro_nbytes(block, workload)
            for block, at in zip(inventory.blocks, placement.blocks, strict=True)
            if at.attention and not at.all_on(Role.ATTENTION, Tier.HBM)
        ),
        default=0,
    )


def hidden_nbytes(inventory: Inventory, workload: Workload, rounds: int) -> int:
    """Return the bytes of hidden states in HBM.

    The hidden states of a whole round pass from block to block, and two micro-batches more are on
    their way out or in.
    """
    passing = micro_batches_per_round(workload, rounds) + 2
    return passing * micro_nbytes(inventory, workload)


def arguments_nbytes(workload: Workload, rounds: int, memory: WorkingMemory) -> int:
    """Return the bytes of the batch on the device, and of what layers are called with.

    All micro-batches of the rank are copied to the device before the step. The arguments of layers
    exist for the micro-batches of one round.
    """
    by_round, live = micro_batches_by_round(workload, rounds), workload.live_forwards
    nbytes = sum(by_round) * memory.inputs + by_round[0] * memory.arguments
    return round_up(live * nbytes, EXTENT)


def _packed_nbytes(lifetimes: list[BufferLifetime]) -> int:
    # Without refinements, because the search packs thousands of candidates. The engine must pack
    # with the same effort (engine/program.py), or its pools could be larger than planned.
    return pack(lifetimes, refinements=0).nbytes


# Pipes between the device and NVMe, for activations and gradients.


def pipe_lanes(workload: Workload, placement: Placement) -> tuple[str, ...]:
    """Return the lanes that need a pipe of their own between the device and NVMe."""
    activations, gradients = (
        any(block.touches(role, Tier.NVME) for block in placement.blocks)
        for role in (Role.ACTIVATION, Role.GRADIENT)
    )
    lanes: tuple[str, ...] = ("drain inputs", "fetch inputs") if activations else ()
    if gradients:
        accumulates = workload.formats(placement.rounds).accumulates
        lanes += ("drain", "fetch") if accumulates else ("drain",)
    return lanes


def pipe_nbytes(inventory: Inventory, workload: Workload, placement: Placement) -> int:
    """Return the bytes of both halves of a pipe.

    A half is no larger than what passes through it, and no larger than a piece.
    """
    gradient = max(4 * block.shard_elements(True) for block in inventory.blocks)
    largest = max(micro_nbytes(inventory, workload), gradient)
    piece = workload.formats().nbytes(Role.WEIGHT, placement.piece_elements)
    half = min(PIPE_HALF, largest, piece)
    return 2 * round_up(half, PIPE_UNIT)


def mailboxes_nbytes(inventory: Inventory, workload: Workload, placement: Placement) -> int:
    """Return the bytes of shared host memory through which a rank passes gradients to the others.

    They are no more than the largest gradient needs, but enough for a few pages of each rank.
    """
    if placement.transport != "shared":
        return 0
    largest = max(4 * block.flat_elements(True) for block in inventory.blocks)
    return max(workload.world * PIPE_UNIT, min(MAILBOX, round_up(largest, PIPE_UNIT)))


def role_nbytes(
    block: Block,
    role: Role,
    formats: Formats,
    step: int,
    *,
    in_hbm: bool = False,
    split: bool = False,
) -> int:
    """Return the bytes of a role of a block at rest on a rank, in pieces of `step` elements.

    Each piece occupies whole pages, because a disk requires it. A rank stores its own shard, except
    that weights in HBM are whole on every rank: each of them computes with all of them. Weights are
    both trained and frozen, unless the block is `split` and the frozen ones have another home.
    """
    spans = block.pieces(step, trainable=role is not Role.FROZEN)
    if role is Role.WEIGHT and not split:
        spans += block.pieces(step, trainable=False)
    nbytes = sum(formats.at_rest(role, block.role_elements(role, *span)) for span in spans)
    return block.shards * nbytes if role is Role.WEIGHT and in_hbm else nbytes
