"""Count what the GPU computes per token.

A matrix product takes two floating-point operations per weight and token in forward, and as many
for each of the two products of backward. Attention adds a quadratic part, halved because it is
causal. A layer's backward first repeats its forward, except for products that it does not need.
"""

from __future__ import annotations

import math

from penstock.model.inventory import Block, is_muon_matrix
from penstock.plan.schedule import Verb

ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward relative to its forward: five products instead of two.
Penstock's kernels compute seven in backward. The probe counts five as well, so its rate of
attention contains the other two."""


def operations(block: Block, context: int, verb: Verb) -> tuple[float, float]:
    """Return floating-point operations per token: in products with weights, and in attention."""
    dense = 2.0 * block.matmul_elements
    attention = 4.0 * block.query_width * mean_visible(context, block.window)
    if verb is Verb.FORWARD:
        return dense, attention
    back = dense * (1 + trained_share(block))
    return recomputed(block) + back, (1 + ATTENTION_BACKWARD) * attention


def recomputed(block: Block) -> float:
    """Return the operations per token in products with weights that backward repeats."""
    return 2.0 * (block.matmul_elements - block.unneeded_elements)


def repeated_in_tiles(block: Block, hidden: int) -> float:
    """Return the operations per token in products that backward repeats tile by tile.

    It does so whether the layer was kept or not. The last product is not needed there either, but
    for experts: it is part of the gradient of the router's weights.
    """
    attention = hidden * (2 * block.query_width + block.key_value_width)
    mlp = max(0, block.matmul_elements - attention)
    return 2.0 * mlp * (1 if block.active_experts else GATED)


GATED = 2 / 3
"""Share of the weights of a gated MLP that are not those of its last product."""


def skips_tiles(block: Block) -> bool:
    """Return whether a recomputed layer skips an MLP that runs in tiles."""
    return "mlp" in block.unneeded and not block.active_experts


def trained_share(block: Block) -> float:
    """Return the share of a block's matrices whose gradient backward computes.

    The gradient of the input is computed for all of them. A head that borrows the embedding's table
    counts as trained.
    """
    if block.borrows:
        return 1.0
    matrices = [tensor for tensor in block.tensors if len(tensor.shape) > 1]
    trained = sum(tensor.elements for tensor in matrices if tensor.trainable)
    return trained / max(1, sum(tensor.elements for tensor in matrices))


def mean_visible(context: int, window: int | None) -> float:
    """Return how many earlier tokens a token attends to, averaged over a sequence."""
    if window is None or window >= context:
        return context / 2
    return window - window * window / (2 * context)


def layer_width(block: Block, hidden: int) -> int:
    """Return the number of one token's values: hidden state, queries, and inside the MLP.

    Queries may be wider than the hidden state, as in Qwen3-4B. Each expert of a token has a copy of
    its hidden state and an output as wide. The head counts as 0, because its loss is computed in
    chunks.
    """
    if block.kind != "layer":
        return 0
    return hidden + block.query_width + block.mlp_width + 2 * block.active_experts * hidden


def share_of(verb: Verb) -> float:
    """Return an operation's share of a layer's element-wise work.

    A forward is one quarter. Backward repeats the forward and does twice as much again.
    """
    return 0.25 if verb is Verb.FORWARD else 0.75


def muon_operations(block: Block, start: int, stop: int) -> float:
    """Return the operations of Newton-Schulz for matrices that begin in elements of a block.

    Each of five iterations multiplies a matrix with itself, the square product with itself, and
    that with the matrix.
    """
    offsets, total = block.offsets(True), 0.0
    for tensor in block.tensors:
        inside = tensor.trainable and start <= offsets[tensor.name] < stop
        if inside and is_muon_matrix(block, tensor):
            small, large = sorted(tensor.shape[-2:])
            matrices = math.prod(tensor.shape[:-2])
            total += matrices * 5 * (4 * small * small * large + 2 * small**3)
    return total
