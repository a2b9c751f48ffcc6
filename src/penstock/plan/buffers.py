"""What a step needs beside what rests: buffers, working memory, the driver's share. Room: decide.

Taken once, before step 1, and held for the run. The constants are measurements; their source is
`bench/results/block_memory_h200_2026-11-15.json` (one layer, forward and backward, two sizes; the
fit is exact for both) and docs/planner.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import PlanError
from penstock.model.inventory import Block, Inventory
from penstock.plan.build_schedule import step_schedule
from penstock.plan.lifetimes import (
    BufferLifetime,
    gradient_lifetimes,
    staging_lifetimes,
    weight_lifetimes,
)
from penstock.plan.packing import pack
from penstock.plan.placement import Placement
from penstock.plan.schedule import Schedule
from penstock.plan.workload import Workload
from penstock.roles import EXTENT, Formats, Role
from penstock.tiers import Tier
from penstock.units import KiB, MiB, round_up

CUDA_CONTEXT = 704 * MiB
"""Context, cuBLAS, cuDNN and their kernels: 693 MiB seen by the driver after first use."""

CONTEXT = "CUDA context"
"""How its pool is called."""

SLACK = 0.20
"""Of working memory, for the caching allocator's gaps. A prototype that left everything to the
allocator reserved 19 to 39 % more than it used; fixed buffers, which are most of it, have none."""

GRAINS = 3 * (20 + 2) * MiB
"""What a GPU's caching allocator may take beyond that, however small the model: 20 MiB at a time,
and 2 for what is small, for each stream by itself; those of fixed buffers, computing and copies."""

LIBRARIES = (2 * 32 + 64) * MiB
"""What libraries take from torch's allocator: a cuBLAS workspace for the thread that computes and
one for the thread that goes backward, 32 MiB each from Hopper on; and a buffer as large as the L2
cache, over which the compiler times the kernels that it chooses from."""

PIPE_HALF = 16 * MiB
"""Of a pipe between device and NVMe, for inputs or gradients: while one half is copied, the other
is written or read."""

PIPE_UNIT = 64 * KiB
"""What halves are multiples of: a store's unit."""

# Elements alive at once per token besides the layer's input, as multiples of the hidden width, of
# the width inside the MLP, and of queries, keys and values together.
FORWARD_HIDDEN, FORWARD_MLP = 2, 3
BACKWARD_HIDDEN, BACKWARD_MLP, BACKWARD_ATTENTION = 9, 6, 1

LOGIT_NBYTES = {"torch": 12, "fused": 2}
"""One logit in its chunk: 16 bit, fp32, and the gradient of both; or all in one place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Memory of one tier that is taken for the run, and what for."""

    tier: Tier
    """Where."""

    what: str
    """What for."""

    nbytes: int
    """How much."""

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise PlanError("nbytes", f"must be 0 or more, got {self.nbytes}")


def pools(
    inventory: Inventory,
    workload: Workload,
    placement: Placement,
    schedule: Schedule,
    *,
    context_nbytes: int = CUDA_CONTEXT,
) -> tuple[Pool, ...]:
    """Everything that is not at rest, in the order the table shows it."""
    formats = workload.formats(placement.rounds)
    working = working_nbytes(inventory, workload)
    schedules = [schedule]
    if workload.accumulate:
        schedules.append(step_schedule(inventory, placement, pending=False, adds=True))
    weights = _packed(weight_lifetimes(schedule, placement))
    gradients = max(
        _packed(gradient_lifetimes(inventory, each, placement, formats)) for each in schedules
    )
    staging = _packed(staging_lifetimes(inventory, schedule, placement, formats))
    on_gpu = context_nbytes > 0
    hbm = {
        CONTEXT: context_nbytes,
        "weight slots": weights,
        "gradient buffers": gradients,
        "hidden states in flight": hidden_nbytes(inventory, workload, placement.rounds),
        "working memory": working,
        "library buffers": LIBRARIES if on_gpu else 0,
        "allocator slack": round_up(int(SLACK * working), EXTENT) + (GRAINS if on_gpu else 0),
    }
    pipes = pipe_lanes(workload, placement)
    dram = {
        "NVMe staging": staging,
        "NVMe pipes": len(pipes) * pipe_nbytes(inventory, workload, placement),
    }
    made = [Pool(tier=Tier.HBM, what=k, nbytes=v) for k, v in hbm.items()]
    made += [Pool(tier=Tier.DRAM, what=k, nbytes=v) for k, v in dram.items()]
    return tuple(pool for pool in made if pool.nbytes)


