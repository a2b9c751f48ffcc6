"""How long the GPU computes. Room: decide.

Operations are counted, not guessed: two per weight and token in forward, as many again for each of
the two products of backward, and the quadratic part of attention with its causal half. A layer's
backward starts by repeating its forward.
"""

from __future__ import annotations

from penstock.cost.rates import Rates
from penstock.inventory import Block, Inventory
from penstock.pools import round_micro_batches
from penstock.schedule import Operation, Verb
from penstock.workload import Workload

ATTENTION_BACKWARD = 2.5
"""Backward of attention against its forward: five products for two, as flash kernels do it."""


class Computation:
    """Seconds of each computation, by block and round."""

    def __init__(self, inventory: Inventory, workload: Workload, rounds: int, rates: Rates) -> None:
        self.inventory, self.workload, self.rates = inventory, workload, rates
        self.tokens = [n * workload.context for n in sequences_by_round(workload, rounds)]

    def seconds(self, operation: Operation) -> float:
        block = self.inventory.blocks[operation.block]
        tokens = self.tokens[operation.round]
        if block.kind == "embedding":
            return tokens * self.inventory.hidden * 2 * 3 / self.rates.hbm
        return tokens * token_seconds(block, self.workload.context, operation.verb, self.rates)


def token_seconds(block: Block, context: int, verb: Verb, rates: Rates) -> float:
    """One token's share of the computation."""
    dense, attention = operations(block, context, verb)
    return dense / rates.block_flops + attention / rates.attention_flops


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


def sequences_by_round(workload: Workload, rounds: int) -> list[int]:
    """As the engine cuts them: every round as large as the first, until there are no more."""
    each = workload.numerics.micro_batch * round_micro_batches(workload, rounds)
    return [max(0, min(each, workload.batch - r * each)) for r in range(rounds)]
