"""Working memory: the device memory that computing one micro-batch of a part of the model needs.

A part is the embedding, a kind of layer, or the head with the loss. How much it needs comes from a
`WorkingMemorySource`: measured on the GPU, traced from the model's own code, or estimated from the
sizes in the inventory alone (`penstock.plan.working_memory_estimate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from penstock.errors import PlanError
from penstock.model.inventory import Inventory
from penstock.plan.cuda_allocator import PAGE
from penstock.plan.workload import Workload
from penstock.roles import EXTENT
from penstock.units import MiB, round_up

MemoryOrigin = Literal["measured", "traced", "estimated"]

COMPILER_BUFFER = 64 * MiB
"""Bytes of a buffer as large as the GPU's L2 cache, which the compiler uses to time candidate
kernels."""

LIBRARIES = 2 * 32 * MiB + COMPILER_BUFFER
"""Bytes that libraries allocate from PyTorch's allocator: one cuBLAS workspace each for the forward
and the backward thread (32 MiB each from Hopper on), and the compiler's buffer."""

ASSUMED_GAPS = 7 * PAGE
"""Bytes of `WorkingMemory.gaps` where no order of allocations is known. In the allocator's model
(`penstock.plan.cuda_allocator`), steps of 44 random models with working memory of 80 MiB to 4.7 GiB
needed up to 130 MiB more than their peak."""

KEPT_GAPS = 3 * PAGE
"""Bytes that a kept forward pass may need beyond its saved tensors. They stay while the next layer
allocates its own, which does not fill the gaps between them: on an H200, adapters of an 8B needed
46 MB more for each kept layer than the tensors have."""

NOISE = 16 * MiB
"""Bytes by which measurements of the CUDA context and of the allocator's pages differ from run to
run. The margins that a rehearsal adds to both are larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartMemory:
    """The working memory of one part of the model."""

    name: str
    """Name of the part's block; for a kind of layer, that of the first layer of this kind."""

    forward: int
    """Peak bytes of the forward pass of one micro-batch, beyond what the plan allocates elsewhere:
    weights, hidden states in their slots, gradient sums."""

    backward: int
    """Peak bytes of the backward pass of one micro-batch, with the recomputation of the forward
    pass. For the head, of the loss and its gradient."""

    saved: int | None = None
    """Bytes that a layer's forward pass of one micro-batch saves for its backward pass, without
    the layer's input and weights. They are part of `forward` and of `backward`. None if not known:
    a plan then keeps nothing."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "saved"):
            if (getattr(self, name) or 0) < 0:
                raise PlanError(name, f"must be 0 or more, got {getattr(self, name)}")

    @property
    def peak(self) -> int:
        """Peak bytes of either pass."""
        return max(self.forward, self.backward)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkingMemory:
    """The working memory of a model with one workload."""

    FORMAT: ClassVar[int] = 1

    version: int = FORMAT
    """Version of the file format."""

    parts: tuple[PartMemory, ...]
    """The embedding, each kind of layer, and the head."""

    inputs: int = 0
    """Bytes of each micro-batch of the step that stay allocated for the whole step: token ids,
    targets, positions and document starts."""

    arguments: int = 0
    """Bytes of each micro-batch of a round that stay allocated from its embedding to the end of its
    backward pass: what the model passes to its layers, such as rotary tables."""

    libraries: int = LIBRARIES
    """Bytes that libraries allocate on a GPU, such as the workspaces of cuBLAS."""

    gaps: int = ASSUMED_GAPS
    """Bytes that PyTorch's allocator reserves on a GPU beyond the peak, because it maps whole pages
    and tensors leave gaps between them."""

    context: int | None = None
    """Bytes of the CUDA context with all libraries and kernels loaded; None if not measured."""

    origin: MemoryOrigin = "estimated"
    """Where the figures come from."""

    remark: str = ""
    """Why the figures are not traced, for the user; empty if there is nothing to say."""

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise PlanError("version", f"must be {self.FORMAT}, got {self.version}")
        if not self.parts:
            raise PlanError("parts", "must list at least one part")
        for name in ("inputs", "arguments", "libraries", "gaps", "context"):
            if (getattr(self, name) or 0) < 0:
                raise PlanError(name, f"must be 0 or more, got {getattr(self, name)}")

    def covers(self, other: WorkingMemory) -> bool:
        """Return whether a plan made with these figures has room for others, but for `NOISE`."""
        outside = (self.context or 0, other.context or 0)
        own, others = (each.libraries + each.gaps for each in (self, other))
        return (
            self.peak >= other.peak
            and (self.saved or 0) >= (other.saved or 0)
            and self.inputs >= other.inputs
            and self.arguments >= other.arguments
            and own + NOISE >= others
            and outside[0] + NOISE >= outside[1]
        )

    @property
    def layers(self) -> tuple[PartMemory, ...]:
        """The kinds of layers."""
        return self.parts[1:-1] or self.parts

    @property
    def saved(self) -> int | None:
        """Bytes that the forward pass of one micro-batch saves, of any layer; None if not known."""
        sizes = [part.saved for part in self.layers]
        return None if None in sizes else max(size for size in sizes if size is not None)

    @property
    def largest(self) -> PartMemory:
        """The part that needs the most."""
        return max(self.parts, key=lambda part: part.peak)

    @property
    def peak(self) -> int:
        """The most bytes that any part needs. Parts are computed one after the other."""
        return round_up(self.largest.peak, EXTENT)


class WorkingMemorySource(Protocol):
    """Says how much working memory a model needs with a workload.

    The planner calls a source often, with the same arguments and with other workloads, so a source
    has to remember what it found.
    """

    def __call__(self, inventory: Inventory, workload: Workload, /) -> WorkingMemory: ...
