"""Datasets on the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from penstock.data.errors import SourceError
from penstock.data.items import Item, SourceOffset, import_library
from penstock.data.tables import row_item

_ID = re.compile(
    r"(?P<owner>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+)(?=:))?(?::(?P<split>[\w.\[\]%:+-]*))?"
)
_SLICE = re.compile(r"(?P<split>[\w.-]+)(?:\[(?P<first>\d*):(?P<end>\d*)\])?")


@dataclass(frozen=True, slots=True)
class HubId:
    """A part of a dataset: `owner/name`, `owner/name:split` or `owner/name:config:split`."""

    owner: str
    config: str
    split: str

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Parse a name; None if it is not an ID."""
        match = _ID.fullmatch(name)
        if match is None:
            return None
        return cls(match["owner"], match["config"] or "", match["split"] or "train")


class HubDataset:
    """A dataset on the Hub, downloaded completely or read as a stream."""

    def __init__(self, name: str, hub_id: HubId, *, streaming: bool) -> None:
        self.name, self._id, self._streaming = name, hub_id, streaming
        about = "no such file; to read it as a dataset from the Hugging Face Hub"
        self._library = import_library("datasets", "datasets", name, about)
        split, self._first, self._count = hub_id.split, 0, None
        if streaming:
            split, self._first, self._count = _parse_slice(name, hub_id.split)
        config = (hub_id.config,) if hub_id.config else ()
        options: dict[str, Any] = {"streaming": True} if streaming else {}
        try:
            self._rows = self._library.load_dataset(hub_id.owner, *config, split=split, **options)
            self.size = self._count_rows(split)
        except Exception as error:  # network, permission, unknown split: quote the library
            raise SourceError(
                name, f"there is no such file, and it cannot be loaded from the Hub: {error}"
            ) from None

    def identity(self) -> list[str | int]:
        if self._streaming:
            return [self.name, "stream", _revision(self._id.owner)]
        return [self.name, self.size, str(getattr(self._rows, "_fingerprint", ""))]

    def read(self, position: SourceOffset) -> Iterator[Item]:
        if not self._streaming:
            for row in range(position.offset, self.size):
                yield row_item(self.name, row + 1, self._rows[row])
            return
        rows = self._rows.skip(self._first + position.offset)
        if self._count is not None:
            rows = rows.take(max(0, self._count - position.offset))
        for row, record in enumerate(rows, position.offset + 1):
            yield row_item(self.name, row, record)

    def _count_rows(self, split: str) -> int:
        if not self._streaming:
            return len(self._rows)
        if self._count is not None:
            return self._count
        splits = getattr(getattr(self._rows, "info", None), "splits", None) or {}
        return int(getattr(splits.get(split), "num_examples", 0) or 0)


def _parse_slice(name: str, text: str) -> tuple[str, int, int | None]:
    """Parse `train[10:20]` into the split, the first row and the number of rows, if limited."""
    match = _SLICE.fullmatch(text)
    if match is None:
        raise SourceError(
            name, f"cannot stream {text!r}; name one split, or rows of it: train[:1000]"
        )
    first, end = int(match["first"] or 0), match["end"]
    return match["split"], first, max(0, int(end) - first) if end else None


def _revision(owner: str) -> str:
    """Return the commit of a dataset, so that its tokens are cached until it changes."""
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(owner).sha)
    except Exception:  # no network, or another mirror: the ID alone must do
        return ""
