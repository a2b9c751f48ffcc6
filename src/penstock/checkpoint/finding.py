"""Which files hold a model's weights. Room: keep."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.checkpoint.errors import (
    CheckpointReadError,
    CorruptIndexError,
    MissingShardError,
    NoWeightsError,
    PickledWeightsError,
)
from penstock.errors import RecordError
from penstock.record_files import parse

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".bin.index.json")
_MAX_INDEX_NBYTES = 100_000_000

Shards = dict[Path, tuple[str, ...] | None]
"""Files, and the tensors to take from each; None is all of them."""


def find_shards(path: Path, stem: str) -> Shards:
    """The files of a directory, an index, or one file, as transformers would choose them."""
    if not os.path.exists(path):
        raise NoWeightsError(str(path), "there is no such file or directory")
    if os.path.isdir(path):
        return _find_in(path, stem)
    if path.name.endswith(_PICKLED):
        raise PickledWeightsError(str(path))
    return _follow(path) if path.name.endswith(".index.json") else {path: None}


def _find_in(folder: Path, stem: str) -> Shards:
    single = folder / f"{stem}.safetensors"
    index = folder / f"{stem}.safetensors.index.json"
    if os.path.exists(single):
        return {single: None}
    if os.path.exists(index):
        return _follow(index)
    try:
        names = sorted(os.listdir(folder))
    except OSError as failed:
        raise CheckpointReadError(str(folder), failed.errno or 0) from failed
    shards = [n for n in names if n.startswith(f"{stem}-") and n.endswith(".safetensors")]
    if shards:
        raise NoWeightsError(
            str(folder),
            f"there is {shards[0]} but no {index.name}, which says what the shards hold; download "
            f"or copy it too",
        )
    pickled = [name for name in names if name.endswith(_PICKLED) and name != "training_args.bin"]
    if pickled:
        raise PickledWeightsError(str(folder / pickled[0]))
    raise NoWeightsError(
        str(folder), f"there is neither {single.name} nor {index.name}; give a directory that has"
    )


def _follow(index: Path) -> Shards:
    by_file: dict[str, list[str]] = {}
    for tensor, name in _weight_map(index).items():
        # A name with a path in it could lead anywhere.
        plain = isinstance(name, str) and name.isprintable() and name not in ("", ".", "..")
        if not plain or "/" in str(name):
            raise CorruptIndexError(
                str(index), f"weight_map must name files beside it, got {str(name)[:60]!r}"
            )
        by_file.setdefault(str(name), []).append(tensor)
    missing = [name for name in sorted(by_file) if not os.path.exists(index.parent / name)]
    if missing:
        raise MissingShardError(str(index), missing=missing, total=len(by_file))
    return {index.parent / name: tuple(tensors) for name, tensors in sorted(by_file.items())}


def _weight_map(index: Path) -> dict[str, object]:
    try:
        nbytes = index.stat().st_size
        if nbytes > _MAX_INDEX_NBYTES:
            raise CorruptIndexError(str(index), f"has {nbytes} B, too many for an index")
        document = parse(index.read_bytes())
    except RecordError as problem:
        raise CorruptIndexError(str(index), str(problem)) from None
    except OSError as failed:
        raise CheckpointReadError(str(index), failed.errno or 0) from failed
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptIndexError(str(index), "must have a weight_map that is not empty")
    return weight_map
