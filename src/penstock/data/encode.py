"""Encode examples as tokens with a mask of the trained ones, in batches.

A border between trained and untrained text must also be a border between tokens, because at
inference the model gets the untrained text encoded alone. So each text is encoded completely and in
parts, and the two are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from penstock.data.chat import Span
from penstock.data.errors import BadRecordError, MaskError, NoChatTemplateError
from penstock.data.examples import Chat, Completion, Example, RecordFormat, Text
from penstock.data.items import Item
from penstock.data.tokenizer import Tokens

EncodedParts = tuple[list[int], list[list[int]]]
"""The tokens of a complete text, and of its parts between the borders."""


@dataclass(frozen=True, slots=True)
class RenderedExample:
    """An example as one text, before it is encoded."""

    text: str
    """The complete text."""

    spans: tuple[Span, ...]
    """The trained characters, as (start, end)."""

    opens: bool
    """Whether the tokenizer's opening tokens are put before it."""

    closes: bool
    """Whether an end-of-document token is put after it, and trained."""

    ends: bool = True
    """Whether the document ends with it."""

    leaves_end_open: bool = False
    """Whether a trained turn excludes its end-of-turn token."""

    drops_reasoning: bool = False
    """Whether the template removed reasoning from a trained turn."""

    def cuts(self) -> list[int]:
        """Return the borders between trained and untrained characters inside the text."""
        borders = {border for span in self.spans for border in span}
        return sorted(borders - {0, len(self.text)})


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a document, or of a piece of a long one."""

    ids: npt.NDArray[np.int64]
    """Token ids."""

    trained: npt.NDArray[np.uint8]
    """1 for each token that is trained, 0 for the others."""

    ends: bool
    """Whether the document ends with these tokens."""

    leaves_end_open: bool = False
    """Whether a trained turn excludes its end-of-turn token."""

    drops_reasoning: bool = False
    """Whether the template removed reasoning from a trained turn."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """The result of encoding some items."""

    documents: tuple[Encoded, ...]
    """Tokens of the valid items, in order."""

    problems: tuple[str, ...]
    """Problems of invalid items, with file and line number."""


def encode(items: Sequence[Item], tokens: Tokens, format_: RecordFormat) -> Encoding:
    """Encode items in order, and collect the problems of invalid ones.

    If an item has several examples, none of them is encoded unless all are valid.
    """
    rendered: list[RenderedExample] = []
    owners: list[int] = []  # the item of each example
    problems: dict[int, str] = {}
    for number, item in enumerate(items):
        try:
            examples = _render(item, tokens, format_)
        except BadRecordError as problem:
            problems[number] = str(problem)
            continue
        rendered += examples
        owners += [number] * len(examples)
    documents = []
    wholes = tokens.encode([example.text for example in rendered])
    for example, owner, encoded_parts in zip(
        rendered, owners, _encode_parts(rendered, wholes, tokens), strict=True
    ):
        try:
            ids, borders = _check_borders(example, encoded_parts, tokens)
            documents.append((owner, _mask(example, ids, borders, tokens)))
        except BadRecordError as problem:
            problems.setdefault(owner, str(problem))
    return Encoding(
        tuple(document for owner, document in documents if owner not in problems),
        tuple(f"{items[number].where}: {problems[number]}" for number in sorted(problems)),
    )


def _render(item: Item, tokens: Tokens, format_: RecordFormat) -> list[RenderedExample]:
    if item.problem:
        raise BadRecordError(item.problem)
    if item.is_text:
        if format_.pairs:
            raise BadRecordError("is plain text; expected chosen and rejected")
        text = str(item.record["text"])
        whole = ((0, len(text)),)
        return [RenderedExample(text, whole, item.opens, item.closes, ends=item.closes)]
    return [_render_example(example, tokens, item) for example in format_.examples(item.record)]


def _render_example(example: Example, tokens: Tokens, item: Item) -> RenderedExample:
    match example:
        case Text(text):
            return RenderedExample(text, ((0, len(text)),), opens=True, closes=True)
        case Completion(prompt, completion):
            whole = prompt + completion
            return RenderedExample(whole, ((len(prompt), len(whole)),), opens=True, closes=True)
        case Chat() as chat:
            if tokens.chat is None:
                raise NoChatTemplateError(tokens.name, item.where)
            written = tokens.chat.write(chat)
            is_open = tokens.chat.leaves_end_open(written.text, written.spans)
            return RenderedExample(
                written.text, written.spans, False, False,
                leaves_end_open=is_open, drops_reasoning=written.drops_reasoning,
            )  # fmt: skip


def _encode_parts(
    rendered: Sequence[RenderedExample], wholes: Sequence[list[int]], tokens: Tokens
) -> list[EncodedParts]:
    """Return the tokens of each text with those of its parts, encoded in one call."""
    parts = [
        [example.text[a:b] for a, b in pairwise([0, *cuts, len(example.text)])] if cuts else []
        for example in rendered
        for cuts in [example.cuts()]
    ]
    # One call for all parts of all texts: tokenizers are much faster with large batches.
    encoded = iter(tokens.encode([part for texts in parts for part in texts]))
    return [
        (whole, [next(encoded) for _ in texts] if texts else [whole])
        for whole, texts in zip(wholes, parts, strict=True)
    ]


def _check_borders(
    example: RenderedExample, encoded_parts: EncodedParts, tokens: Tokens
) -> tuple[list[int], list[int]]:
    """Return the tokens of a text and the number of them before each border."""
    whole, parts = encoded_parts
    joined = [token for part in parts for token in part]
    borders = list(accumulate(len(part) for part in parts))[:-1]
    if joined == whole:
        return whole, borders
    # Some tokenizers put a blank before every text, so that the parts differ from the complete
    # text. Then the text before each border must still be a prefix of the complete tokens.
    heads = tokens.encode([example.text[:cut] for cut in example.cuts()])
    if all(whole[: len(head)] == head for head in heads):
        return whole, [len(head) for head in heads]
    # A token crosses a border, such as a newline that merges with the first one of the answer. At
    # inference the model gets the tokens of the prompt alone, so train on the same.
    if tokens.decode(joined) == tokens.decode(whole):
        return joined, borders
    cut = example.cuts()[0]
    raise MaskError(
        f"a token crosses the border near {example.text[max(0, cut - 20) : cut + 20]!r}"
    )


def _mask(example: RenderedExample, ids: list[int], borders: list[int], tokens: Tokens) -> Encoded:
    """Add the opening and end tokens, and mark the trained ones."""
    token_at = dict(
        zip([0, *example.cuts(), len(example.text)], [0, *borders, len(ids)], strict=True)
    )
    trained = np.zeros(len(ids), np.uint8)
    for start, end in example.spans:
        trained[token_at[start] : token_at[end]] = 1
    before = tokens.opening if example.opens else []
    after = [tokens.end] if example.closes and (not ids or ids[-1] != tokens.end) else []
    ids = [*before, *ids, *after]
    trained = np.concatenate(
        [np.zeros(len(before), np.uint8), trained, np.ones(len(after), np.uint8)]
    )
    if example.ends and example.opens == example.closes and not trained[1:].any():
        raise BadRecordError(
            "has nothing to train on: the first token of a document is never trained"
        )
    return Encoded(
        np.array(ids, np.int64), trained, example.ends, example.leaves_end_open,
        example.drops_reasoning,
    )  # fmt: skip
