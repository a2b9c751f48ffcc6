"""Check a batch and split it into micro-batches on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.engine.loss import IGNORE_INDEX, next_targets
from penstock.errors import BatchError
from penstock.model.document_attention import Documents, find_documents
from penstock.model.split import MicroBatch
from penstock.model.varlen_attention import flatten_bounds
from penstock.plan.buffers import micro_batches_per_round
from penstock.plan.workload import Workload

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """A batch as rounds of micro-batches."""

    rounds: Sequence[Sequence[MicroBatch]]
    num_items: int
    """Number of tokens whose label is not -100, except the first token of each document, which
    nothing predicts."""


def split_batch(batch: Batch, workload: Workload, rounds: int, device: torch.device) -> SplitBatch:
    """Split a batch into micro-batches. Raises BatchError if the batch does not fit the workload.

    `input_ids` and `labels` have Hugging Face's meaning. `position_ids`, if given, start at 0 for
    each document.
    """
    ids, labels, positions = _check_batch(batch, workload)
    targets = next_targets(labels, positions)
    size, per_round = workload.numerics.micro_batch, micro_batches_per_round(workload, rounds)
    micros = [
        MicroBatch(
            input_ids=ids[at : at + size].to(device),
            position_ids=positions[at : at + size].to(device),
            targets=targets[at : at + size].to(device),
            bounds=_documents(positions[at : at + size], workload, device),
            number=number,
        )
        for number, at in enumerate(range(0, ids.shape[0], size))
    ]
    grouped = [micros[r * per_round : (r + 1) * per_round] for r in range(rounds)]
    return SplitBatch(grouped, int((targets != IGNORE_INDEX).sum()))


def _documents(
    positions: torch.Tensor, workload: Workload, device: torch.device
) -> Documents | None:
    bounds = find_documents(positions)
    if workload.numerics.attention != "varlen":
        return bounds
    rows, length = positions.shape
    return flatten_bounds(bounds or [[0, length]] * rows, device)


def _check_batch(
    batch: Batch, workload: Workload
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, labels and positions on the host, all of the same shape."""
    if "input_ids" not in batch:
        raise BatchError(
            f"the batch has no input_ids; its keys are: {', '.join(batch) or '(none)'}"
        )
    ids = batch["input_ids"].cpu().long()
    if ids.dim() != 2 or not ids.numel():
        raise BatchError(f"input_ids must be [sequences, tokens], got {tuple(ids.shape)}")
    rows, length = ids.shape
    if rows > workload.batch or length > workload.context:
        raise BatchError(
            f"the batch is {rows} x {length} tokens, but the engine was prepared for "
            f"{workload.batch} x {workload.context}; prepare it with batch={rows} and "
            f"context={length}, or pass smaller batches"
        )
    labels = batch["labels"].cpu().long() if "labels" in batch else ids
    if "attention_mask" in batch:
        labels = torch.where(_check_mask(batch["attention_mask"], ids), labels, IGNORE_INDEX)
    default_positions = torch.arange(length).expand(rows, length)
    positions = batch["position_ids"].cpu().long() if "position_ids" in batch else default_positions
    for name, tensor in (("labels", labels), ("position_ids", positions)):
        if tensor.shape != ids.shape:
            raise BatchError(_shape_message(name, tensor, ids))
    return ids, labels, positions


def _check_mask(given: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mask as booleans: True for tokens that count.

    Padding may only follow the tokens that count: attention runs without a mask, so those tokens
    would attend to padding before them.
    """
    mask = given.cpu().bool()
    if mask.shape != ids.shape:
        raise BatchError(_shape_message("attention_mask", mask, ids))
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise BatchError(
            "attention_mask hides tokens to the left of tokens that count; pad on the right, or "
            "pack documents and pass position_ids that start at 0 for each document"
        )
    return mask


def _shape_message(name: str, tensor: torch.Tensor, ids: torch.Tensor) -> str:
    return (
        f"{name} has shape {tuple(tensor.shape)}, but input_ids has shape {tuple(ids.shape)}; "
        f"they must be equal"
    )
