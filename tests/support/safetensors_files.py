"""Safetensors files for tests, and the fuzzer that `make test` and `make fuzz` share."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors
import torch

from penstock.checkpoint.errors import CorruptShardError, TruncatedShardError
from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.safetensors_header import (
    DTYPES,
    PREFIX_NBYTES,
    Entry,
    build_header,
    header_nbytes,
    parse_header,
)
from penstock.checkpoint.writer import TensorOut

EDGES = (0, 1, 2, 3, 7, 8, -1, 255, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)
OTHERS = (None, True, False, "", "F4", "f32", 1.5, 1.0, [], {}, [1], "\x00", "é")


def tensor_out(name: str, tensor: torch.Tensor, part: int | None = None) -> TensorOut:
    """Describe a tensor to write, in parts of that many bytes that share one buffer."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)

    def parts() -> Iterator[torch.Tensor]:
        buffer = torch.empty(part or 1, dtype=torch.uint8)
        for piece in data.split(part or 1):
            yield buffer[: len(piece)].copy_(piece)

    whole = parts if part else lambda: iter([tensor.contiguous()])
    return TensorOut(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), parts=whole)


def read(reader: ShardReader, name: str) -> torch.Tensor:
    spec = reader.spec(name)
    out = torch.empty(spec.shape, dtype=spec.dtype)
    reader.read_into(name, out)
    return out


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bits, which may be NaNs. Booleans are 0 or 1."""
    rng = torch.Generator().manual_seed(seed)
    count = torch.empty(shape, dtype=dtype).nbytes
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=rng)
    if dtype == torch.bool:
        return (bits % 2).bool().reshape(shape)
    return bits.view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def file_of(header: object, data: bytes = b"") -> bytes:
    """Build a file from a header, valid or not. Bytes are used as they are."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def tensor(dtype: str = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def corpus() -> list[bytes]:
    """Return a few valid files."""
    kinds = list(DTYPES.items())
    many, start = [], 0
    for i, (_, dtype) in enumerate(sorted(kinds, key=lambda kind: -kind[1].itemsize)):
        shape = ((2, 3), (), (0,), (5,), (1, 0, 7))[i % 5]
        nbytes = torch.empty(shape, dtype=dtype).nbytes
        many.append(Entry(f"layers.{i}.weight", dtype, shape, start, nbytes))
        start += nbytes
    return [
        build_header(many, {"format": "pt"}) + bytes(start),
        file_of({"a": tensor(), "b": tensor("BF16", [2, 2], [4, 12])}, bytes(12)),
        file_of({}),
    ]


def mutate(valid: bytes, rng: random.Random) -> bytes:
    """Change a valid file at random.

    Either change or truncate its bytes, or change fields of the header and rebuild the file with a
    matching length, so that the checks behind the JSON parser are reached.
    """
    if rng.random() < 0.4:
        return _mutate_bytes(bytearray(valid), rng)
    (length,) = struct.unpack_from("<Q", valid)
    header, data = json.loads(valid[8 : 8 + length]), valid[8 + length :]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _mutate_header(header, rng)
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data) + 1)] + bytes(rng.choice((0, 0, 1, 9)))
    return file_of(header, data)


def _mutate_bytes(block: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(8 if rng.random() < 0.1 else len(block))
        block[at] = rng.choice((0, 0x22, 0x2C, 0x5B, 0x7B, 0x7D, 0xFF, rng.randrange(256)))
    if rng.random() < 0.1:
        del block[rng.randrange(len(block)) :]
    return bytes(block)


def _mutate_header(header: dict[str, object], rng: random.Random) -> None:
    names = [name for name in header if name != "__metadata__"]
    odd = copy.deepcopy(rng.choice((*EDGES, *OTHERS)))  # a later mutation may change it
    if not names or rng.random() < 0.1:
        header[rng.choice(("__metadata__", "x", "", "\ud800"))] = rng.choice(
            (odd, {"format": odd}, tensor(), tensor("F32", [0], [0, 0]))
        )
        return
    name = rng.choice(names)
    fields = header[name]
    if not isinstance(fields, dict) or rng.random() < 0.1:
        header[name] = odd
        return
    field = rng.choice(("dtype", "shape", "data_offsets", "data_offsets", "more"))
    value = fields.get(field)
    if field == "dtype":
        fields[field] = rng.choice((*DTYPES, odd))
    elif isinstance(value, list) and value and rng.random() < 0.7:
        value[rng.randrange(len(value))] = rng.choice((odd, rng.randrange(64)))
    elif isinstance(value, list) and rng.random() < 0.5:
        value.append(rng.choice((odd, 1)))
    elif rng.random() < 0.5:
        fields.pop(field, None)
    else:
        fields[field] = odd


def check_one(block: bytes) -> str:
    """Parse any bytes and compare the outcome with the safetensors library. Return the outcome.

    Either both find the same tensors, or both refuse the file.
    """
    try:
        length = header_nbytes(block[:PREFIX_NBYTES], len(block), "f")
        start = PREFIX_NBYTES + length
        entries = parse_header(block[PREFIX_NBYTES:start], len(block) - start, "f")
    except CorruptShardError as refused:
        message = str(refused)
        message.encode()  # must be printable
        assert message.startswith("f: "), message
        assert len(message) < 1000
        if not _only_we_refuse(message):
            assert _library(block) is None, f"refused what the library reads: {message}"
        return "truncated" if isinstance(refused, TruncatedShardError) else "refused"
    expected = _library(block)
    assert expected is not None, "accepted what the library refuses"
    assert set(expected) == set(entries)
    for name, entry in entries.items():
        assert expected[name]["dtype"] == next(k for k, v in DTYPES.items() if v == entry.dtype)
        assert tuple(expected[name]["shape"]) == entry.shape  # type: ignore[arg-type]
        first = start + entry.start
        assert expected[name]["data"] == block[first : first + entry.nbytes]
    return "accepted" if entries else "empty"


def _only_we_refuse(message: str) -> bool:
    """Return whether the reason is one that only Penstock's parser has."""
    reasons = ("is given twice", "dtype must be one of", "is too large")
    return any(problem in message for problem in reasons)


def _library(block: bytes) -> Mapping[str, dict[str, object]] | None:
    try:
        return dict(safetensors.deserialize(block))
    except safetensors.SafetensorError:
        return None


def write_file(path: Path, block: bytes) -> Path:
    path.write_bytes(block)
    return path
