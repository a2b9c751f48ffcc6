"""What passes through a staging pool, from a model's config alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.plan.packing import Lifetime

FOLDER = Path(__file__).parents[1] / "fixtures/models"
BF16 = 2


@dataclass(frozen=True)
class Model:
    name: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    attention_bias: bool
    tie_word_embeddings: bool

    @property
    def embedding(self) -> int:
        return self.vocab_size * self.hidden_size * BF16

    def matrices(self) -> dict[str, int]:
        """Bytes of one layer's seven, in bf16."""
        h, inner = self.hidden_size, self.intermediate_size
        kv = h // self.num_attention_heads * self.num_key_value_heads
        numels = {"q": h * h, "k": h * kv, "v": h * kv, "o": h * h}
        numels |= dict.fromkeys(("gate", "up", "down"), h * inner)
        return {name: numel * BF16 for name, numel in numels.items()}

    def layer(self) -> dict[str, int]:
        """Those, and the norms and biases between them."""
        h = self.hidden_size
        kv = h // self.num_attention_heads * self.num_key_value_heads
        small = {"norm 1": h * BF16, "norm 2": h * BF16}
        if self.attention_bias:
            small |= {"q bias": h * BF16, "k bias": kv * BF16, "v bias": kv * BF16}
        return self.matrices() | small

    def blocks(self) -> list[tuple[str, dict[str, int]]]:
        """The row that a step passes: embedding, layers, head."""
        layers = [(f"layers.{i}", self.layer()) for i in range(self.num_hidden_layers)]
        head = {"norm": self.hidden_size * BF16, "head": self.embedding}
        return [("embed", {"embed": self.embedding}), *layers, ("head", head)]


def models() -> list[Model]:
    return [Model(**json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))]


def zero_infinity_nbytes(model: Model) -> int:
    """Nine slots, each as large as the largest tensor: seven matrices, embedding and head."""
    return 9 * model.embedding


def all_at_once(model: Model) -> list[Lifetime]:
    """MemAscend's need: the same nine tensors in flight, each in a slot of its own size."""
    nine = {"embed": model.embedding, "head": model.embedding, **model.matrices()}
    return [Lifetime(name=n, nbytes=b, start=0, end=1) for n, b in nine.items()]


def weights_one_ahead(model: Model) -> list[Lifetime]:
    """A step that fetches the weights of one block while the one before it computes."""
    return list(_weights(model))


def whole_step(model: Model) -> list[Lifetime]:
    """Weights, gradients on their way out, and the sweep's states in and out, pending from the
    last step: low halves and both moments, read a block ahead and written a block behind."""
    return [*_weights(model), *_gradients(model), *_states(model)]


def _weights(model: Model) -> Iterator[Lifetime]:
    blocks = model.blocks()
    turn = len(blocks) - 1  # the head ends the forward pass and starts the backward one
    for at, (block, tensors) in enumerate(blocks):
        visits = {at} if at in (0, turn) else {at, 2 * turn - at}
        for number, when in enumerate(sorted(visits)):
            for name, nbytes in tensors.items():
                yield Lifetime(
                    name=f"{block}.{name} #{number}", nbytes=nbytes, start=when - 1, end=when + 1
                )


def _gradients(model: Model) -> Iterator[Lifetime]:
    blocks = model.blocks()
    turn = len(blocks) - 1
    for at, (block, tensors) in enumerate(blocks):
        when = 2 * turn - at
        for name, nbytes in tensors.items():
            yield Lifetime(name=f"{block}.{name} gradient", nbytes=nbytes, start=when, end=when + 2)


def _states(model: Model) -> Iterator[Lifetime]:
    for at, (block, tensors) in enumerate(model.blocks()):
        for name, nbytes in tensors.items():
            for role, times in (("low", 1), ("first", 2), ("second", 2)):
                yield Lifetime(
                    name=f"{block}.{name} {role}", nbytes=times * nbytes, start=at - 2, end=at + 1
                )
