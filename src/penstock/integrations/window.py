"""One engine batch from the micro-batches of an optimizer step.

A trainer hands out one micro-batch after another, each padded to its own longest row. The engine
streams all weights once per call, so it gets all of them in one batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

MASK = (
    "attention_mask {problem}. Penstock takes a mask of the shape of input_ids, which is 1 for "
    "tokens and 0 for padding on their right; {advice}"
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
    is_padding: bool = False
    """Whether this is a token of padding that stands for a row without any other tokens."""

    def __len__(self) -> int:
        return self.ids.shape[0]


@dataclass(frozen=True, slots=True)
class Window:
    """The sequences of an optimizer step, as one batch of rows."""

    batch: dict[str, torch.Tensor]
    """What the engine takes."""
    owners: torch.Tensor
    """By row and token: the number of its micro-batch, or -1 for padding."""
    masked_documents: bool = False
    """Whether a row with several documents had an attention mask, with which transformers lets
    each document attend to those before it."""

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
    with_mask: bool = False,
    needs_labels: bool = True,
) -> Window:
    """Join micro-batches into one batch, with padding on the right.

    Args:
        micro_batches: What the trainer's collator returned.
        context: Longest row.
        pack: Whether sequences share rows.
        full_rows: Whether rows are padded to the context, so that kernels see one shape only.
        with_mask: Whether the batch says which tokens are padding. Losses of single tokens do not
            depend on it; the auxiliary loss of routers and the noise on embeddings do.
        needs_labels: Whether micro-batches without labels are an error.
    """
    parts = [
        _sequences(inputs, owner, needs_labels=needs_labels, keep_short=with_mask)
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
    masked = any(
        inputs.get("attention_mask") is not None and any(len(row) > 1 for row in documents)
        for inputs, documents in zip(micro_batches, parts, strict=True)
    )
    return _pad(
        rows, context if full_rows else length, with_mask=with_mask, masked_documents=masked
    )


def _sequences(
    inputs: Mapping[str, Any], owner: int, *, needs_labels: bool, keep_short: bool
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
    _check_mask(mask, ids)
    # A row of padding alone stays a row, and nothing of it counts.
    lengths = [max(1, length) for length in mask.sum(dim=1, dtype=torch.int64).tolist()]
    given_positions = given.get("position_ids")
    if given_positions is None:
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
    else:
        positions = expand_positions(given_positions, ids).cpu()
    rows = [
        Sequences(ids[row, :n], labels[row, :n], positions[row, :n], owner, not mask[row, 0])
        for row, n in enumerate(lengths)
    ]
    if given_positions is None:
        return [[row] for row in rows]
    return [_documents(row, keep_short=keep_short) for row in rows]


def expand_positions(positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return positions in the shape of the token ids. One row of positions is that of all rows."""
    if positions.dim() == 2 and positions.shape[0] == 1:
        positions = positions.expand(ids.shape[0], -1)
    if positions.shape != ids.shape:
        raise BatchError(
            f"position_ids has shape {tuple(positions.shape)}, but input_ids has shape "
            f"{tuple(ids.shape)}; pass positions of the same shape, or one row for all rows"
        )
    return positions


def _documents(row: Sequences, *, keep_short: bool) -> list[Sequences]:
    """Split a row where its positions start at 0.

    A document of one token predicts nothing, and collators pad packed rows with such documents. It
    is left out unless `keep_short`.
    """
    starts = [0, *(torch.nonzero(row.positions[1:] == 0).flatten() + 1).tolist(), len(row)]
    spans = list(itertools.pairwise(starts))
    kept = spans if keep_short else [(low, high) for low, high in spans if high - low > 1]
    return [
        replace(
            row,
            ids=row.ids[low:high],
            labels=row.labels[low:high],
            positions=row.positions[low:high],
        )
        for low, high in kept or spans[:1]
    ]


def _check_mask(mask: torch.Tensor, ids: torch.Tensor) -> None:
    """Raise BatchError unless a mask hides nothing but padding on the right."""
    if mask.shape != ids.shape:
        raise BatchError(
            MASK.format(
                problem=f"has shape {tuple(mask.shape)}, and input_ids has {tuple(ids.shape)}",
                advice="to pack documents, pass position_ids that start at 0 for each of them",
            )
        )
    tokens = mask != 0
    if bool((mask != tokens).any()):
        problem = f"has values other than 0 and 1, such as {float(mask[mask != tokens][0]):g}"
        raise BatchError(MASK.format(problem=problem, advice="it cannot weight tokens"))
    hidden_before = (tokens[:, 1:] & ~tokens[:, :-1]).any(dim=1)
    if not bool(hidden_before.any()):
        return
    number = int(hidden_before.nonzero()[0])
    columns = tokens[number].nonzero().flatten()
    if int(columns[-1] - columns[0]) + 1 == columns.numel():
        problem = f"hides the beginning of row {number}, as padding on the left does"
        advice = 'set tokenizer.padding_side = "right"'
    else:
        problem = f"hides tokens between others in row {number} (counted from 0)"
        advice = (
            "remove these tokens from the data or, to leave them out of the loss alone, set their "
            "labels to -100"
        )
    raise BatchError(MASK.format(problem=problem, advice=advice))


def _fill_rows(found: Sequence[Sequences], context: int) -> list[list[Sequences]]:
    """Put sequences into rows in their order, as many as fit into each."""
    rows: list[list[Sequences]] = [[]]
    for part in found:
        if rows[-1] and sum(map(len, rows[-1])) + len(part) > context:
            rows.append([])
        rows[-1].append(part)
    return rows


def _pad(
    rows: Sequence[Sequence[Sequences]], length: int, *, with_mask: bool, masked_documents: bool
) -> Window:
    shape = (len(rows), length)
    ids = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    owners = torch.full(shape, -1, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.int64)
    for number, row in enumerate(rows):
        low = 0
        for part in row:
            high = low + len(part)
            ids[number, low:high], labels[number, low:high] = part.ids, part.labels
            positions[number, low:high] = part.positions
            owners[number, low:high] = part.owner
            mask[number, low:high] = not part.is_padding
            low = high
        # Nothing attends to padding. It continues a single document, so that the row stays one
        # call of attention; after several it is a document of its own.
        first = int(row[0].positions[-1]) + 1 if len(row) == 1 else 0
        positions[number, low:] = first + torch.arange(length - low)
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return Window(batch | ({"attention_mask": mask} if with_mask else {}), owners, masked_documents)
