"""Record the files of a directory, with sizes and checksums, in its manifest.

Writers sum the bytes of weights and states while they write them. The small files are read again,
from the page cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.checkpoint.checksums import checksum_file, combine, crc32c, to_hex
from penstock.checkpoint.errors import CorruptShardError
from penstock.checkpoint.manifest import (
    COMPLETE,
    SHARD_SUFFIX,
    FileRecord,
    Manifest,
    find_manifest,
    write_manifest,
)
from penstock.checkpoint.model_files import list_model_files
from penstock.checkpoint.safetensors_header import PREFIX_NBYTES, header_nbytes, parse_header
from penstock.checkpoint.training_state import STATE
from penstock.units import MiB

_PIECE_NBYTES = 4 * MiB


def record_model(folder: Path, shards: Mapping[str, FileRecord], *, step: int) -> None:
    """Write a manifest of the model in a directory, which may also have files of other programs."""
    small = [*list_model_files(folder), *([STATE] if (folder / STATE).is_file() else [])]
    files = dict(shards) | {name: _record(folder / name) for name in small}
    write_manifest(folder, Manifest(step=step, files=files))


def record_checkpoint(folder: Path, names: Iterable[str], *, step: int, run_id: str) -> None:
    """Write the manifest of a checkpoint that is complete apart from it.

    The engine's own manifest, if there is one, has the checksums of weights and states.
    """
    earlier = find_manifest(folder)
    shards = {} if earlier is None else earlier.files
    files = {
        name: shards[name] if name.endswith(SHARD_SUFFIX) and name in shards
        else _record(folder / name)
        for name in names
        if name != COMPLETE
    }  # fmt: skip
    write_manifest(folder, Manifest(step=step, run_id=run_id, files=files))


def _record(path: Path) -> FileRecord:
    if path.name.endswith(SHARD_SUFFIX):
        try:
            return _record_shard(path)
        except CorruptShardError:
            pass  # another program's file, with a format of its own
    return FileRecord(nbytes=os.stat(path).st_size, crc32c=to_hex(checksum_file(path)))


def _record_shard(path: Path) -> FileRecord:
    """Read a shard that no writer of Penstock has summed."""
    nbytes = os.stat(path).st_size
    with open(path, "rb") as file:
        prefix = file.read(PREFIX_NBYTES)
        raw = file.read(header_nbytes(prefix, nbytes, str(path)))
        whole = header = crc32c(prefix + raw)
        start = len(prefix) + len(raw)
        tensors = {}
        entries = parse_header(raw, nbytes - start, str(path)).values()
        for entry in sorted(entries, key=lambda entry: entry.start):
            left, crc = entry.nbytes, 0
            while left and (piece := file.read(min(left, _PIECE_NBYTES))):
                crc, left = crc32c(piece, crc), left - len(piece)
            tensors[entry.name] = to_hex(crc)
            whole = combine(whole, crc, entry.nbytes)
    return FileRecord(nbytes=nbytes, crc32c=to_hex(whole), header=to_hex(header), tensors=tensors)
