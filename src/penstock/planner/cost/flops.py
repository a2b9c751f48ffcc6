"""What the GPU computes, counted. Room: decide.

Two operations per weight and token in forward, as many again for each of the two products of
backward, and the quadratic part of attention with its causal half. A layer's backward starts by
repeating its forward.
"""

from __future__ import annotations

from penstock.model.inventory import Block
from penstock.plan.schedule import Verb

ATTENTION_BACKWARD = 2.5
"""Backward of attention against its forward: five products for two, as flash kernels do it."""


def operations(block: Block, context: int, verb: Verb) -> tuple[float, float]:
    """Floating-point operations per token: in products with weights, and in attention."""
    dense = 2.0 * block.matmul_elements
    attention = 4.0 * block.query_width * mean_visible(context, block.window)
    if verb is Verb.FORWARD:
        return dense, attention
    trained = bool(block.parameters(trainable=True)) or block.kind == "head"
    back = dense * (2 if trained else 1)
    return dense + back, (1 + ATTENTION_BACKWARD) * attention


def mean_visible(context: int, window: int | None) -> float:
    """Earlier tokens that a token attends to, on average over a sequence."""
    if window is None or window >= context:
        return context / 2
    return window - window * window / (2 * context)


def width_nbytes(block: Block, hidden: int) -> int:
    """What a layer has of a token in 16 bits, around attention and inside the MLP. Of the head
    nothing: its loss is computed in pieces."""
    return 2 * (2 * hidden + block.mlp_width) if block.kind == "layer" else 0


def share_of(verb: Verb) -> float:
    """Of all that is not products: a forward, or the same again and twice as much backward."""
    return 0.25 if verb is Verb.FORWARD else 0.75
