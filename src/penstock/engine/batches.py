"""Check a batch and split it into micro-batches on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.engine.loss import IGNORE_INDEX, next_targets
from penstock.errors import BatchError, UnsupportedModelError
from penstock.model.document_attention import Documents, find_documents
from penstock.model.embedding_noise import document_scales
from penstock.model.inventory import Inventory
from penstock.model.split import MicroBatch
from penstock.model.varlen_attention import flatten_bounds
from penstock.plan.buffers import deal_micro_batches
from penstock.plan.workload import Workload

Batch = Mapping[str, torch.Tensor]

KEYS = ("input_ids", "labels", "position_ids", "attention_mask")
"""What a batch may contain. Only `input_ids` is required."""

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """A batch as rounds of micro-batches."""

    rounds: Sequence[Sequence[MicroBatch]]
    """The micro-batches that this rank computes."""
    sizes: Sequence[int]
    """By round: the number of micro-batches of all ranks."""
    num_items: int
    """Number of tokens whose label is not -100, except the first token of each document, which
    nothing predicts."""
    packed: bool
    """Whether trained tokens follow another document in their row, in the whole batch. A document
    without trained tokens, such as padding, may follow another one."""


def split_batch(
    batch: Batch, workload: Workload, inventory: Inventory, rounds: int, device: torch.device,
    rank: int = 0,
) -> SplitBatch:  # fmt: skip
    """Check a batch and split it into micro-batches. Every rank gets the whole batch.

    `input_ids` and `labels` have Hugging Face's meaning. `position_ids`, if given, start at 0 for
    each document. `attention_mask`, if given, is 1 for tokens and 0 for padding on their right.

    Raises BatchError, which names row, column and value, if a kernel could not use the batch: a
    lookup outside of an embedding or of the logits ends a GPU process, or goes unnoticed.
    """
    ids, labels, positions, counts = _check_batch(batch, workload, inventory)
    targets = next_targets(labels, positions)
    noisy = workload.numerics.neftune_noise_alpha > 0
    scales = document_scales(positions, counts) if noisy else None
    size = workload.numerics.micro_batch

    def micro_batch(number: int) -> MicroBatch:
        rows = slice(number * size, (number + 1) * size)
        return MicroBatch(
            input_ids=ids[rows].to(device),
            position_ids=positions[rows].to(device),
            targets=targets[rows].to(device),
            bounds=_documents(positions[rows], workload, device),
            number=number,
            noise_scales=None if scales is None else scales[rows].to(device),
            mask=None if bool(counts[rows].all()) else counts[rows],
        )

    numbers = range(-(-ids.shape[0] // size))
    dealt = [deal_micro_batches(numbers, workload, rounds, each) for each in range(workload.world)]
    return SplitBatch(
        [[micro_batch(number) for number in each] for each in dealt[rank]],
        [sum(map(len, each)) for each in zip(*dealt, strict=True)],
        int((targets != IGNORE_INDEX).sum()),
        packed=bool((((positions == 0).cumsum(1) > 1) & (targets != IGNORE_INDEX)).any()),
    )


def check_documents(batch: SplitBatch, inventory: Inventory) -> None:
    """Raise UnsupportedModelError if a packed document would see the one before it."""
    if batch.packed and inventory.mixes_documents:
        raise UnsupportedModelError(
            f"{inventory.model} cannot train on packed documents: {inventory.mixes_documents} "
            f"would carry information from one document of a row to the next. Pass one "
            f"document per row, padded on the right"
        )


def _documents(
    positions: torch.Tensor, workload: Workload, device: torch.device
) -> Documents | None:
    bounds = find_documents(positions)
    if workload.numerics.attention != "varlen":
        return bounds
    rows, length = positions.shape
    return flatten_bounds(bounds or [[0, length]] * rows, device)


def _check_batch(
    batch: Batch, workload: Workload, inventory: Inventory
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, labels, positions and which tokens are no padding, all on the host."""
    if "input_ids" not in batch:
        raise BatchError(
            f"the batch has no input_ids; its keys are: {', '.join(batch) or '(none)'}"
        )
    if unknown := [name for name in batch if name not in KEYS]:
        raise BatchError(
            f"the batch has {', '.join(unknown)}, which the engine would ignore; it uses "
            f"{', '.join(KEYS)}. Remove what the model does not need"
        )
    ids = _host_integers(batch, "input_ids")
    if ids.dim() != 2 or not ids.numel():
        raise BatchError(f"input_ids must be [sequences, tokens], got {tuple(ids.shape)}")
    rows, length = ids.shape
    if rows > workload.batch or length > workload.context:
        raise BatchError(
            f"the batch is {rows} x {length} tokens, but the engine was prepared for "
            f"{workload.batch} x {workload.context}; prepare it with batch={rows} and "
            f"context={length}, or pass smaller batches"
        )
    labels = _host_integers(batch, "labels", ids) if "labels" in batch else ids
    positions = torch.arange(length).expand(rows, length)
    if "position_ids" in batch:
        positions = _host_integers(batch, "position_ids", ids)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if "attention_mask" in batch:
        mask = _check_mask(batch["attention_mask"], ids)
        labels = torch.where(mask, labels, IGNORE_INDEX)
        if "position_ids" in batch:
            positions = _continue_positions(positions, mask, inventory.max_context)
    check_tokens(ids, labels, inventory.vocabulary)
    if "position_ids" in batch:
        _check_positions(positions, inventory.max_context)
    return ids, labels, positions, mask


