"""Turn the arguments of a streamed model's forward pass into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.autograd.default_positions import Positions
from penstock.autograd.model_masks import Spans, find_spans, tokens_of
from penstock.engine.batches import INTEGERS, check_tokens, refuse
from penstock.errors import BatchError, UnsupportedModelError
from penstock.model.attention import IGNORED
from penstock.model.document_attention import (
    Bounds,
    Documents,
    PaddedRows,
    TwoWaySpans,
    find_documents,
)
from penstock.model.inventory import Inventory
from penstock.model.split import Features, MicroBatch
from penstock.model.varlen_attention import flatten_bounds
from penstock.plan.workload import Workload

USED = ("input_ids", "attention_mask", "position_ids")
"""Arguments of the model that reach its layers."""

FALSE = ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits")
"""Arguments that ask for what a streamed model does not return. `use_cache` is taken as False."""


def split_inputs(
    given: Mapping[str, Any], workload: Workload, inventory: Inventory, device: torch.device,
    features: Features | None = None, axes: int = 1,
    positions_of: Callable[[], Positions] | None = None,
) -> list[MicroBatch]:  # fmt: skip
    """Check the arguments of a forward pass, and split its rows into micro-batches.

    `features` take the place of tokens that stand for images. `axes` is the number of positions of
    each token. `positions_of` finds out how the model makes positions for padding on the left.

    Rows may be of any length and number, as long as they fit in the micro-batches of the plan.
    Padding on either side is hidden from the tokens, as an attention mask hides it in transformers.
    Raises BatchError or UnsupportedModelError, before anything is computed.
    """
    _check_arguments(given)
    ids = _integers(given, "input_ids")
    if ids.dim() != 2 or not ids.numel():
        raise BatchError(f"input_ids must be [sequences, tokens], got {tuple(ids.shape)}")
    size = _rows_per_micro_batch(ids.shape, workload)
    check_tokens(ids, ids, inventory.vocabulary)
    positions = _positions(given, ids, inventory, axes)
    masks = given.get("attention_mask")
    mask = tokens_of(masks)
    # Without a mask, transformers finds packed documents by positions that start again.
    bounds = _packed_documents(positions, inventory, axes) if mask is None else None
    starts = None if mask is None else _first_tokens(_mask(mask, ids))
    if starts is not None and inventory.own_attention:
        raise UnsupportedModelError(
            f"{inventory.model} computes attention with its own code, for which padding on the "
            f"left is not supported; pad on the right"
        )
    if (bounds or starts) and inventory.mixes_documents:
        raise UnsupportedModelError(
            f"{inventory.model} cannot be streamed with padding on the left or with packed "
            f"documents: {inventory.mixes_documents} would carry information from one part of a "
            f"row to the next. Pad on the right"
        )
    if starts is not None and given.get("position_ids") is None and positions_of is not None:
        positions = positions_of()(_mask(mask, ids))
    window = next((layer.window for layer in inventory.layers if layer.window is not None), None)
    spans = find_spans(masks, bounds, window, inventory.model)
    if inventory.own_attention and (features is not None or spans is not None):
        raise UnsupportedModelError(
            f"{inventory.model} computes attention with its own code, for which images are not "
            f"supported"
        )
    micros = []
    for number, start in enumerate(range(0, ids.shape[0], size)):
        rows = slice(start, start + size)
        micros.append(
            MicroBatch(
                input_ids=ids[rows].to(device),
                position_ids=positions[..., rows, :].to(device),
                targets=ids[rows],
                bounds=_documents(
                    bounds and bounds[rows],
                    starts and starts[rows],
                    spans and spans[rows],
                    ids[rows].shape,
                    workload,
                    device,
                ),
                number=number,
                features=features and Features(*(part[rows] for part in features)),
            )
        )
    return micros


def _check_arguments(given: Mapping[str, Any]) -> None:
    if given.get("input_ids") is None:
        raise BatchError(
            "a streamed model needs input_ids"
            + (", and takes no inputs_embeds" if given.get("inputs_embeds") is not None else "")
        )
    for name, value in given.items():
        if value is None or name in USED or name == "use_cache":
            continue
        if name in FALSE and value:
            raise BatchError(f"a streamed model does not return what {name}={value} asks for")
        if name == "past_key_values":
            raise BatchError(
                "a streamed model keeps no KV cache; call it with the whole sequence, or use "
                "model.generate"
            )
        if name not in IGNORED and name not in FALSE:
            raise BatchError(
                f"a streamed model does not support the argument {name}; it uses {', '.join(USED)}"
            )


def _rows_per_micro_batch(shape: torch.Size, workload: Workload) -> int:
    """Return how many rows fit in a micro-batch; BatchError if the batch needs too many of them."""
    rows, length = shape
    numerics = workload.numerics
    capacity = numerics.micro_batch * workload.context
    if length > workload.context:
        tokens = max(rows * length, workload.tokens)
        raise BatchError(
            f"the batch has sequences of {length} tokens, but the model was streamed for "
            f"{workload.context}; use penstock.stream(..., tokens={tokens}, context={length}), or "
            f"shorter sequences"
        )
    size = capacity // length
    needed, planned = -(-rows // size), workload.micro_batches
    if needed > planned:
        raise BatchError(
            f"the batch is {rows} x {length} = {rows * length} tokens, which takes {needed} "
            f"micro-batches of {size} rows; the model was streamed for {workload.tokens} tokens in "
            f"{planned} micro-batches of {capacity}. Use penstock.stream(..., "
            f"tokens={needed * capacity}), or smaller batches"
        )
    return size


def _integers(given: Mapping[str, Any], name: str) -> torch.Tensor:
    value = given[name]
    if not isinstance(value, torch.Tensor) or value.dtype not in INTEGERS:
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise BatchError(f"{name} must be a tensor of integers such as torch.int64, got {kind}")
    return value.detach().cpu().long()


def _positions(
    given: Mapping[str, Any], ids: torch.Tensor, inventory: Inventory, axes: int
) -> torch.Tensor:
    """Return a position for each token; by default they count all tokens of a row from 0.

    Models with images may have several positions for each token: `[axes, rows, tokens]`.
    """
    (rows, length), limit = ids.shape, inventory.max_context
    if given.get("position_ids") is None:
        return torch.arange(length).expand(rows, length)
    positions = _integers(given, "position_ids")
    several = positions.dim() == 3 and axes > 1
    fits = positions.shape[0] in (axes, axes + 1) and positions.shape[1:] == (rows, length)
    if several and not fits:
        raise BatchError(
            f"position_ids has shape {tuple(positions.shape)}; {inventory.model} takes "
            f"[{axes}, {rows}, {length}], or [{axes + 1}, {rows}, {length}] for packed documents"
        )
    if not several and positions.shape not in ((rows, length), (1, length), (length,)):
        raise BatchError(
            f"position_ids has shape {tuple(positions.shape)}, but input_ids has shape "
            f"{tuple(ids.shape)}; they must be equal"
        )
    positions = positions if several else positions.expand(rows, length)
    outside = (positions < 0) | (positions >= (2**62 if limit is None else limit))
    rule = "of 0 or more" if limit is None else f"from 0 to {limit - 1}"
    refuse("position_ids", positions, outside, f"the model has positions {rule}")
    return positions


def _packed_documents(positions: torch.Tensor, inventory: Inventory, axes: int) -> Bounds | None:
    """Return where the documents begin that transformers finds in the positions."""
    if axes == 1:
        return find_documents(positions)
    if positions.dim() == 3:  # the first of one more axis than needed is for documents
        return find_documents(positions[0]) if positions.shape[0] == axes + 1 else None
    if bool((positions[:, 1:] == 0).any()):
        raise BatchError(
            f"position_ids start again within a row, which {inventory.model} does not take for a "
            f"new document; pass positions of shape [{axes + 1}, rows, tokens], of which the first "
            f"count from 0 in each document"
        )
    return None


def _mask(given: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return a mask as booleans: True for tokens, False for padding on either side of them."""
    if not isinstance(given, torch.Tensor) or given.shape != ids.shape:
        shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise BatchError(
            f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}, got {shape}"
        )
    values = given.detach().cpu()
    mask = values.bool()
    refuse("attention_mask", values, values != mask, "it must be 1 for tokens and 0 for padding")
    later = mask.flip(1).cumsum(1).flip(1) > 0
    hole = ~mask & (mask.cumsum(1) > 0) & later
    refuse(
        "attention_mask",
        values,
        hole,
        "it hides a token between others, but a streamed model supports padding only before the "
        "first token of a row and after its last",
    )
    return mask


