"""What a model is made of: blocks and their tensors, without a weight in sight. Room: decide.

A model is a row of blocks: embedding, layers, head. `survey` fills an Inventory from a config; a
person or a test may write one by hand.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from penstock.errors import InventoryError
from penstock.roles import SWEEP_LEAF, TENSOR_ALIGNMENT
from penstock.units import round_up

BlockKind = Literal["embedding", "layer", "head"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One parameter of the model."""

    name: str
    """Its name in the model's state dict."""

    shape: tuple[int, ...]
    """Its dimensions."""

    trainable: bool = True
    """A frozen one has a compute weight and nothing else."""

    def __post_init__(self) -> None:
        if not self.name:
            raise InventoryError("name", "must not be empty")
        if any(extent < 1 for extent in self.shape):
            raise InventoryError("shape", f"must have extents of 1 or more, got {self.shape}")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """What is fetched, computed and dropped together."""

    name: str
    """Where it is in the model, such as `model.layers.0`."""

    kind: BlockKind
    """Its place in the row."""

    tensors: tuple[TensorSpec, ...] = ()
    """The tensors it owns. A tensor shared by two blocks belongs to the first of them."""

    borrows: tuple[str, ...] = ()
    """Tensors of earlier blocks that it computes with too: a tied head borrows the embedding."""

    matmul_elements: int = 0
    """Weights each token is multiplied with, borrowed ones too; of experts the active ones."""

    query_width: int = 0
    """Query heads times their size; 0 where there is no attention."""

    key_value_width: int = 0
    """Key and value heads times their size, both together."""

    mlp_width: int = 0
    """The width inside the MLP; of experts, of those that are active for a token."""

    window: int | None = None
    """The furthest back that attention looks, where that is limited."""

    _flat: tuple[int, int] = field(init=False, repr=False, compare=False)
    _cuts: dict[tuple[int, bool], tuple[tuple[int, int], ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_flat", (self._padded(False), self._padded(True)))
        for name in ("matmul_elements", "query_width", "key_value_width", "mlp_width"):
            if getattr(self, name) < 0:
                raise InventoryError(name, f"must be 0 or more, got {getattr(self, name)}")
        if self.window is not None and self.window < 1:
            raise InventoryError("window", f"must be 1 or more, got {self.window}")

    def parameters(self, trainable: bool | None = None) -> int:
        """Elements without padding, of all tensors or of one kind."""
        return sum(t.elements for t in self._of(trainable))

    def flat_elements(self, trainable: bool) -> int:
        """Elements of the flat buffer that holds its trainable or its frozen tensors."""
        return self._flat[trainable]

    def offsets(self, trainable: bool) -> dict[str, int]:
        """Where each tensor starts in that buffer, in elements."""
        found, at = {}, 0
        for tensor in self._of(trainable):
            found[tensor.name] = at
            at += round_up(tensor.elements, TENSOR_ALIGNMENT)
        return found

    def pieces(self, step: int, trainable: bool = True) -> tuple[tuple[int, int], ...]:
        """That buffer in runs of at most `step` elements, cut where the sweep may cut a tensor."""
        if step < SWEEP_LEAF:
            raise InventoryError("step", f"must be {SWEEP_LEAF} or more, got {step}")
        if (step, trainable) not in self._cuts:
            self._cuts[step, trainable] = tuple(self._cut(step, trainable))
        return self._cuts[step, trainable]

    def _cut(self, step: int, trainable: bool) -> Iterator[tuple[int, int]]:
        starts = sorted(self.offsets(trainable).values())
        at, end = 0, self.flat_elements(trainable)
        while at < end:
            stop = min(at + step, end)
            if stop < end:
                tensor = starts[bisect.bisect_right(starts, stop) - 1]
                stop -= (stop - tensor) % SWEEP_LEAF
            yield at, stop
            at = stop

    def _padded(self, trainable: bool) -> int:
        return sum(round_up(t.elements, TENSOR_ALIGNMENT) for t in self._of(trainable))

    def _of(self, trainable: bool | None) -> Iterator[TensorSpec]:
        return (t for t in self.tensors if trainable in (None, t.trainable))


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """A whole model."""

    FORMAT: ClassVar[int] = 1

    version: int = FORMAT
    """The version of the file's form."""

    model: str
    """What the user called it."""

    architecture: str = ""
    """The class that computes it."""

    hidden: int
    """The width of what passes from block to block."""

    vocabulary: int
    """Rows of the embedding, and logits of the head."""

    max_context: int | None = None
    """The longest sequence that the model's positions cover."""

    blocks: tuple[Block, ...]
    """In the order of forward: one embedding, layers, one head."""

    caps_logits: bool = False
    """Whether the head bends its logits, so that their gradient needs them."""

    plain_attention: bool = False
    """Whether a variable-length kernel computes its attention: no caps on scores, no dropout, and
    heads of at most 256 in steps of 8."""

    not_trainable: str = ""
    """Why training refuses it for now; empty where it does not."""

    def __post_init__(self) -> None:
        kinds = [block.kind for block in self.blocks]
        row = ["embedding", *["layer"] * (len(kinds) - 2), "head"]
        if len(kinds) < 3 or kinds != row:
            raise InventoryError("blocks", f"must be an embedding, layers and a head, got {kinds}")
        for name in ("hidden", "vocabulary"):
            if getattr(self, name) < 1:
                raise InventoryError(name, f"must be 1 or more, got {getattr(self, name)}")
        self._check_names()

    def _check_names(self) -> None:
        names = [block.name for block in self.blocks]
        if len(set(names)) < len(names):
            raise InventoryError("blocks", f"must have a name each, got {names}")
        owned: set[str] = set()
        for i, block in enumerate(self.blocks):
            for name in block.borrows:
                if name not in owned:
                    raise InventoryError(
                        f"blocks[{i}].borrows", f"{name} is owned by no earlier block"
                    )
            for tensor in block.tensors:
                if tensor.name in owned:
                    raise InventoryError(f"blocks[{i}].tensors", f"{tensor.name} is there twice")
                owned.add(tensor.name)

    @property
    def layers(self) -> tuple[Block, ...]:
        return self.blocks[1:-1]

    @property
    def tied(self) -> bool:
        """The head computes with tensors of the embedding."""
        return bool(self.blocks[-1].borrows)

    @property
    def may_have_rounds(self) -> bool:
        """Not where a trained table is tied: the head adds to its gradient before the embedding
        does, all micro-batches of a round, so rounds would change the order of the sum."""
        lent = {name for block in self.blocks for name in block.borrows}
        return not any(t.trainable and t.name in lent for b in self.blocks for t in b.tensors)

    def parameters(self, trainable: bool | None = None) -> int:
        return sum(block.parameters(trainable) for block in self.blocks)

    def block(self, name: str) -> Block:
        for block in self.blocks:
            if block.name == name:
                return block
        known = ", ".join(b.name for b in (self.blocks[0], self.blocks[1], self.blocks[-1]))
        raise InventoryError("block", f"there is no {name!r}; the blocks are {known} and the like")

    @property
    def fingerprint(self) -> str:
        """Changes with any name, shape, order or trainability: what a plan is good for."""
        digest = hashlib.sha256()
        for block in self.blocks:
            digest.update(f"{block.kind}:{block.name}:{','.join(block.borrows)}\n".encode())
            for tensor in block.tensors:
                digest.update(f"{tensor.name} {tensor.shape} {tensor.trainable}\n".encode())
        return digest.hexdigest()[:16]
