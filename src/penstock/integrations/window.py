"""One engine batch from the micro-batches of an optimizer step.

A trainer hands out one micro-batch after another, each padded to its own longest row. The engine
streams all weights once per call, so it gets all of them in one batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.loss import IGNORE_INDEX
from penstock.errors import BatchError

REDUNDANT = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What collators for packed rows add for attention kernels. It follows from `position_ids`."""

NO_LABELS = (
    "the batch has no labels, so there is no loss to train on; its keys are {keys}. Add labels "
    "to the dataset, or use a collator that makes them, such as "
    "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
)

TOO_LONG = (
    "a sequence has {length} tokens, but memory was planned for {context}. Truncate the data to "
    "{context} tokens (max_length of SFTConfig, or truncation of the tokenizer), or pass "
    "PenstockConfig(context={length})"
)

TOO_MANY = (
    "an optimizer step has {rows} sequences, but memory was planned for {batch}, which is "
    "per_device_train_batch_size x gradient_accumulation_steps. A batch sampler of your own must "
    "not exceed them"
)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Token ids, labels and positions of some tokens, and the micro-batch they are from."""

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    owner: int

    def __len__(self) -> int:
        return self.ids.shape[0]


@dataclass(frozen=True, slots=True)
class Window:
    """The sequences of an optimizer step, as one batch of rows."""

    batch: dict[str, torch.Tensor]
    """What the engine takes."""
    owners: torch.Tensor
    """By row and token: the number of its micro-batch, or -1 for padding."""

    @property
    def targets(self) -> torch.Tensor:
        """Which tokens predict a token that counts."""
        following = self.batch["labels"] != IGNORE_INDEX
        following &= self.batch["position_ids"] != 0
        targets = torch.zeros_like(following)
        targets[:, :-1] = following[:, 1:]
        return targets

    def split(self, rows: int) -> list[dict[str, torch.Tensor]]:
        """Return the batch in parts of at most so many rows."""
        count = self.owners.shape[0]
        return [
            {name: tensor[low : low + rows] for name, tensor in self.batch.items()}
            for low in range(0, count, rows)
        ]


def make_window(
    micro_batches: Sequence[Mapping[str, Any]],
    *,
    context: int,
    pack: bool = False,
    full_rows: bool = False,
    needs_labels: bool = True,
) -> Window:
    """Join micro-batches into one batch, with padding on the right.

    Args:
        micro_batches: What the trainer's collator returned.
        context: Longest row.
        pack: Whether sequences share rows.
        full_rows: Whether rows are padded to the context, so that kernels see one shape only.
        needs_labels: Whether micro-batches without labels are an error.
    """
    parts = [
        _sequences(inputs, owner, needs_labels=needs_labels)
        for owner, inputs in enumerate(micro_batches)
    ]
    found = [part for rows in parts for row in rows for part in row]
    for part in found:
        if len(part) > context:
            raise BatchError(TOO_LONG.format(length=len(part), context=context))
    # Rows that arrive packed share rows again. In their order, they need no more rows than before,
    # also where a collator has joined all rows of a micro-batch into one.
    share = pack or any(len(row) > 1 for rows in parts for row in rows)
    rows = _fill_rows(found, context) if share else [[part] for part in found]
    length = max(sum(map(len, row)) for row in rows)
    return _pad(rows, context if full_rows else length)


def _sequences(
    inputs: Mapping[str, Any], owner: int, *, needs_labels: bool
) -> list[list[Sequences]]:
    """Return the documents of each row of a micro-batch, without padding."""
    if "input_ids" not in inputs:
        raise BatchError(f"the batch has no input_ids; its keys are: {', '.join(inputs)}")
    if needs_labels and inputs.get("labels") is None:
        raise BatchError(NO_LABELS.format(keys=", ".join(inputs)))
    given = {k: v for k, v in inputs.items() if v is not None}
    if "position_ids" in given:
        given = {k: v for k, v in given.items() if k not in REDUNDANT}
    known = ("input_ids", "labels", "position_ids", "attention_mask")
    if unknown := [name for name in given if name not in known]:
        raise BatchError(
            f"the batch has {', '.join(unknown)}, which Penstock would ignore; it uses "
            f"{', '.join(known)}. Remove the columns from the dataset, or leave "
            f"remove_unused_columns at True"
        )
    ids = given["input_ids"].cpu()
    labels = given["labels"].cpu() if "labels" in given else torch.full_like(ids, IGNORE_INDEX)
    mask = given["attention_mask"].cpu() if "attention_mask" in given else torch.ones_like(ids)
    positions = given["position_ids"].cpu() if "position_ids" in given else None
    rows = range(ids.shape[0])
    if positions is None:
        lengths = [_tokens_in(mask[row]) for row in rows]
        return [
            [Sequences(ids[row, :n], labels[row, :n], torch.arange(n), owner)]
            for row, n in zip(rows, lengths, strict=True)
        ]
    return [_documents(ids[row], labels[row], positions[row], mask[row], owner) for row in rows]


def _documents(
    ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, owner: int
) -> list[Sequences]:
    """Split a row where its positions start at 0, and leave out the padding on its right."""
    length = _tokens_in(mask)
    starts = [0, *(torch.nonzero(positions[1:length] == 0).flatten() + 1).tolist(), length]
    spans = list(itertools.pairwise(starts))
    # A document of one token predicts nothing; collators pad packed rows with such documents.
    kept = [(low, high) for low, high in spans if high - low > 1] or spans[:1]
    return [
        Sequences(ids[low:high], labels[low:high], positions[low:high], owner) for low, high in kept
    ]


def _tokens_in(mask: torch.Tensor) -> int:
    """Return the number of tokens before the padding on the right of a row."""
    length = int(mask.sum())
    if bool((mask != (torch.arange(mask.shape[0]) < length)).any()):
        raise BatchError(
            "attention_mask has zeros to the left of ones. Penstock takes padding on the right "
            'only: set tokenizer.padding_side = "right"'
        )
    return max(length, 1)  # a row of padding alone stays a row, and nothing of it counts


def _fill_rows(found: Sequence[Sequences], context: int) -> list[list[Sequences]]:
    """Put sequences into rows in their order, as many as fit into each."""
    rows: list[list[Sequences]] = [[]]
    for part in found:
        if rows[-1] and sum(map(len, rows[-1])) + len(part) > context:
            rows.append([])
        rows[-1].append(part)
    return rows


def _pad(rows: Sequence[Sequence[Sequences]], length: int) -> Window:
    shape = (len(rows), length)
    ids = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    owners = torch.full(shape, -1, dtype=torch.int64)
    for number, row in enumerate(rows):
        low = 0
        for part in row:
            high = low + len(part)
            ids[number, low:high], labels[number, low:high] = part.ids, part.labels
            positions[number, low:high] = part.positions
            owners[number, low:high] = part.owner
            low = high
        # Nothing attends to padding. It continues a single document, so that the row stays one
        # call of attention; after several it is a document of its own.
        first = int(row[0].positions[-1]) + 1 if len(row) == 1 else 0
        positions[number, low:] = first + torch.arange(length - low)
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return Window(batch, owners)