def _first_tokens(mask: torch.Tensor) -> list[int] | None:
    """Return the first token of each row; None if no row has padding on its left.

    Padding after the last token is behind all tokens, and attention hides later tokens anyway.
    """
    first: list[int] = mask.long().argmax(dim=1).tolist()  # 0 for rows that are all padding
    return first if any(first) else None


def _documents(
    bounds: Bounds | None, starts: list[int] | None, spans: Spans | None, shape: torch.Size,
    workload: Workload, device: torch.device,
) -> Documents | None:  # fmt: skip
    """Return what attention works on, for the rows of one micro-batch."""
    rows, length = shape
    if spans is not None and any(spans):
        first = starts or [0] * rows
        own = PaddedRows(first, length).bounds if bounds is None else bounds
        return TwoWaySpans(own, first, spans)
    if bounds is not None and all(len(row) == 2 for row in bounds):
        bounds = None
    padded = PaddedRows(starts, length) if starts is not None and any(starts) else None
    if workload.numerics.attention != "varlen":
        return padded or bounds
    if padded is None:
        return flatten_bounds(bounds or [[0, length]] * rows, device)
    padding = torch.arange(length) < torch.tensor(padded.starts)[:, None]
    return flatten_bounds(padded.bounds, device)._replace(padding=padding.to(device))
