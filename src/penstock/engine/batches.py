"""From a batch as users have it to micro-batches on the device. Room: move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.engine.loss import IGNORED, next_targets
from penstock.errors import BatchError
from penstock.model.attention import Documents, find_documents
from penstock.model.split import MicroBatch
from penstock.model.varlen_attention import cut_rows
from penstock.plan.buffers import round_micro_batches
from penstock.plan.workload import Workload

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch in rounds of micro-batches."""

    rounds: Sequence[Sequence[MicroBatch]]
    items: int
    """Tokens that are trained."""


def cut_batch(batch: Batch, workload: Workload, rounds: int, device: torch.device) -> Cut:
    """`input_ids` and `labels` as Hugging Face has them; `position_ids`, where there are any,
    begin at 0 with each document. Raises BatchError."""
    ids, labels, positions = _checked(batch, workload)
    targets = next_targets(labels, positions)
    size, per_round = workload.numerics.micro_batch, round_micro_batches(workload, rounds)
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
    return Cut(grouped, int((targets != IGNORED).sum()))


def _documents(
    positions: torch.Tensor, workload: Workload, device: torch.device
) -> Documents | None:
    bounds = find_documents(positions)
    if bounds is None or workload.numerics.attention != "varlen":
        return bounds
    return cut_rows(bounds, device)


def _checked(batch: Batch, workload: Workload) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if "input_ids" not in batch:
        raise BatchError(f"a batch needs input_ids; this one has {', '.join(batch) or 'nothing'}")
    ids = batch["input_ids"].cpu().long()
    if ids.dim() != 2 or not ids.numel():
        raise BatchError(f"input_ids must be [sequences, tokens], got {tuple(ids.shape)}")
    rows, length = ids.shape
    if rows > workload.batch or length > workload.context:
        raise BatchError(
            f"the batch is {rows} x {length} tokens, but the engine was prepared for "
            f"{workload.batch} x {workload.context}; prepare it with that batch and context"
        )
    labels = batch["labels"].cpu().long() if "labels" in batch else ids
    if "attention_mask" in batch:
        labels = torch.where(_mask(batch["attention_mask"], ids), labels, IGNORED)
    plain = torch.arange(length).expand(rows, length)
    positions = batch["position_ids"].cpu().long() if "position_ids" in batch else plain
    for name, tensor in (("labels", labels), ("position_ids", positions)):
        if tensor.shape != ids.shape:
            raise BatchError(f"{name} is {tuple(tensor.shape)}, input_ids {tuple(ids.shape)}")
    return ids, labels, positions


def _mask(given: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """True for tokens that count. What comes before one of them would be attended to."""
    mask = given.cpu().bool()
    if mask.shape != ids.shape:
        raise BatchError(f"attention_mask is {tuple(mask.shape)}, input_ids {tuple(ids.shape)}")
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise BatchError(
            "attention_mask hides tokens to the left of others that count; pad on the right, or "
            "pack documents and pass position_ids that begin at 0 with each"
        )
    return mask
