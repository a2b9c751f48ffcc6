"""Examples to tokens with their mask, many at once. Room: show.

Where trained and untrained text meet, tokens must meet too: what the model is asked to continue is
the untrained text encoded alone. So a text is encoded whole and in parts, and the two compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from penstock.data.chat import Span
from penstock.data.errors import BadRecordError, MaskError, NoChatTemplateError
from penstock.data.examples import Chat, Completion, Text, read_example
from penstock.data.sources import Item
from penstock.data.tokenizer import Tokens


@dataclass(frozen=True, slots=True)
class Written:
    """An example as one text, before it is tokens."""

    text: str
    spans: tuple[Span, ...]
    """The trained characters."""

    opens: bool
    """The tokenizer's opening tokens come before it."""

    closes: bool
    """An end-of-document token comes after it, and is trained."""

    ends: bool = True
    """The document ends with it."""

    leaves_end_open: bool = False

    def cuts(self) -> list[int]:
        """Where trained and untrained characters meet, inside the text."""
        inside = {place for span in self.spans for place in span}
        return sorted(inside - {0, len(self.text)})


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a document, or of a part of a long one."""

    ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.uint8]
    ends: bool
    leaves_end_open: bool = False


@dataclass(frozen=True, slots=True)
class Encoding:
    """What came of some items."""

    documents: tuple[Encoded, ...]
    problems: tuple[str, ...]
    """With file and line number."""


def encode(items: Sequence[Item], tokens: Tokens) -> Encoding:
    """The items' tokens, in order, and what is wrong with those that gave none."""
    written, places, problems = [], [], []
    for item in items:
        try:
            written.append(_write(item, tokens))
            places.append(item.where)
        except BadRecordError as problem:
            problems.append((item.where, str(problem)))
    documents = []
    wholes = tokens.encode([one.text for one in written])
    for one, where, found in zip(
        written, places, _with_borders(written, wholes, tokens), strict=True
    ):
        try:
            documents.append(_mask(one, *_checked(one, found, tokens), tokens))
        except BadRecordError as problem:
            problems.append((where, str(problem)))
    order = {item.where: number for number, item in enumerate(items)}
    problems.sort(key=lambda problem: order[problem[0]])
    return Encoding(tuple(documents), tuple(f"{where}: {text}" for where, text in problems))


def _write(item: Item, tokens: Tokens) -> Written:
    if item.problem:
        raise BadRecordError(item.problem)
    if not (item.opens and item.closes):
        text = str(item.record["text"])
        return Written(text, ((0, len(text)),), item.opens, item.closes, ends=item.closes)
    match read_example(item.record):
        case Text(text):
            return Written(text, ((0, len(text)),), opens=True, closes=True)
        case Completion(prompt, completion):
            whole = prompt + completion
            return Written(whole, ((len(prompt), len(whole)),), opens=True, closes=True)
        case Chat() as chat:
            if tokens.chat is None:
                raise NoChatTemplateError(tokens.name, item.where)
            text, spans = tokens.chat.write(chat)
            is_open = tokens.chat.leaves_end_open(text, spans)
            return Written(text, tuple(spans), False, False, leaves_end_open=is_open)


Found = tuple[list[int], list[list[int]]]
"""The tokens of a whole text, and of its parts between the cuts."""


def _with_borders(
    written: Sequence[Written], wholes: Sequence[list[int]], tokens: Tokens
) -> list[Found]:
    """Each text's tokens beside those of its parts. One call for all parts of all texts."""
    parts = [
        [one.text[a:b] for a, b in pairwise([0, *cuts, len(one.text)])] if cuts else []
        for one in written
        for cuts in [one.cuts()]
    ]
    encoded = iter(tokens.encode([part for some in parts for part in some]))
    return [
        (whole, [next(encoded) for _ in some] if some else [whole])
        for whole, some in zip(wholes, parts, strict=True)
    ]


def _checked(one: Written, found: Found, tokens: Tokens) -> tuple[list[int], list[int]]:
    """Tokens, and how many of them lie before each cut, beyond doubt."""
    whole, parts = found
    joined = [token for part in parts for token in part]
    borders = list(accumulate(len(part) for part in parts))[:-1]
    if joined == whole:
        return whole, borders
    # A tokenizer may put a blank before every text it is given: then parts are no measure, but
    # what comes before a cut must still begin the whole.
    heads = tokens.encode([one.text[:cut] for cut in one.cuts()])
    if all(whole[: len(head)] == head for head in heads):
        return whole, [len(head) for head in heads]
    # A token lies across a cut, a line's end that merges with the answer's first one for instance.
    # The model will see the question's tokens alone; so must it here.
    if tokens.decode(joined) == tokens.decode(whole):
        return joined, borders
    cut = one.cuts()[0]
    raise MaskError(
        f"a token lies across its border, near {one.text[max(0, cut - 20) : cut + 20]!r}"
    )


def _mask(one: Written, ids: list[int], borders: list[int], tokens: Tokens) -> Encoded:
    places = dict(zip([0, *one.cuts(), len(one.text)], [0, *borders, len(ids)], strict=True))
    trained = np.zeros(len(ids), np.uint8)
    for start, end in one.spans:
        trained[places[start] : places[end]] = 1
    before = tokens.opening if one.opens else []
    after = [tokens.end] if one.closes and (not ids or ids[-1] != tokens.end) else []
    ids = [*before, *ids, *after]
    trained = np.concatenate(
        [np.zeros(len(before), np.uint8), trained, np.ones(len(after), np.uint8)]
    )
    if one.ends and one.opens == one.closes and not trained[1:].any():
        raise BadRecordError("has nothing to train on: the first token of a document is given")
    return Encoded(np.array(ids, np.int64), trained, one.ends, one.leaves_end_open)
