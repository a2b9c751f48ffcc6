"""The inventory of a model: its blocks and the shapes of their tensors, without weights.

A model is a sequence of blocks: the embedding, the layers and the head. `survey` builds an
inventory from a config. You can also write one by hand.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from penstock.errors import InventoryError
from penstock.optimizer_options import WHOLE_TENSOR
from penstock.packed_weights import PackedLayout, Quantization
from penstock.roles import SWEEP_LEAF, TENSOR_ALIGNMENT, OptimizerName, Role
from penstock.units import round_up

BlockKind = Literal["embedding", "layer", "head"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One parameter tensor of the model."""

    name: str
    """Name in the model's state dict."""

    shape: tuple[int, ...]
    """Shape of the tensor."""

    trainable: bool = True
    """Whether the tensor is trained. A frozen one has weights but no gradient and no states."""

    linear: bool = False
    """Whether it is the weight of a linear module. Those of layers can be quantized."""

    quantization: Quantization | None = None
    """How its weights are quantized where they are stored; None if they are not."""

    weight_nbytes: int = 0
    """Bytes of a weight in the type of the run, if it is quantized."""

    def __post_init__(self) -> None:
        if not self.name:
            raise InventoryError("name", "must not be empty")
        if any(extent < 1 for extent in self.shape):
            raise InventoryError("shape", f"must have extents of 1 or more, got {self.shape}")

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stored_elements(self) -> int:
        """Number of elements of a flat buffer that its weights occupy, in the type of the run.

        The bytes of a quantized tensor are counted as if they were weights of that type, so that
        they are stored and moved as any others.
        """
        if self.quantization is None:
            return self.elements
        return PackedLayout(self.elements).nbytes // self.weight_nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A part of the model that is fetched, computed and dropped as a unit."""

    name: str
    """Path in the model, such as `model.layers.0`."""

    kind: BlockKind
    """Whether it is the embedding, a layer or the head."""

    tensors: tuple[TensorSpec, ...] = ()
    """Tensors that the block owns. A tensor shared by two blocks belongs to the first of them."""

    borrows: tuple[str, ...] = ()
    """Names of tensors of earlier blocks that this block also computes with. A tied head borrows
    the embedding's table."""

    matmul_elements: int = 0
    """Number of weights that each token is multiplied with, including borrowed ones. Only
    active experts count."""

    query_width: int = 0
    """Number of query heads times the head size; 0 without attention."""

    heads: int = 0
    """Number of query heads of a layer that calls attention once; 0 for all others, and if it is
    not known. What attention returns can be saved only if it is known."""

    key_value_width: int = 0
    """Number of key and value heads, both together, times the head size."""

    mlp_width: int = 0
    """Intermediate size of the MLP, of all experts that are active for a token."""

    active_experts: int = 0
    """Number of experts that compute each token; 0 for a layer without experts."""

    window: int | None = None
    """Size of the sliding attention window in tokens, or None if there is no limit."""

    unneeded: tuple[str, ...] = ()
    """Paths, within the layer, of modules whose outputs no gradient depends on. A layer that
    backward recomputes need not compute them (`penstock.model.unneeded_outputs`)."""

    second: tuple[int, ...] | None = None
    """Number of elements of the second moment of each trainable tensor, if the optimizer updates
    whole tensors (`Inventory.laid_out_for`). The second moments then have a flat buffer with
    offsets of its own. None if they have as many elements as the tensors."""

    shards: int = 1
    """Number of ranks that share the block's flat buffers. Rank r owns the r-th of as many equal
    shards of each buffer (`Inventory.sharded`)."""

    _flat: tuple[int, int] = field(init=False, repr=False, compare=False)
    _unneeded: int = field(init=False, repr=False, compare=False)
    _cuts: dict[tuple[int, bool], tuple[tuple[int, int], ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _second_starts: tuple[tuple[int, ...], tuple[int, ...]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise InventoryError("shards", f"must be 1 or more, got {self.shards}")
        object.__setattr__(self, "_flat", (self._padded(False), self._padded(True)))
        skipped = {f"{self.name}.{path}.weight" for path in self.unneeded}
        elements = sum(t.elements for t in self.tensors if t.name in skipped)
        object.__setattr__(self, "_unneeded", elements)
        object.__setattr__(self, "_second_starts", self._find_second_starts())
        widths = ("matmul_elements", "query_width", "heads", "key_value_width", "mlp_width")
        for name in widths:
            if getattr(self, name) < 0:
                raise InventoryError(name, f"must be 0 or more, got {getattr(self, name)}")
        if self.window is not None and self.window < 1:
            raise InventoryError("window", f"must be 1 or more, got {self.window}")

    @property
    def sizes(self) -> tuple[object, ...]:
        """Everything but names. Blocks with equal sizes need the same bytes and the same time."""
        tensors = tuple((t.shape, t.trainable, t.quantization) for t in self.tensors)
        widths = (
            *(self.query_width, self.heads, self.key_value_width, self.mlp_width),
            *(self.window, self.unneeded_elements),
        )
        own = () if self.second is None else (self.second,)
        return (self.kind, tensors, self.matmul_elements, *widths, *own)

    @property
    def unneeded_elements(self) -> int:
        """Number of weights with which a recomputed layer multiplies no token."""
        return self._unneeded

    def parameters(self, trainable: bool | None = None) -> int:
        """Return the number of elements without padding.

        `trainable` selects trainable (True) or frozen (False) tensors; None counts both.
        """
        return sum(t.elements for t in self._selected(trainable))

    def flat_elements(self, trainable: bool) -> int:
        """Return the number of elements of the flat buffer of trainable or frozen tensors."""
        return self._flat[trainable]

    def shard_elements(self, trainable: bool) -> int:
        """Return the number of elements of that buffer that each rank owns, padding included."""
        return self._flat[trainable] // self.shards

    def offsets(self, trainable: bool) -> dict[str, int]:
        """Return the offset of each tensor in that buffer, in elements."""
        offsets, at = {}, 0
        for tensor in self._selected(trainable):
            offsets[tensor.name] = at
            at += round_up(tensor.stored_elements, self._alignment)
        return offsets

    def state_elements(self, role: Role, tensor: TensorSpec) -> int:
        """Return the number of elements that a trainable tensor has in a role."""
        if role is not Role.SECOND or self.second is None:
            return tensor.elements
        names = [t.name for t in self._selected(True)]
        return self.second[names.index(tensor.name)]

    def state_offset(self, role: Role, tensor: TensorSpec) -> int:
        """Return the offset of a trainable tensor in the flat buffer of a role, in elements."""
        return self.role_span(role, self.offsets(True)[tensor.name], self._flat[True])[0]

    def role_span(self, role: Role, start: int, stop: int) -> tuple[int, int]:
        """Return which elements of a role belong to trainable elements `start` to `stop`.

        They are the same, unless the role is a second moment with a buffer of its own. In that
        case `start` and `stop` are where tensors begin, or the end of the buffer.
        """
        if role is not Role.SECOND or self.second is None:
            return start, stop
        starts, seconds = self._second_starts
        low, high = (bisect.bisect_left(starts, each) for each in (start, stop))
        return seconds[low], seconds[high]

    def role_elements(self, role: Role, start: int, stop: int) -> int:
        """Return how many elements of a role belong to trainable elements `start` to `stop`."""
        low, high = self.role_span(role, start, stop)
        return high - low

    def _find_second_starts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where trainable tensors begin, and where their second moments do, with the ends.

        A tensor without a second moment begins where the next one's does.
        """
        if self.second is None:
            return (), ()
        at, seconds = 0, [0]
        for elements in self.second:
            at += round_up(elements, self._alignment)
            seconds.append(at)
        return (*self.offsets(True).values(), self._flat[True]), tuple(seconds)

    def pieces(self, step: int, trainable: bool = True) -> tuple[tuple[int, int], ...]:
        """Divide a rank's shard of that buffer into spans of at most `step` elements.

        Spans end only where the optimizer sweep may cut a tensor. If it needs whole tensors, a
        span has at least one, however large it is. Spans count from the start of the
        shard and are the same for every rank, because all ranks run one schedule.
        """
        if step < SWEEP_LEAF:
            raise InventoryError("step", f"must be {SWEEP_LEAF} or more, got {step}")
        if (step, trainable) not in self._cuts:
            whole = trainable and self.second is not None
            cut = self._cut_at_tensors(step) if whole else self._cut(step, trainable)
            self._cuts[step, trainable] = tuple(cut)
        return self._cuts[step, trainable]

    def _cut(self, step: int, trainable: bool) -> Iterator[tuple[int, int]]:
        starts = sorted(self.offsets(trainable).values())
        at, end = 0, self.shard_elements(trainable)
        while at < end:
            stop = min(at + step, end)
            if stop < end:
                tensor = starts[bisect.bisect_right(starts, stop) - 1]
                stop -= (stop - tensor) % SWEEP_LEAF
            yield at, stop
            at = stop

    def _cut_at_tensors(self, step: int) -> Iterator[tuple[int, int]]:
        assert self.shards == 1, "a rank that stores a shard has no whole tensors"
        begins = 0
        starts = (*self.offsets(True).values(), self._flat[True])
        for at, end in itertools.pairwise(starts):
            if end - begins > step and at > begins:
                yield begins, at
                begins = at
        if begins < self._flat[True]:
            yield begins, self._flat[True]

    @property
    def _alignment(self) -> int:
        """Alignment of tensors in a flat buffer, in elements.

        A rank's shard may begin inside any tensor, and the sweep and the norm cut a tensor only at
        multiples of `SWEEP_LEAF` from its start.
        """
        return TENSOR_ALIGNMENT if self.shards == 1 else SWEEP_LEAF

    def _padded(self, trainable: bool) -> int:
        tensors = self._selected(trainable)
        elements = sum(round_up(t.stored_elements, self._alignment) for t in tensors)
        return round_up(elements, self.shards * self._alignment)

    @property
    def quantized(self) -> tuple[TensorSpec, ...]:
        """Tensors that are stored as quantized weights."""
        return tuple(tensor for tensor in self.tensors if tensor.quantization is not None)

    @property
    def dequantized_elements(self) -> int:
        """Number of elements that its quantized tensors have when the block computes with them."""
        return sum(round_up(t.elements, TENSOR_ALIGNMENT) for t in self.quantized)

    def _selected(self, trainable: bool | None) -> Iterator[TensorSpec]:
        return (t for t in self.tensors if trainable in (None, t.trainable))


def is_muon_matrix(block: Block, tensor: TensorSpec) -> bool:
    """Return whether Muon updates a tensor itself: a matrix of a layer, or one of each expert.

    AdamW updates the embedding, the head, norms and biases, as Muon's authors recommend.
    """
    experts = len(tensor.shape) == 3 and ".experts." in tensor.name
    # The biases of all experts of a layer are one tensor with two dimensions.
    matrix = len(tensor.shape) == 2 and not tensor.name.endswith("_bias")
    return block.kind == "layer" and (matrix or experts)


def _second_elements(block: Block, optimizer: OptimizerName) -> tuple[int, ...] | None:
    """Return `Block.second` for an optimizer."""
    if optimizer not in WHOLE_TENSOR:
        return None
    trained = (tensor for tensor in block.tensors if tensor.trainable)
    if optimizer == "muon":
        return tuple(0 if is_muon_matrix(block, t) else t.elements for t in trained)
    return tuple(adafactor_elements(tensor.shape) for tensor in trained)


def adafactor_elements(shape: tuple[int, ...]) -> int:
    """Return how many second moments Adafactor stores: of rows and columns, or of each element."""
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape[:-2]) * (shape[-2] + shape[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The inventory of a whole model."""

    FORMAT: ClassVar[int] = 1

    version: int = FORMAT
    """Version of the file format."""

    model: str
    """Name of the model, as the user gave it."""

    architecture: str = ""
    """Name of the model class."""

    hidden: int
    """Hidden size."""

    vocabulary: int
    """Vocabulary size: rows of the embedding, and logits of the head."""

    max_context: int | None = None
    """Maximum sequence length that the position embeddings cover, or None if unknown."""

    blocks: tuple[Block, ...]
    """Blocks in the order of forward: the embedding, the layers and the head."""

    caps_logits: bool = False
    """Whether the head soft-caps its logits, so that their gradient needs the capped values."""

    linear_embedding: bool = True
    """Whether the gradients of the embedding do not depend on its weights. If they do, as with a
    norm or a projection before the first layer, its backward pass needs the weights."""

    plain_attention: bool = False
    """Whether Penstock's attention kernels support the attention: no dropout, keys and values of
    one head size, at most 256 and a multiple of 8."""

    own_attention: bool = False
    """Whether layers compute attention with their own code, which Penstock cannot replace. Such a
    layer runs once for each document."""

    not_trainable: str = ""
    """Why the model cannot be trained yet; empty if it can."""

    own_loss: str = ""
    """Why the loss that the model computes from labels is not next-token cross-entropy, which the
    engine computes; empty if it is. A caller may compute any loss."""

    buffers: tuple[TensorSpec, ...] = ()
    """Tensors of the state dict that are no parameters, such as a layer's scale: they are not
    trained, but read from the model's files and saved with it."""

    mixes_documents: str = ""
    """Which modules carry information from one document of a packed row to the next, such as
    convolutions; empty if none does."""

    # Asked for every candidate that the planner considers.
    _owners: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _kinds: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kinds = [block.kind for block in self.blocks]
        expected = ["embedding", *["layer"] * (len(kinds) - 2), "head"]
        if len(kinds) < 3 or kinds != expected:
            raise InventoryError("blocks", f"must be an embedding, layers and a head, got {kinds}")
        if len({block.shards for block in self.blocks}) > 1:
            raise InventoryError("blocks", "must all be shared by the same number of ranks")
        for name in ("hidden", "vocabulary"):
            if getattr(self, name) < 1:
                raise InventoryError(name, f"must be 1 or more, got {getattr(self, name)}")
        self._check_names()
        object.__setattr__(self, "_owners", tuple(self._find_owners()))
        first: dict[object, int] = {}
        alike = tuple(first.setdefault(b.sizes, i) for i, b in enumerate(self.blocks))
        object.__setattr__(self, "_kinds", alike)

    def _find_owners(self) -> Iterator[tuple[int, ...]]:
        owner = {tensor.name: i for i, b in enumerate(self.blocks) for tensor in b.tensors}
        for i, block in enumerate(self.blocks):
            own = {i} if block.tensors else set()
            yield tuple(sorted({owner[name] for name in block.borrows} | own))

    def _check_names(self) -> None:
        names = [block.name for block in self.blocks]
        if len(set(names)) < len(names):
            raise InventoryError("blocks", f"must have unique names, got {names}")
        owned: set[str] = set()
        for i, block in enumerate(self.blocks):
            for name in block.borrows:
                if name not in owned:
                    raise InventoryError(f"blocks[{i}].borrows", f"no earlier block owns {name}")
            for tensor in block.tensors:
                if tensor.name in owned:
                    raise InventoryError(
                        f"blocks[{i}].tensors", f"{tensor.name} is listed more than once"
                    )
                owned.add(tensor.name)

    @property
    def layers(self) -> tuple[Block, ...]:
        """All blocks but the embedding and the head."""
        return self.blocks[1:-1]

    @property
    def tied(self) -> bool:
        """Whether the head computes with tensors of the embedding."""
        return bool(self.blocks[-1].borrows)

    @property
    def weight_owners(self) -> tuple[tuple[int, ...], ...]:
        """For each block, the blocks that own the tensors it computes with."""
        return self._owners

    @property
    def backward_owners(self) -> tuple[tuple[int, ...], ...]:
        """For each block, the blocks that own the tensors its backward pass computes with.

        They are those of the forward pass, except that a linear embedding needs no weights.
        """
        trained = self.blocks[0].parameters(True) > 0
        needed = trained and not self.linear_embedding
        return (self._owners[0] if needed else (), *self._owners[1:])

    @property
    def kinds(self) -> tuple[int, ...]:
        """For each block, the index of the first block with the same sizes."""
        return self._kinds

    @property
    def may_have_rounds(self) -> bool:
        """Whether a step may be divided into rounds without changing the result.

        It may not if a trained table is tied. In each round, the head adds the gradients of all
        micro-batches before the embedding does, so rounds would change the order of the sum.
        """
        borrowed = {name for block in self.blocks for name in block.borrows}
        return not any(t.trainable and t.name in borrowed for b in self.blocks for t in b.tensors)

    @property
    def shards(self) -> int:
        """Number of ranks that share the flat buffers of every block."""
        return self.blocks[0].shards

    def sharded(self, ranks: int) -> Inventory:
        """Return the inventory with flat buffers that are shared by so many ranks."""
        if self.shards == ranks:
            return self
        return replace(self, blocks=tuple(replace(block, shards=ranks) for block in self.blocks))

    def laid_out_for(self, optimizer: OptimizerName) -> Inventory:
        """Return the inventory with flat buffers for the second moments of an optimizer."""
        seconds = [_second_elements(block, optimizer) for block in self.blocks]
        if [block.second for block in self.blocks] == seconds:
            return self
        pairs = zip(self.blocks, seconds, strict=True)
        return replace(self, blocks=tuple(replace(b, second=second) for b, second in pairs))

    def with_quantized(self, quantization: Quantization, weight_nbytes: int) -> Inventory:
        """Return the inventory with the frozen linear weights of layers quantized.

        These are the tensors that bitsandbytes quantizes: not embeddings, the head, norms, routers
        and biases, and nothing that is trained.
        """

        def quantized(tensor: TensorSpec) -> TensorSpec:
            if not tensor.linear or tensor.trainable:
                return tensor
            return replace(tensor, quantization=quantization, weight_nbytes=weight_nbytes)

        blocks = (
            replace(block, tensors=tuple(map(quantized, block.tensors)))
            if block.kind == "layer"
            else block
            for block in self.blocks
        )
        return replace(self, blocks=tuple(blocks))

    def parameters(self, trainable: bool | None = None) -> int:
        """Return the number of parameters of all blocks; see `Block.parameters`."""
        return sum(block.parameters(trainable) for block in self.blocks)

    def block(self, name: str) -> Block:
        """Return the block with a name."""
        for block in self.blocks:
            if block.name == name:
                return block
        known = ", ".join(b.name for b in (self.blocks[0], self.blocks[1], self.blocks[-1]))
        raise InventoryError("block", f"there is no {name!r}; blocks are named like {known}")

    @property
    def fingerprint(self) -> str:
        """A hash of all names, shapes, their order and what is trainable.

        A plan is valid only for models with the same fingerprint.
        """
        digest = hashlib.sha256()
        for block in self.blocks:
            digest.update(f"{block.kind}:{block.name}:{','.join(block.borrows)}\n".encode())
            for tensor in block.tensors:
                digest.update(f"{tensor.name} {tensor.shape} {tensor.trainable}\n".encode())
        return digest.hexdigest()[:16]
