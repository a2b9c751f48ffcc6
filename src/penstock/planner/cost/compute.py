"""Estimate how long the GPU computes."""

from __future__ import annotations

from penstock.model.inventory import Block, Inventory
from penstock.plan.placement import Placement
from penstock.plan.schedule import Operation, Verb
from penstock.plan.traffic import planned_shapes
from penstock.plan.workload import Workload
from penstock.planner.cost.flops import (
    layer_width,
    operations,
    recomputed,
    repeated_in_tiles,
    share_of,
    skips_tiles,
    trained_share,
)
from penstock.planner.cost.rates import Rates

SEPARATE_OPERATIONS = 20
"""Bytes per weight that separate operations move between the codes and the weights of quantized
tensors: 32-bit indices of two codes and fp32 values. A kernel moves none."""


LOGIT_PASSES = 3
"""Passes of the loss over the logits, without the products that read them."""


class ComputeTime:
    """Computes the seconds of each forward, loss and backward operation."""

    def __init__(
        self, inventory: Inventory, workload: Workload, placement: Placement, rates: Rates
    ) -> None:
        self.inventory, self.workload, self.rates = inventory, workload, rates
        self._blocks = placement.blocks
        rounds = placement.rounds
        sequences = sequences_by_round(workload, rounds)
        self.tokens = [n * workload.context for n in sequences]
        """Number of tokens of each round."""
        self.micro_batches = [-(-n // workload.numerics.micro_batch) for n in sequences]
        """Number of micro-batches of each round."""
        numerics = workload.numerics
        self._tiled = numerics.micro_batch * workload.context > numerics.mlp_tile

    def seconds(self, operation: Operation) -> float:
        """Return how long an operation computes, for all micro-batches of its round."""
        block = self.inventory.blocks[operation.block]
        tokens = self.tokens[operation.round]
        if block.kind == "embedding":
            return tokens * self.inventory.hidden * self.rates.element * 3 / self.rates.hbm
        args = (self.inventory, block, self.workload.context)
        seconds = tokens * token_seconds(*args, operation.verb, self.rates)
        if operation.verb is Verb.BACKWARD:  # what is kept is not computed again
            kept, attended = self._saved_tokens(operation)
            again, tiles = self._repeated_seconds(block)
            seconds += tokens * (tiles - again)
            seconds -= kept * (recompute_seconds(*args, self.rates) - again)
            _, attention = operations(block, self.workload.context, Verb.FORWARD)
            seconds -= attended * attention / self.rates.attention_flops
        if operation.verb is Verb.LOSS:
            seconds += self._loss_passes_seconds(block, operation)
        return seconds + (self._dequantize_seconds(block) if tokens else 0.0)

    def _repeated_seconds(self, block: Block) -> tuple[float, float]:
        """Return the seconds per token of products of an MLP that runs in tiles.

        They are those that a recomputed layer skips in addition, and those that backward repeats
        tile by tile.
        """
        if not self._tiled:
            return 0.0, 0.0
        tiles = repeated_in_tiles(block, self.inventory.hidden) / self.rates.block_flops
        return (tiles if skips_tiles(block) else 0.0), tiles

    def _loss_passes_seconds(self, block: Block, operation: Operation) -> float:
        """Return how long the loss turn takes for all but its products.

        Every chunk of the loss has a gradient of the head, which is written, and read again to be
        added to a sum in fp32. Logits are written, and read and overwritten by the loss.
        """
        numerics, tokens = self.workload.numerics, self.tokens[operation.round]
        each = numerics.micro_batch * self.workload.context
        chunks = self.micro_batches[operation.round] * -(-each // numerics.loss_chunk)
        added = chunks * trained_share(block) * block.matmul_elements * (2 * self.rates.element + 8)
        logits = tokens * self.inventory.vocabulary * self.rates.element * LOGIT_PASSES
        return (added + logits) / self.rates.hbm

    def kept_passes(self, operation: Operation) -> int:
        """Return for how many micro-batches of its round an operation finds what was saved."""
        if operation.verb is not Verb.BACKWARD:
            return 0
        return min(self._blocks[operation.block].kept, self.micro_batches[operation.round])

    def _saved_tokens(self, operation: Operation) -> tuple[int, int]:
        """Return for how many tokens of its round everything was saved, or attention's results."""
        at, tokens = self._blocks[operation.block], self.tokens[operation.round]
        each = self.workload.numerics.micro_batch * self.workload.context
        kept = min(tokens, at.kept * each)
        return kept, min(tokens, at.attended.stop * each) - kept

    def _dequantize_seconds(self, block: Block) -> float:
        """Return how long it takes to dequantize a block's weights, once for a round."""
        stored = sum(t.stored_elements * t.weight_nbytes for t in block.quantized)
        elements = sum(t.elements for t in block.quantized)
        width = self.rates.element
        if not self.workload.numerics.compiled:
            width += SEPARATE_OPERATIONS
        return (stored + width * elements) / self.rates.hbm


def token_seconds(
    inventory: Inventory, block: Block, context: int, verb: Verb, rates: Rates
) -> float:
    """Return how long a block computes per token."""
    dense, attention = operations(block, context, verb)
    width = rates.element * layer_width(block, inventory.hidden)
    passed = width * rates.passes * share_of(verb)
    return dense / rates.block_flops + attention / rates.attention_flops + passed / rates.hbm


def recompute_seconds(inventory: Inventory, block: Block, context: int, rates: Rates) -> float:
    """Return how long backward takes per token to repeat what it needs of a layer's forward."""
    skipped = 2.0 * block.matmul_elements - recomputed(block)
    forward = token_seconds(inventory, block, context, Verb.FORWARD, rates)
    return forward - skipped / rates.block_flops


def sequences_by_round(workload: Workload, rounds: int) -> list[int]:
    """Return the number of sequences that the rank with the most computes in each round."""
    return [sum(rows for rows, _ in each) for each in planned_shapes(workload, rounds)]
