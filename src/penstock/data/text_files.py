"""Plain text files."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

from penstock.data.compression import open_data
from penstock.data.errors import SourceError
from penstock.data.items import FileSource, Item, SourceOffset
from penstock.units import MiB

TEXT_PIECE = 1 * MiB
"""Approximate size of the pieces in which plain text is read, so that files of any size fit."""


class TextFile(FileSource):
    """A file that is one document. A form feed (^L, byte 12) starts another one."""

    def read(self, position: SourceOffset) -> Iterator[Item]:
        offset, number = position.offset, position.number
        # Blank pieces at the beginning of a document, until it has some text. A document without
        # any, however long, is none.
        blank: list[Item] = []
        is_blank = False
        with open_data(self.path, max(0, offset - 1)) as file:
            opens = offset == 0 or file.read(1) == b"\f"
            for piece, is_last in _pieces(file):
                start, offset, number = offset, offset + len(piece), number + 1
                closes = is_last or piece.endswith(b"\f")
                text = self._decode(piece.removesuffix(b"\f"), start)
                where, after = f"{self.name}, byte {start}", SourceOffset(offset, number)
                item = Item(where, {"text": text}, after, "", opens, closes, is_text=True)
                is_blank = (opens or is_blank) and not text.strip()
                if is_blank:
                    blank = [item] if opens else [*blank, item]
                else:
                    yield from (*([] if opens else blank), item)
                    blank = []
                opens = closes

    def _decode(self, piece: bytes, start: int) -> str:
        text = piece if start else piece.removeprefix(codecs.BOM_UTF8)
        try:
            return text.decode()
        except UnicodeDecodeError as wrong:
            at = start + len(piece) - len(text) + wrong.start
            raise SourceError(
                self.name, f"is not UTF-8 text at byte {at}; convert it, for example with iconv"
            ) from None


def _pieces(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Yield pieces of the file from its position, and whether each is the last.

    The end of a piece depends only on its start, so that interrupted and resumed reading splits the
    file at the same positions as uninterrupted reading.
    """
    held, at, is_over = b"", 0, False
    while True:
        if len(held) - at < TEXT_PIECE + 1 and not is_over:
            more = file.read(4 * TEXT_PIECE)
            held, at, is_over = held[at:] + more, 0, not more
            continue
        if at == len(held):
            return
        end = _piece_end(held, at)
        yield held[at:end], end == len(held)
        at = end


def _piece_end(held: bytes, at: int) -> int:
    """Return the end of the piece that begins at `at`."""
    end = min(at + TEXT_PIECE, len(held))
    feed = held.find(b"\f", at, end)
    if feed >= 0:
        return feed + 1
    if end == len(held):
        return end
    # Split before a blank and not after it: most tokenizers attach it to the next word.
    blank = max(held.rfind(b"\n", at + 1, end), held.rfind(b" ", at + 1, end))
    if blank > 0:
        return blank
    while end > at + 1 and held[end] & 0xC0 == 0x80:  # not inside a UTF-8 character
        end -= 1
    return end
