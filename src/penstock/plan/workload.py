"""What is to be done, and everything that can change a bit of its result. Room: decide.

Numerics follow from the model, the context and what the user asks for by name; never from budgets
or timings. They are stored in checkpoints and kept by a resume. Where bytes rest is the plan's
matter, and no plan can change a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.errors import WorkloadError
from penstock.model.inventory import Inventory
from penstock.roles import Dtype, Formats, Moments
from penstock.units import MiB

Attention = Literal["sdpa", "varlen", "eager"]
LossKernel = Literal["torch", "fused"]

MICRO_BATCH_TOKENS = 16384
"""Enough tokens to keep a large GPU busy: a layer reaches its full rate here (docs/planner.md)."""

LOGITS_NBYTES = 512 * MiB
"""The most that one chunk of logits may take in fp32."""

MLP_TILE_NBYTES = 512 * MiB
"""The most that one tensor inside the MLP may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """Whatever can change a bit of the result."""

    micro_batch: int
    """Sequences computed at once. Gradients of micro-batches sum in fp32, in their order."""

    loss_chunk: int
    """Tokens whose logits exist at once."""

    mlp_tile: int
    """Tokens that pass the MLP at once."""

    attention: Attention = "sdpa"
    """The attention kernel. With `varlen`, packed rows pass through one variable-length call and
    rows that are one document each through torch's own; with `sdpa`, each document through the
    latter."""

    loss_kernel: LossKernel = "torch"
    """Whether a chunk's loss and its gradient are torch's own operations or one kernel."""

    compiled: bool = False
    """Whether the block's body is compiled."""

    deterministic: bool = False
    """Whether kernels that may differ from run to run are ruled out."""

    master_rounding: Literal["ties_away"] = "ties_away"
    """How the fp32 master is cut in two; see DESIGN, "Few bytes"."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "loss_chunk", "mlp_tile"):
            if getattr(self, name) < 1:
                raise WorkloadError(name, f"must be 1 or more, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One optimizer step, as the user asks for it."""

    context: int
    """Tokens in a sequence."""

    batch: int
    """Sequences per optimizer step."""

    dtype: Dtype = "bf16"
    """What the GPU computes in."""

    optimizer: Literal["adamw"] = "adamw"
    """What the sweep does."""

    moments: Moments = "fp32"
    """How the moments rest: fp32 is exact."""

    clip: float | None = 1.0
    """The largest norm of the whole gradient, or none. Clipping makes every sweep wait for the
    last gradient."""

    accumulate: bool = False
    """Whether several calls may add to one step's gradients: they then rest in fp32."""

    steps: int | None = None
    """Optimizer steps of the whole run, where known: for the bytes written to disk."""

    rank: int = 0
    """Which of the processes that share the work this is."""

    world: int = 1
    """How many processes share the work."""

    numerics: Numerics
    """Whatever else can change a bit."""

    def __post_init__(self) -> None:
        for name in ("context", "batch", "world"):
            if getattr(self, name) < 1:
                raise WorkloadError(name, f"must be 1 or more, got {getattr(self, name)}")
        if self.clip is not None and not self.clip > 0:
            raise WorkloadError("clip", f"must be above 0, got {self.clip}")
        if self.steps is not None and self.steps < 1:
            raise WorkloadError("steps", f"must be 1 or more, got {self.steps}")
        if not 0 <= self.rank < self.world:
            raise WorkloadError("rank", f"must be 0 to {self.world - 1}, got {self.rank}")
        if self.numerics.micro_batch > self.batch:
            raise WorkloadError(
                "numerics.micro_batch",
                f"must be no more than batch, which is {self.batch}, "
                f"got {self.numerics.micro_batch}",
            )

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch * self.context

    @property
    def micro_batches(self) -> int:
        return -(-self.batch // self.numerics.micro_batch)

    def formats(self, rounds: int = 1) -> Formats:
        wide = rounds > 1 or self.accumulate
        return Formats(dtype=self.dtype, moments=self.moments, wide_gradient=wide)

    def check(self, inventory: Inventory) -> None:
        """Raise WorkloadError unless the model can do it."""
        limit = inventory.max_context
        if limit is not None and self.context > limit:
            raise WorkloadError(
                "context",
                f"is {self.context}, but the positions of {inventory.model} cover {limit}; "
                f"ask for less, or set max_position_embeddings (and the rope scaling that goes "
                f"with it) in the model's config",
            )
        if self.numerics.attention == "varlen" and not inventory.plain_attention:
            raise WorkloadError(
                "numerics.attention",
                f"is varlen, but that kernel has no caps on scores, no dropout, and heads of at "
                f"most 256 in steps of 8, and {inventory.model} needs more; use sdpa",
            )


def default_numerics(
    inventory: Inventory,
    *,
    context: int,
    batch: int,
    micro_batch: int | None = None,
    kernels: bool = False,
    own_loss: bool = False,
) -> Numerics:
    """What follows from the model and the context alone; `kernels` says that what computes can run
    compiled bodies and kernels of our own, as a GPU can; `own_loss`, that the loss is a function of
    the user's, which no kernel knows."""
    if context < 1:
        raise WorkloadError("context", f"must be 1 or more, got {context}")
    wanted = micro_batch if micro_batch is not None else max(1, MICRO_BATCH_TOKENS // context)
    width = max((block.mlp_width for block in inventory.blocks), default=0)
    fused = kernels and not own_loss and not inventory.caps_logits
    return Numerics(
        micro_batch=min(wanted, max(batch, 1)),
        loss_chunk=_power_of_two_below(
            LOGITS_NBYTES // ((1 if fused else 4) * inventory.vocabulary), 256, 2048
        ),
        loss_kernel="fused" if fused else "torch",
        attention="varlen" if kernels and inventory.plain_attention else "sdpa",
        compiled=kernels,
        mlp_tile=_power_of_two_below(MLP_TILE_NBYTES // (2 * max(width, 1)), 1024, 1 << 20),
    )


def _power_of_two_below(value: int, least: int, most: int) -> int:
    return max(least, min(most, 1 << max(value.bit_length() - 1, 0)))