def round_micro_batches(workload: Workload, rounds: int) -> int:
    """Micro-batches of the largest round."""
    return -(-workload.micro_batches // rounds)


def micro_nbytes(inventory: Inventory, workload: Workload) -> int:
    """One block's input, for one micro-batch."""
    tokens = workload.numerics.micro_batch * workload.context
    return round_up(tokens * inventory.hidden * 2, EXTENT)


def input_nbytes(inventory: Inventory, workload: Workload, rounds: int) -> int:
    """One block's input, for all micro-batches of a round."""
    return round_micro_batches(workload, rounds) * micro_nbytes(inventory, workload)


def hidden_nbytes(inventory: Inventory, workload: Workload, rounds: int) -> int:
    """What passes from block to block for a whole round, two micro-batches on their way out or in,
    and the token ids and labels."""
    passing = round_micro_batches(workload, rounds) + 2
    tokens = round_up(16 * workload.tokens, EXTENT)
    return passing * micro_nbytes(inventory, workload) + tokens


def working_nbytes(inventory: Inventory, workload: Workload) -> int:
    """The most that computing one micro-batch of any block takes."""
    numerics = workload.numerics
    tokens = numerics.micro_batch * workload.context
    tile = min(tokens, numerics.mlp_tile)
    layers = max(_layer_nbytes(block, inventory.hidden, tokens, tile) for block in inventory.layers)
    chunk = min(tokens, numerics.loss_chunk)
    logit = LOGIT_NBYTES[numerics.loss_kernel]
    head = chunk * (inventory.vocabulary * logit + 4 * inventory.hidden)
    tables = inventory.vocabulary * inventory.hidden
    return round_up(max(layers + 2 * _largest(inventory.layers), head + 2 * tables), EXTENT)


def _largest(blocks: Iterable[Block]) -> int:
    """Elements of the largest block: its gradients of one micro-batch, until they are added up."""
    return max((block.parameters(True) for block in blocks), default=0)


def _layer_nbytes(block: Block, hidden: int, tokens: int, tile: int) -> int:
    attention = block.query_width + block.key_value_width
    forward = FORWARD_HIDDEN * hidden * tokens + FORWARD_MLP * block.mlp_width * tile
    backward = (BACKWARD_HIDDEN * hidden + BACKWARD_ATTENTION * attention) * tokens
    backward += BACKWARD_MLP * block.mlp_width * tile
    return 2 * max(forward, backward)


def _packed(lifetimes: list[BufferLifetime]) -> int:
    """Not mended: the search asks for thousands of these."""
    return pack(lifetimes, refinements=0).nbytes


def pipe_lanes(workload: Workload, placement: Placement) -> tuple[str, ...]:
    """Lanes that have a pipe of their own between device and NVMe."""
    inputs, gradients = (
        any(block.touches(role, Tier.NVME) for block in placement.blocks)
        for role in (Role.INPUT, Role.GRADIENT)
    )
    lanes: tuple[str, ...] = ("drain inputs", "fetch inputs") if inputs else ()
    if gradients:
        wide = workload.formats(placement.rounds).wide_gradient
        lanes += ("drain", "fetch") if wide else ("drain",)
    return lanes


def pipe_nbytes(inventory: Inventory, workload: Workload, placement: Placement) -> int:
    """Both halves: no larger than what passes through them, nor than pieces are."""
    gradient = max(4 * block.flat_elements(True) for block in inventory.blocks)
    largest = max(micro_nbytes(inventory, workload), gradient)
    half = min(PIPE_HALF, largest, 2 * placement.piece_elements)
    return 2 * round_up(half, PIPE_UNIT)


def role_nbytes(block: Block, role: Role, formats: Formats, step: int) -> int:
    """What a role of a block takes at rest: each piece whole pages, as a disk needs it."""
    spans = block.pieces(step)
    if role is Role.WEIGHT:
        spans += block.pieces(step, trainable=False)
    return sum(formats.at_rest(role, stop - start) for start, stop in spans)
