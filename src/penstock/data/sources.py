"""Find the sources of examples: files, directories, saved datasets and datasets on the Hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.data.compression import COMPRESSED, data_suffix
from penstock.data.csv_files import CsvFile
from penstock.data.errors import SourceError
from penstock.data.hub import HubDataset, HubId
from penstock.data.items import Source
from penstock.data.json_files import open_json
from penstock.data.tables import ArrowFiles, ParquetFile, is_saved_dataset, open_saved_dataset
from penstock.data.text_files import TextFile

JSON_SUFFIXES = {".jsonl", ".ndjson", ".json"}
TEXT_SUFFIXES = {".txt", ".text", ".md"}
CSV_SUFFIXES = {".csv", ".tsv"}
TABLE_SUFFIXES = {".parquet", ".arrow"}
KNOWN = (
    "JSON (.jsonl, .ndjson, .json), .csv, .tsv, text (.txt, .text, .md), all of them also with "
    ".gz, .bz2, .xz or .zst, and .parquet and .arrow"
)

OnNote = Callable[[str], None]
"""Called with a sentence for the user."""


def find_sources(
    sources: str | Path | Sequence[str | Path],
    *,
    streaming: bool = False,
    on_note: OnNote = lambda text: None,
) -> list[list[Source]]:
    """Find the sources for paths, directories and dataset IDs: one list for each of them.

    A directory's files are sorted. `on_note` is called with a sentence about files that are not
    read.
    """
    named = [sources] if isinstance(sources, str | Path) else list(sources)
    if not named:
        raise SourceError("data", "no file was given; pass a file, a directory or a dataset ID")
    if "" in named:  # as a path, it would be the current directory
        raise SourceError("data", 'got "" as a name; pass a file, a directory or a dataset ID')
    return [_find_source(str(name), streaming, on_note) for name in named]


def _find_source(name: str, streaming: bool, on_note: OnNote) -> list[Source]:
    path = Path(name)
    if path.is_dir():
        return [open_saved_dataset(path)] if is_saved_dataset(path) else _files_in(path, on_note)
    if path.is_file():
        return [_open_file(path)]
    if path.exists():
        raise SourceError(
            name, "is not a regular file; data is read more than once, so save it to a file"
        )
    folder, _, split = name.rpartition(":")
    if folder and Path(folder).is_dir() and is_saved_dataset(Path(folder)):
        return [open_saved_dataset(Path(folder), split)]
    hub_id = HubId.parse(name)
    if hub_id is not None and not _is_known(path):
        return [HubDataset(name, hub_id, streaming=streaming)]
    hint = "" if path.suffix else "; a dataset on the Hub is named OWNER/NAME"
    raise SourceError(name, f"no such file or directory{hint}")


def _files_in(directory: Path, on_note: OnNote) -> list[Source]:
    """Open the data files of a directory, and say what else is in it."""
    visible = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    files = [path for path in visible if path.is_file() and _is_known(path)]
    others = [path.name + "/" * path.is_dir() for path in visible if path not in files]
    if not files:
        found = f"; it has {_listed(others)}" if others else ""
        raise SourceError(str(directory), f"contains no data files{found}. Penstock reads {KNOWN}")
    if others:
        on_note(f"{directory}: not read: {_listed(others)}. Penstock reads {KNOWN}")
    texts = [path.name for path in files if data_suffix(path) in TEXT_SUFFIXES]
    if len(texts) not in (0, len(files)):
        on_note(f"{directory}: read as plain text: {_listed(texts)}")
    return [_open_file(path) for path in files]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _is_known(path: Path) -> bool:
    is_compressed = path.suffix.lower() in COMPRESSED
    plain = JSON_SUFFIXES | TEXT_SUFFIXES | CSV_SUFFIXES
    return data_suffix(path) in (plain if is_compressed else plain | TABLE_SUFFIXES)


def _open_file(path: Path) -> Source:
    suffix = data_suffix(path) if _is_known(path) else ""
    if suffix in JSON_SUFFIXES:
        return open_json(path)
    if suffix in TEXT_SUFFIXES:
        return TextFile(path)
    if suffix in CSV_SUFFIXES:
        return CsvFile(path)
    if suffix == ".parquet":
        return ParquetFile(path)
    if suffix == ".arrow":
        return ArrowFiles(str(path), [path])
    raise SourceError(str(path), f"has an unknown format; Penstock reads {KNOWN}")
