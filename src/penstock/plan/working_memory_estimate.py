"""Estimate working memory from an inventory alone.

The factors were fitted to Llama in two sizes
(`bench/results/block_memory_h200_2026-11-15.json`), and other families need up to twice as much. So
the estimate is used only where there is no config to trace, such as for an inventory written by
hand, and for models that cannot be traced.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.model.inventory import Block, Inventory
from penstock.plan.working_memory import PartMemory, WorkingMemory
from penstock.plan.workload import Workload
from penstock.roles import EXTENT, WEIGHT_FORMATS, Dtype
from penstock.units import round_up

# Elements alive at the same time per token in addition to the layer's input, as multiples of the
# hidden size, of the MLP's intermediate size, and of queries, keys and values together.
FORWARD_HIDDEN, FORWARD_MLP = 2, 3
BACKWARD_HIDDEN, BACKWARD_MLP, BACKWARD_ATTENTION = 9, 6, 1

TORCH_LOGIT_NBYTES = 12
"""Bytes per logit of a chunk if PyTorch computes the loss: the 16-bit logit, its fp32 copy and the
gradients of both; in fp32, the logit, its log-probability and the gradient. The fused kernel works
in place."""

CALLER_HIDDEN = 6
"""Tensors as large as the hidden states of a batch that a caller's loss needs: the output of the
last layer, what the final norm saves, its output, and their gradients."""

INPUT_NBYTES = 3 * 8 + 2 * 4
"""Bytes per token of token ids, targets and positions (int64), and the bounds of documents
(int32)."""

ARGUMENTS = 2 * 128
"""Values per token of rotary tables, for heads of 128."""


def estimate_working_memory(inventory: Inventory, workload: Workload) -> WorkingMemory:
    """Estimate the working memory of a model; a `WorkingMemorySource`."""
    numerics = workload.numerics
    tokens = numerics.micro_batch * workload.context
    tile = min(tokens, numerics.mlp_tile)
    element = workload.formats().weight_format.weight
    # A block's gradients of one micro-batch exist until they are added to the fp32 sum.
    layer_gradients = element * _largest_parameters(inventory.layers)
    layers = [
        [element * values for values in _layer_values(block, inventory.hidden, tokens, tile)]
        for block in inventory.layers
    ]
    chunk = min(tokens, numerics.loss_chunk)
    logit = element if numerics.loss_kernel == "fused" else TORCH_LOGIT_NBYTES
    head = chunk * (inventory.vocabulary * logit + 2 * element * inventory.hidden)
    tables = inventory.vocabulary * inventory.hidden
    # The head's gradient of one chunk, and the fp32 sum of one micro-batch's.
    head_gradients = (element + 4 if workload.has_head_sum else element) * tables
    if workload.caller_loss is not None:  # `CallerLoss.nbytes` is for the head and the loss
        head = head_gradients = 0
    hidden = tokens * inventory.hidden
    names = [block.name for block in inventory.blocks]
    return WorkingMemory(
        parts=(
            PartMemory(
                name=names[0],
                # The noise and the sum need as much as the output of the embedding, each.
                forward=element * hidden * (3 if numerics.neftune_noise_alpha else 1),
                backward=element * tables,
            ),
            PartMemory(
                name=names[1],
                forward=max(forward for forward, _ in layers),
                backward=max(backward for _, backward in layers) + layer_gradients,
                # Less, in fact: backward needs more than what was saved for it.
                saved=max(backward for _, backward in layers),
            ),
            PartMemory(name=names[-1], forward=head, backward=head + head_gradients),
        ),
        inputs=round_up(INPUT_NBYTES * tokens, EXTENT),
        arguments=round_up(element * ARGUMENTS * tokens, EXTENT),
        origin="estimated",
    )


def estimate_caller_loss(inventory: Inventory, *, tokens: int, dtype: Dtype) -> int:
    """Estimate the device memory of a loss that the caller computes from all logits of a batch.

    That is the output of the last layer and of the norm, the logits, their fp32 copy, the gradients
    of all of these, and the gradients of the head's parameters.
    """
    head, element = inventory.blocks[-1], WEIGHT_FORMATS[dtype].weight
    outputs = -(-head.matmul_elements // inventory.hidden)  # the vocabulary, or a class per label
    by_token = outputs * TORCH_LOGIT_NBYTES + CALLER_HIDDEN * element * inventory.hidden
    held = [inventory.blocks[block] for block in inventory.weight_owners[-1]]
    parameters = sum(block.parameters(True) for block in held)
    return round_up(tokens * by_token + element * parameters, EXTENT)


def _largest_parameters(blocks: Iterable[Block]) -> int:
    return max((block.parameters(True) for block in blocks), default=0)


def _layer_values(block: Block, hidden: int, tokens: int, tile: int) -> tuple[int, int]:
    """Return the values alive in forward and in backward, without gradients of weights."""
    attention = block.query_width + block.key_value_width
    forward = FORWARD_HIDDEN * hidden * tokens + FORWARD_MLP * block.mlp_width * tile
    backward = (BACKWARD_HIDDEN * hidden + BACKWARD_ATTENTION * attention) * tokens
    backward += BACKWARD_MLP * block.mlp_width * tile
    return forward, backward
