"""The workload: what to train, and every setting that can change a bit of the result.

Numerics follow from the model, the context length and explicit user settings, never from budgets
or timings. Checkpoints store them, and a resumed run keeps them. Where bytes are stored is decided
by the plan, and no plan can change a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from penstock.errors import WorkloadError
from penstock.model.inventory import Inventory
from penstock.optimizer_options import WHOLE_TENSOR
from penstock.packed_weights import Quantization
from penstock.roles import WEIGHT_FORMATS, Dtype, Formats, Moments, OptimizerName
from penstock.units import MiB

Attention = Literal["sdpa", "varlen", "eager"]
LossKernel = Literal["torch", "fused"]
HeadSum = Literal["micro", "chunk"]
LayerForward = Literal["training", "inference"]

MICRO_BATCH_TOKENS = 16384
"""Default number of tokens per micro-batch. A layer reaches its full rate on a large GPU with this
many tokens (docs/planner.md)."""

LOGITS_NBYTES = 512 * MiB
"""Maximum size of one chunk of fp32 logits."""

MLP_TILE_NBYTES = 512 * MiB
"""Maximum size of one tensor inside the MLP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """Every setting that can change a bit of the result."""

    micro_batch: int
    """Number of sequences per micro-batch. Gradients of micro-batches are summed in fp32, in the
    order of the batch."""

    loss_chunk: int
    """Number of tokens per chunk of the loss. Only one chunk's logits exist at a time."""

    mlp_tile: int
    """Number of tokens that the MLP processes at a time."""

    attention: Attention = "sdpa"
    """The attention kernel. With `sdpa`, each document is a separate call to PyTorch's scaled
    dot-product attention. With `varlen`, one call of Penstock's kernels computes all documents of
    all rows, and repeats its bits. Workloads of earlier versions used other kernels under that
    name, whose gradients did not repeat."""

    loss_kernel: LossKernel = "torch"
    """Whether PyTorch operations (`torch`) or one Triton kernel (`fused`) compute a chunk's loss
    and its gradient."""

    head_sum: HeadSum = "chunk"
    """How the gradients of the loss's chunks become the head's gradient. With `micro`, those of one
    micro-batch are summed by themselves, and that sum is added to the step's: a micro-batch then
    adds the same bits on whichever GPU it is computed. With `chunk`, every chunk is added to the
    step's sum. New workloads use `micro` (`default_numerics`); the default here is for files that
    were written before the field existed."""

    forward: LayerForward = "inference"
    """Which code computes the forward pass of a layer in training. With `training`, it is the code
    that backward differentiates, so that a plan may keep what it saves or compute it again. With
    `inference`, it is code without gradients, which a compiler may fuse and round differently, and
    backward always recomputes. New workloads use `training` (`default_numerics`); the default here
    is for files that were written before the field existed."""

    label_smoothing: float = 0.0
    """Share of the probability that every target spreads over the whole vocabulary."""

    neftune_noise_alpha: float = 0.0
    """Strength of the noise that NEFTune adds to embeddings in training; 0 for none."""

    quantize: Quantization | None = None
    """How the frozen weights of linear layers are quantized where they are stored; None if they are
    not. Layers compute with the dequantized values, in the data type of the run."""

    compiled: bool = False
    """Whether layers are compiled."""

    deterministic: bool = False
    """Whether kernels that may differ from run to run are ruled out. New workloads rule them out
    by default (`default_numerics`); the default here is for files that do not say."""

    master_rounding: Literal["ties_away"] = "ties_away"
    """How the bf16 weight is rounded from its fp32 master weight; see "Split master weights" in
    docs/sweep.md. Other weights do not depend on it."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "loss_chunk", "mlp_tile"):
            if getattr(self, name) < 1:
                raise WorkloadError(name, f"must be 1 or more, got {getattr(self, name)}")
        if not 0 <= self.label_smoothing < 1:
            raise WorkloadError(
                "label_smoothing", f"must be at least 0 and below 1, got {self.label_smoothing}"
            )
        if not 0 <= self.neftune_noise_alpha < math.inf:
            raise WorkloadError(
                "neftune_noise_alpha", f"must be at least 0, got {self.neftune_noise_alpha}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CallerLoss:
    """What a workload needs if the caller's own code computes the head and the loss.

    The engine then runs forward and backward through the embedding and the layers as two separate
    passes, and the caller decides what happens in between (`penstock.stream`).
    """

    live_forwards: int = 1
    """Number of forward passes whose backward passes may be outstanding at the same time. Each of
    them stores its own activations."""

    nbytes: int = 0
    """Device memory in bytes for what the caller computes: the output of the last layer, logits,
    the loss and their gradients."""

    resident: int = 0
    """Device memory in bytes for modules that the caller runs, such as the tower of a multimodal
    model, and for what they pass to the layers."""

    def __post_init__(self) -> None:
        if self.live_forwards < 1:
            raise WorkloadError("live_forwards", f"must be 1 or more, got {self.live_forwards}")
        for name in ("nbytes", "resident"):
            if getattr(self, name) < 0:
                raise WorkloadError(name, f"must be 0 or more, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One optimizer step, as the user requests it."""

    context: int
    """Number of tokens per sequence."""

    batch: int
    """Number of sequences per optimizer step."""

    dtype: Dtype = "bf16"
    """Data type that the GPU computes in."""

    optimizer: OptimizerName = "adamw"
    """The optimizer."""

    momentum: bool = False
    """Whether SGD stores its momentum. Other optimizers do not depend on it."""

    moments: Moments = "fp32"
    """Storage format of the optimizer's moments. `fp32` is exact."""

    clip: float | None = 1.0
    """Maximum norm of the whole gradient, or None for no clipping. With clipping, every optimizer
    sweep waits for the last gradient."""

    accumulate: bool = False
    """Whether several calls may add to the gradients of one step. Gradients are then stored in
    fp32."""

    steps: int | None = None
    """Number of optimizer steps of the whole run, if known. Used to estimate drive wear."""

    rank: int = 0
    """Always 0: a plan is for all ranks. In files of earlier versions as well."""

    world: int = 1
    """Number of ranks, each with a GPU. They share the micro-batches of a step, and the result does
    not depend on their number."""

    caller_loss: CallerLoss | None = None
    """Set if the caller's own code computes the loss; None if the engine does. `batch` is then the
    number of sequences of one forward pass."""

    numerics: Numerics
    """Every other setting that can change a bit of the result."""

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
        self._check_optimizer()
        if self.world > 1:
            self._check_ranks()
        if self.caller_loss is not None:
            self._check_caller_loss()
        if self.numerics.micro_batch > self.batch:
            raise WorkloadError(
                "numerics.micro_batch",
                f"must not be larger than the batch of {self.batch}, "
                f"got {self.numerics.micro_batch}",
            )

    def _check_optimizer(self) -> None:
        """Raise WorkloadError if the optimizer's state cannot be stored in this way."""
        name, moments = self.optimizer, self.moments
        if self.momentum and name != "sgd":
            raise WorkloadError("momentum", f"is a property of sgd, not of {name}; leave it out")
        if moments not in self.moment_formats:
            stored = f"{name} stores its state in {' or '.join(self.moment_formats)} only"
            if name == "sgd":
                stored = "SGD without momentum stores none"
            raise WorkloadError("moments", f"is {moments}, but {stored}; leave it out")
        if self.world > 1 and name in WHOLE_TENSOR:
            raise WorkloadError(
                "world",
                f"is {self.world}, but {name} needs whole tensors, and every rank stores a part of "
                f"each; use one GPU (--gpus 1), or the optimizer adamw, lion or sgd",
            )

    def _check_ranks(self) -> None:
        """Raise WorkloadError if so many ranks cannot give the result of one."""
        if self.micro_batches < self.world:
            size = self.numerics.micro_batch
            raise WorkloadError("batch", too_few_micro_batches(self.batch, size, self.world))
        if self.numerics.head_sum == "chunk" and self._has_chunks:
            raise WorkloadError(
                "numerics.head_sum",
                'is "chunk", with which the result depends on the number of ranks; use one rank, '
                'or start a run with "micro"',
            )

    def _check_caller_loss(self) -> None:
        """Raise WorkloadError if the workload cannot be combined with a loss of the caller's."""
        if self.world > 1:
            raise WorkloadError("world", f"must be 1 if the caller computes the loss: {self.world}")
        if not self.accumulate:
            raise WorkloadError("accumulate", "must be true if the caller computes the loss")
        if self.dtype == "fp16":
            raise WorkloadError(
                "dtype",
                "is fp16, for which the engine scales the loss, but the caller computes the loss; "
                "use bf16 or fp32",
            )

    @property
    def moment_formats(self) -> tuple[Moments, ...]:
        """Storage formats of moments that the optimizer supports."""
        if self.optimizer == "adafactor" or (self.optimizer == "sgd" and not self.momentum):
            return ("fp32",)
        return ("fp32", "bf16") if self.optimizer == "muon" else ("fp32", "bf16", "int8")

    @property
    def live_forwards(self) -> int:
        """Number of forward passes whose activations are stored at the same time."""
        return 1 if self.caller_loss is None else self.caller_loss.live_forwards

    @property
    def _has_chunks(self) -> bool:
        """Whether the loss of a micro-batch is computed in several chunks."""
        return self.numerics.micro_batch * self.context > self.numerics.loss_chunk

    @property
    def tokens(self) -> int:
        """Number of tokens per optimizer step."""
        return self.batch * self.context

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per optimizer step; the last one may be smaller."""
        return -(-self.batch // self.numerics.micro_batch)

    @property
    def has_head_sum(self) -> bool:
        """Whether the head's gradient of one micro-batch needs memory next to the step's sum.

        The first micro-batch of a step begins the step's sum, and a micro-batch of one chunk is
        added to it as it is.
        """
        several = (self.micro_batches > 1 or self.accumulate) and self.caller_loss is None
        return self.numerics.head_sum == "micro" and self._has_chunks and several

    @property
    def may_keep(self) -> bool:
        """Whether a plan may keep what the forward pass of a layer saves for its backward pass.

        If the caller computes the loss, any number of calls may lie between the two passes.
        """
        return self.numerics.forward == "training" and self.caller_loss is None

    @property
    def may_save_attention(self) -> bool:
        """Whether a plan may save what attention returned in the forward pass of a layer.

        PyTorch's own attention (`sdpa`) does not tell what its backward pass needs.
        """
        return self.may_keep and self.numerics.attention == "varlen"

    def sums_apart(self, rounds: int) -> bool:
        """Whether gradients are summed in buffers of their own, and stored when they are complete.

        Otherwise a gradient that is stored in HBM is summed there, from the loss on if the
        embedding is tied. With several ranks, exchanges decide when it is written.
        """
        return self.world == 1 and not self.formats(rounds).wide_gradient

    @property
    def may_update_moments_late(self) -> bool:
        """Whether a plan may update moments in backward, after the weights.

        Only AdamW can compute moments without the weights. Ranks, and backward passes of a loss
        that the caller computes, replace gradients in other ways.
        """
        return self.optimizer == "adamw" and self.world == 1 and self.caller_loss is None

    def formats(self, rounds: int = 1) -> Formats:
        """Return the storage formats for a step of `rounds` rounds."""
        accumulates = rounds > 1 or self.accumulate
        return Formats(
            dtype=self.dtype,
            moments=self.moments,
            accumulates=accumulates,
            optimizer=self.optimizer,
            momentum=self.momentum,
        )

    def stored(self, inventory: Inventory) -> Inventory:
        """Return the inventory of the model as this workload stores it.

        Its flat buffers are shared by the ranks, second moments have those that the optimizer
        needs, and frozen weights may be quantized.
        """
        inventory = inventory.sharded(self.world).laid_out_for(self.optimizer)
        quantize = self.numerics.quantize
        if quantize is None or any(block.quantized for block in inventory.blocks):
            return inventory
        return inventory.with_quantized(quantize, WEIGHT_FORMATS[self.dtype].weight)

    def check(self, inventory: Inventory) -> None:
        """Raise WorkloadError if the model does not support this workload."""
        quantize, stored = self.numerics.quantize, self.stored(inventory)
        if quantize is not None and not any(block.quantized for block in stored.blocks):
            raise WorkloadError(
                "quantize",
                f"is {quantize}, but no linear module in the layers of {inventory.model} is "
                f"frozen, and weights that are trained cannot be quantized; train an adapter, for "
                f"example with --lora r=16, or leave quantize out",
            )
        limit = inventory.max_context
        if limit is not None and self.context > limit:
            raise WorkloadError(
                "context",
                f"is {self.context}, but the position embeddings of {inventory.model} cover "
                f"{limit} tokens; use a shorter context, or set max_position_embeddings and the "
                f"matching rope scaling in the model's config",
            )
        if self.numerics.attention == "varlen" and not inventory.plain_attention:
            raise WorkloadError(
                "numerics.attention",
                f"is varlen, but {inventory.model} computes attention with its own code; use sdpa"
                if inventory.own_attention
                else f"is varlen, but that kernel supports no dropout, and only head sizes up to "
                f"256 that are multiples of 8, which does not cover {inventory.model}; use sdpa",
            )


def too_few_micro_batches(batch: int, size: int, world: int) -> str:
    """Say that some ranks would have no micro-batch, and what to change."""
    # The micro-batch changes the result, so it is never reduced to occupy all ranks.
    count, smaller = -(-batch // size), batch // world
    return (
        f"is {_counted(count, 'micro-batch', 'micro-batches')} of {size}, but there are {world} "
        f"ranks, and each needs one; use a batch of {world * size} or more (--batch "
        f"{world * size}), "
        + (f"a micro-batch of {smaller} (--micro-batch {smaller}), " if smaller else "")
        + f"or {_counted(count, 'rank', 'ranks')} (--gpus {count})"
    )


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def default_numerics(
    inventory: Inventory,
    *,
    context: int,
    batch: int,
    dtype: Dtype = "bf16",
    micro_batch: int | None = None,
    kernels: bool = False,
    own_loss: bool = False,
) -> Numerics:
    """Return the default numerics for a model and a context length.

    Args:
        inventory: The model.
        context: Number of tokens per sequence.
        batch: Number of sequences per optimizer step.
        dtype: Data type that the GPU computes in.
        micro_batch: Number of sequences per micro-batch. By default, about
            `MICRO_BATCH_TOKENS` tokens.
        kernels: Whether the device can run compiled layers and Triton kernels.
        own_loss: Whether the user supplies the loss function. The fused loss kernel is then ruled
            out.
    """
    if context < 1:
        raise WorkloadError("context", f"must be 1 or more, got {context}")
    wanted = micro_batch if micro_batch is not None else max(1, MICRO_BATCH_TOKENS // context)
    width = max((block.mlp_width for block in inventory.blocks), default=0)
    element = WEIGHT_FORMATS[dtype].weight
    fused = kernels and not own_loss and not inventory.caps_logits
    return Numerics(
        micro_batch=min(wanted, max(batch, 1)),
        loss_chunk=_power_of_two_below(
            LOGITS_NBYTES // ((element // 2 if fused else 4) * inventory.vocabulary), 256, 2048
        ),
        loss_kernel="fused" if fused else "torch",
        head_sum="micro",
        forward="training",
        attention="varlen" if kernels and inventory.plain_attention else "sdpa",
        compiled=kernels and not inventory.own_attention,
        deterministic=True,
        mlp_tile=_power_of_two_below(MLP_TILE_NBYTES // (element * max(width, 1)), 1024, 1 << 20),
    )


def resized(
    workload: Workload,
    inventory: Inventory,
    *,
    context: int | None = None,
    batch: int | None = None,
) -> Workload:
    """Return the workload with another context or batch, and all else as the user asked for it.

    A micro-batch that has its default size gets the default for the new sizes; one that the user
    set stays, unless the batch is smaller. With several ranks it is small enough that each has one.
    """
    context = workload.context if context is None else context
    batch = workload.batch if batch is None else batch
    now, new = (
        default_numerics(inventory, context=length, batch=count).micro_batch
        for length, count in ((workload.context, workload.batch), (context, batch))
    )
    micro_batch = workload.numerics.micro_batch
    micro_batch = new if micro_batch == now else min(micro_batch, batch)
    micro_batch = min(micro_batch, max(1, batch // workload.world))
    numerics = replace(workload.numerics, micro_batch=micro_batch)
    return replace(workload, context=context, batch=batch, numerics=numerics)


def _power_of_two_below(value: int, minimum: int, maximum: int) -> int:
    """Round down to a power of two, and clamp."""
    return max(minimum, min(maximum, 1 << max(value.bit_length() - 1, 0)))