def _host_integers(batch: Batch, name: str, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor of integers, of the shape of `ids` if given, as int64 on the host."""
    given = batch[name]
    _check_tensor(name, given, ids)
    if given.dtype not in INTEGERS:
        raise BatchError(f"{name} must be integers such as torch.int64, got {given.dtype}")
    return given.cpu().long()


def _check_tensor(name: str, given: object, ids: torch.Tensor | None) -> None:
    if not isinstance(given, torch.Tensor):
        raise BatchError(f"{name} must be a tensor, got {type(given).__name__}")
    if ids is not None and given.shape != ids.shape:
        raise BatchError(
            f"{name} has shape {tuple(given.shape)}, but input_ids has shape {tuple(ids.shape)}; "
            f"they must be equal"
        )


def _check_mask(given: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mask as booleans: True for tokens that count.

    Padding may only follow the tokens that count: attention runs without a mask, so those tokens
    would attend to padding before them.
    """
    _check_tensor("attention_mask", given, ids)
    values = given.cpu()
    mask = values.bool()
    refuse(
        "attention_mask",
        values,
        values != mask,
        "it must be 1 for tokens and 0 for padding. To pack documents, pass position_ids that "
        "start at 0 for each document instead",
    )
    hidden = torch.zeros_like(mask)
    hidden[:, :-1] = mask[:, 1:] & ~mask[:, :-1]
    refuse(
        "attention_mask",
        values,
        hidden,
        "it hides a token to the left of one that counts; pad on the right, or pack documents and "
        "pass position_ids that start at 0 for each document",
    )
    return mask


def _continue_positions(
    positions: torch.Tensor, mask: torch.Tensor, limit: int | None
) -> torch.Tensor:
    """Let the positions of padding continue those of the tokens before it.

    Nothing looks at padding, and what a tokenizer writes there, such as 1, is no position of a
    document. After the model's last position, padding starts at 0 as a document of its own.
    """
    last = mask.sum(dim=1, keepdim=True) - 1
    end = positions.gather(1, last.clamp(min=0)).where(last >= 0, -1)
    following = end + torch.arange(positions.shape[1]) - last
    if limit is not None:
        following = following.remainder(limit)
    return torch.where(mask, positions, following)


def check_tokens(ids: torch.Tensor, labels: torch.Tensor, vocabulary: int) -> None:
    inside = f"a token from 0 to {vocabulary - 1}: the model's embedding has {vocabulary} rows"
    refuse(
        "input_ids",
        ids,
        (ids < 0) | (ids >= vocabulary),
        f"it must be {inside}. Does the tokenizer match the model?",
    )
    if labels is not ids:
        refuse(
            "labels",
            labels,
            ((labels < 0) | (labels >= vocabulary)) & (labels != IGNORE_INDEX),
            f"it must be {IGNORE_INDEX}, for a token that does not count, or {inside}",
        )


def _check_positions(positions: torch.Tensor, limit: int | None) -> None:
    """Check that positions count up by 1, and start at 0 where a document begins.

    A row's first document may start later, as the second half of a document does.
    """
    outside = positions < 0
    if limit is not None:
        outside |= positions >= limit
    rule = "of 0 or more" if limit is None else f"from 0 to {limit - 1}"
    refuse("position_ids", positions, outside, f"the model has positions {rule}")
    jumps = torch.zeros_like(outside)
    before, here = positions[:, :-1], positions[:, 1:]
    jumps[:, 1:] = (here != 0) & (here != before + 1)
    refuse(
        "position_ids",
        positions,
        jumps,
        "it must be 1 more than the position before it, or 0 where a document begins",
    )


def refuse(name: str, values: torch.Tensor, bad: torch.Tensor, rule: str) -> None:
    """Raise BatchError with the first bad value, if there is one."""
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise BatchError(
            f"{name} is {values[row, column].item()} in row {row}, column {column} (counted from "
            f"0); {rule}"
        )
