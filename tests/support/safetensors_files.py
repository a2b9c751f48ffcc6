"""Safetensors files for tests, and a fuzzer of them that both `make test` and `make fuzz` use."""

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
    """In parts of that many bytes, through one buffer that each of them overwrites."""
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
    """Any bits at all, NaNs too; but a bool is 0 or 1."""
    chance = torch.Generator().manual_seed(seed)
    count = torch.empty(shape, dtype=dtype).nbytes
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=chance)
    if dtype == torch.bool:
        return (bits % 2).bool().reshape(shape)
    return bits.view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def file_of(header: object, data: bytes = b"") -> bytes:
    """A file with whatever header; text stays as it is."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def tensor(dtype: str = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def corpus() -> list[bytes]:
    """Good files."""
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


def mutate(good: bytes, chance: random.Random) -> bytes:
    """Bytes changed, cut or grown; or the header taken apart, changed where it hurts, and put
    together again with a length that fits, so that what lies behind the JSON is reached."""
    if chance.random() < 0.4:
        return _mutate_bytes(bytearray(good), chance)
    (length,) = struct.unpack_from("<Q", good)
    header, data = json.loads(good[8 : 8 + length]), good[8 + length :]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _mutate_header(header, chance)
    if chance.random() < 0.2:
        data = data[: chance.randrange(len(data) + 1)] + bytes(chance.choice((0, 0, 1, 9)))
    return file_of(header, data)


def _mutate_bytes(block: bytearray, chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(8 if chance.random() < 0.1 else len(block))
        block[at] = chance.choice((0, 0x22, 0x2C, 0x5B, 0x7B, 0x7D, 0xFF, chance.randrange(256)))
    if chance.random() < 0.1:
        del block[chance.randrange(len(block)) :]
    return bytes(block)


def _mutate_header(header: dict[str, object], chance: random.Random) -> None:
    names = [name for name in header if name != "__metadata__"]
    odd = copy.deepcopy(chance.choice((*EDGES, *OTHERS)))  # it may be changed in its turn
    if not names or chance.random() < 0.1:
        header[chance.choice(("__metadata__", "x", "", "\ud800"))] = chance.choice(
            (odd, {"format": odd}, tensor(), tensor("F32", [0], [0, 0]))
        )
        return
    name = chance.choice(names)
    fields = header[name]
    if not isinstance(fields, dict) or chance.random() < 0.1:
        header[name] = odd
        return
    field = chance.choice(("dtype", "shape", "data_offsets", "data_offsets", "more"))
    value = fields.get(field)
    if field == "dtype":
        fields[field] = chance.choice((*DTYPES, odd))
    elif isinstance(value, list) and value and chance.random() < 0.7:
        value[chance.randrange(len(value))] = chance.choice((odd, chance.randrange(64)))
    elif isinstance(value, list) and chance.random() < 0.5:
        value.append(chance.choice((odd, 1)))
    elif chance.random() < 0.5:
        fields.pop(field, None)
    else:
        fields[field] = odd


def check_one(block: bytes) -> str:
    """Whatever the bytes, the tensors that the safetensors library finds, or a CorruptShardError
    where that refuses too. Returns which."""
    try:
        length = header_nbytes(block[:PREFIX_NBYTES], len(block), "f")
        start = PREFIX_NBYTES + length
        entries = parse_header(block[PREFIX_NBYTES:start], len(block) - start, "f")
    except CorruptShardError as refused:
        message = str(refused)
        message.encode()  # it can be printed
        assert message.startswith("f: "), message
        assert len(message) < 1000
        if not _only_we_refuse(message):
            assert _library(block) is None, f"refused what the library reads: {message}"
        return "cut short" if isinstance(refused, TruncatedShardError) else "refused"
    theirs = _library(block)
    assert theirs is not None, "accepted what the library refuses"
    assert set(theirs) == set(entries)
    for name, entry in entries.items():
        assert theirs[name]["dtype"] == next(k for k, v in DTYPES.items() if v == entry.dtype)
        assert tuple(theirs[name]["shape"]) == entry.shape  # type: ignore[arg-type]
        first = start + entry.start
        assert theirs[name]["data"] == block[first : first + entry.nbytes]
    return "accepted" if entries else "empty"


def _only_we_refuse(message: str) -> bool:
    """A name twice, and dtypes and sizes that torch has not."""
    ours = ("is given twice", "dtype must be one of", "is beyond any memory")
    return any(problem in message for problem in ours)


def _library(block: bytes) -> Mapping[str, dict[str, object]] | None:
    try:
        return dict(safetensors.deserialize(block))
    except safetensors.SafetensorError:
        return None


def write_file(path: Path, block: bytes) -> Path:
    path.write_bytes(block)
    return path
