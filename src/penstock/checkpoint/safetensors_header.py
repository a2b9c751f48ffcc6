"""Parse and build the header of a safetensors file.

  0  length  u64, little-endian: size of the JSON that follows
  8  JSON    {"__metadata__": {"format": "pt"},
              "name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}
  .. data    the tensors' bytes, without gaps; data_offsets are relative to its start

The parser does not trust the file. It refuses everything that the safetensors library refuses. It
also refuses duplicate names, where that library silently keeps the last one, and dtypes and sizes
that torch does not support.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch

from penstock.checkpoint.errors import CorruptShardError, TruncatedShardError
from penstock.errors import RecordError
from penstock.records import parse
from penstock.units import round_up

PREFIX_NBYTES = 8
MAX_HEADER_NBYTES = 100_000_000
"""Limit of the safetensors format."""

_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_LARGEST = 1 << 63

_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name)
    for name, torch_name in _NAMES.items()
    if hasattr(torch, torch_name)
}
"""Torch dtypes by their names in a file. Older versions of torch lack the most recent ones."""

_FILE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file. `start` is relative to the start of the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def header_nbytes(prefix: bytes, file_nbytes: int, path: str) -> int:
    """Return the size of the JSON, from the first 8 bytes of a file of `file_nbytes`."""
    if file_nbytes < PREFIX_NBYTES or len(prefix) < PREFIX_NBYTES:
        raise TruncatedShardError(path, wanted=PREFIX_NBYTES, had=file_nbytes)
    (length,) = _LENGTH.unpack_from(prefix)
    if length > MAX_HEADER_NBYTES:
        raise CorruptShardError(
            path,
            f"is not a safetensors file: its header would have {length} B, and the format allows "
            f"at most {MAX_HEADER_NBYTES} B",
        )
    if PREFIX_NBYTES + length > file_nbytes:
        raise TruncatedShardError(path, wanted=PREFIX_NBYTES + length, had=file_nbytes)
    return int(length)


def parse_header(raw: bytes, data_nbytes: int, path: str) -> dict[str, Entry]:
    """Return the tensors by name, checked against `data_nbytes` of data.

    `path` is used in messages only.
    """
    if not raw.startswith(b"{"):
        raise CorruptShardError(path, f"its header must start with {{, but starts with {raw[:8]!r}")
    try:
        header = parse(raw)
    except RecordError as error:
        raise CorruptShardError(path, f"its header {error}") from None
    assert isinstance(header, dict)  # JSON that starts with a brace
    _check_metadata(header.pop(_METADATA, None), path)
    entries = {name: _parse_entry(name, fields, path) for name, fields in header.items()}
    _check_cover(entries.values(), data_nbytes, PREFIX_NBYTES + len(raw), path)
    return entries


def build_header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """Build prefix and JSON, padded with spaces so that the data starts at a multiple of 8."""
    document: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    for entry in entries:
        document[entry.name] = {
            "dtype": _FILE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.start + entry.nbytes],
        }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    length = round_up(len(text), 8)
    assert length <= MAX_HEADER_NBYTES, f"the header of {len(document)} tensors has {length} B"
    return _LENGTH.pack(length) + text.ljust(length)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a file, such as `BF16`."""
    return _FILE_NAMES.get(dtype, str(dtype))


def _check_metadata(metadata: object, path: str) -> None:
    if metadata is None:
        return
    valid = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not valid:
        raise CorruptShardError(path, f"its {_METADATA} must be an object of strings")


def _parse_entry(name: str, fields: object, path: str) -> Entry:
    def invalid(problem: str) -> CorruptShardError:
        return CorruptShardError(path, problem, tensor=name or "(unnamed)")

    try:
        name.encode()
    except UnicodeEncodeError:  # an unpaired surrogate, written as an escape
        raise CorruptShardError(path, f"the name {name!r} is not valid Unicode") from None
    if not isinstance(fields, dict):
        raise invalid("must have dtype, shape and data_offsets")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise invalid(f"its dtype must be one of {', '.join(DTYPES)}, got {_short(dtype)}")
    if not _are_counts(shape):
        raise invalid(f"its shape must be a list of non-negative integers, got {_short(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise invalid(f"its data_offsets must be [start, stop], got {_short(offsets)}")
    elements = 1
    for size in shape:
        elements *= size
        # Check each size as well: next to a size of 0, the product would hide a huge one.
        if max(size, elements) >= _LARGEST:
            raise invalid(f"its shape {_short(shape)} is too large")
    nbytes, wanted = offsets[1] - offsets[0], elements * DTYPES[dtype].itemsize
    if nbytes != wanted:
        raise invalid(
            f"{dtype} of shape {_short(shape)} needs {wanted} B, its data_offsets span {nbytes} B"
        )
    return Entry(name, DTYPES[dtype], tuple(shape), offsets[0], nbytes)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    # Compare types: True is an int in Python, but not a number in JSON.
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_cover(entries: Iterable[Entry], data_nbytes: int, start: int, path: str) -> None:
    """Check that every byte of the data, which starts at `start` in the file, has one tensor."""
    end, beyond = 0, ""
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start != end:
            what = "overlaps the previous tensor" if entry.start < end else "leaves a gap"
            raise CorruptShardError(
                path,
                f"starts at {entry.start}, which {what} (the previous one ends at {end})",
                tensor=entry.name,
            )
        end += entry.nbytes
        beyond = beyond or (entry.name if end > data_nbytes else "")
    if end > data_nbytes:
        had = start + data_nbytes
        raise TruncatedShardError(path, wanted=start + end, had=had, tensor=beyond)
    if end < data_nbytes:
        raise CorruptShardError(
            path, f"{data_nbytes - end} B after the last tensor belong to no tensor"
        )


def _short(value: object) -> str:
    """Return a value from a file for a message, at most 60 characters long."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
