"""Which files hold a model's weights. Room: keep."""

from __future__ import annotations

import contextlib
import difflib
import mmap
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch

from penstock.checkpoint.disk import bytes_of
from penstock.checkpoint.errors import (
    CheckpointReadError,
    CorruptIndexError,
    CorruptShardError,
    MissingShardError,
    NoWeightsError,
    PickledWeightsError,
    TensorMismatchError,
    TensorNotFoundError,
    TruncatedShardError,
)
from penstock.checkpoint.safetensors_header import (
    PREFIX_NBYTES,
    Entry,
    dtype_name,
    header_nbytes,
    parse_header,
)
from penstock.errors import RecordError
from penstock.records import parse
from penstock.storage.direct_file import BLOCK, is_direct_io_refused
from penstock.units import round_up

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


# --------
# Safetensors shards, of whoever wrote them, read piece by piece. Room: keep.
#
# Every header is read and checked when the reader is made, so a file that is missing, cut short
# or
# not what it should be is found before anything is done with the others.

_PIECE = 16 << 20
"""Bytes of one read call, after which the page cache is told to forget them."""

_DIRECT = 8 << 20
"""Bytes of one read past the page cache. Through it the kernel asks the disk for 128 KiB at a time
and copies, which gave a third of the disk's speed."""

_scratch = threading.local()
"""Of each thread that reads, a buffer that such reads can go to."""


class Spec(NamedTuple):
    """What a tensor is."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Shard:
    path: str
    fd: int
    direct: int | None
    """The same file past the page cache; None where the file system has no such thing."""
    data_start: int
    nbytes: int
    entries: dict[str, Entry]


class ShardReader:
    """The tensors of a directory's `<stem>` files, of an index, or of one file.

    Holds a file descriptor for each file until `close()`.
    """

    def __init__(self, path: str | Path, stem: str = "model") -> None:
        self.path = str(path)
        self._tensors: dict[str, tuple[_Shard, Entry]] = {}
        found = find_shards(Path(path), stem)
        with contextlib.ExitStack() as undo:
            for file, wanted in found.items():
                shard = _open_shard(str(file), undo)
                for name in shard.entries if wanted is None else wanted:
                    if name not in shard.entries:
                        problem = "the index says it is here, and it is not"
                        raise CorruptShardError(shard.path, problem, tensor=name)
                    self._tensors[name] = (shard, shard.entries[name])
            self._files = undo.pop_all()
        self.files = tuple(found)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def spec(self, name: str) -> Spec:
        entry = self._find(name)[1]
        return Spec(entry.dtype, entry.shape)

    def read_into(self, name: str, out: torch.Tensor, start: int = 0) -> None:
        """Elements `start` and on of the flattened tensor, as many as `out` has, into `out`.

        `out` is a contiguous CPU tensor of the tensor's dtype.
        """
        shard, entry = self._find(name)
        assert out.device.type == "cpu", f"{name}: read into a tensor on {out.device}"
        assert out.is_contiguous(), f"{name}: read into a tensor that is not contiguous"
        size, stop = entry.dtype.itemsize, start + out.numel()
        if out.dtype != entry.dtype:
            wanted, had = dtype_name(out.dtype), dtype_name(entry.dtype)
            raise TensorMismatchError(shard.path, name, wanted=wanted, had=had)
        if start < 0 or stop * size > entry.nbytes:
            had = f"{entry.nbytes // size}"
            wanted = f"elements {start} to {stop}"
            raise TensorMismatchError(shard.path, name, wanted=wanted, had=had)
        offset = shard.data_start + entry.start + start * size
        if shard.direct is None or out.numel() * size < _DIRECT // 8:
            _read(shard, name, bytes_of(out), offset)
        else:
            _read_direct(shard, name, out.detach().reshape(-1).view(torch.uint8), offset)

    def close(self) -> None:
        self._files.close()
        self._tensors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, name: str) -> tuple[_Shard, Entry]:
        try:
            return self._tensors[name]
        except KeyError:
            close = difflib.get_close_matches(name, self._tensors, n=1)
            total = len(self._tensors)
            raise TensorNotFoundError(self.path, name, close=close, total=total) from None


def _open_shard(path: str, undo: contextlib.ExitStack) -> _Shard:
    with _told(path):
        # O_NONBLOCK: a pipe under a file's name must not stop us.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        undo.callback(os.close, fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptShardError(path, "is not a file")
        nbytes = found.st_size
        length = header_nbytes(os.pread(fd, PREFIX_NBYTES, 0), nbytes, path)
        raw = bytearray(length)
        direct = _open_direct(path, undo)
        shard = _Shard(path, fd, direct, PREFIX_NBYTES + length, nbytes, {})
        _read(shard, "", memoryview(raw), PREFIX_NBYTES)
    entries = parse_header(bytes(raw), nbytes - shard.data_start, path)
    shard.entries.update(entries)
    return shard


def _open_direct(path: str, undo: contextlib.ExitStack) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT)
    except OSError:  # tmpfs and some others
        return None
    undo.callback(os.close, fd)
    return fd


def _read_direct(shard: _Shard, name: str, into: torch.Tensor, offset: int) -> None:
    """Fills `into`, by way of an aligned buffer of this thread's own."""
    buffer = getattr(_scratch, "buffer", None)
    if buffer is None:
        buffer = _scratch.buffer = mmap.mmap(-1, _DIRECT + 2 * BLOCK)
        _scratch.bytes = torch.frombuffer(buffer, dtype=torch.uint8)
    assert shard.direct is not None
    done, size = 0, into.numel()
    with _told(shard.path, name), memoryview(buffer) as view:
        while done < size:
            low = (offset + done) // BLOCK * BLOCK
            skip = offset + done - low
            wanted = min(len(view), round_up(skip + size - done, BLOCK))
            try:
                got = os.preadv(shard.direct, [view[:wanted]], low) - skip
            except OSError as refused:  # some file systems say so only now
                if not is_direct_io_refused(refused):
                    raise
                _read(shard, name, bytes_of(into[done:]), offset + done)
                return
            if got <= 0:
                at = offset + done
                raise TruncatedShardError(shard.path, wanted=shard.nbytes, had=at, tensor=name)
            count = min(got, size - done)
            into[done : done + count].copy_(_scratch.bytes[skip : skip + count])
            done += count


def _read(shard: _Shard, name: str, into: memoryview, offset: int) -> None:
    """Fills `into`, however short the kernel's answers, and leaves no pages behind."""
    done = 0
    with _told(shard.path, name):
        while done < len(into):
            at = offset + done
            got = os.preadv(shard.fd, [into[done : done + _PIECE]], at)
            if got == 0:
                raise TruncatedShardError(shard.path, wanted=shard.nbytes, had=at, tensor=name)
            # From before it, too: the kernel keeps what reaches over the edge of what it may drop.
            first = max(0, at - _PIECE)
            os.posix_fadvise(shard.fd, first, at + got - first, os.POSIX_FADV_DONTNEED)
            done += got


@contextlib.contextmanager
def _told(path: str, tensor: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as failed:
        if failed.errno is None:
            raise
        raise CheckpointReadError(path, failed.errno, tensor=tensor) from failed
