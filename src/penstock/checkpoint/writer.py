"""Safetensors shards, written part by part in bounded memory. Room: keep."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.checkpoint.disk import bytes_of, sync, told
from penstock.checkpoint.safetensors_header import Entry, build_header
from penstock.storage.direct_file import DirectWriter

MAX_SHARD_NBYTES = 5_000_000_000
"""Of tensors in one file, as transformers has it."""

Progress = Callable[[int, int, str], None]
"""Bytes done, bytes in all, the tensor that they are of."""

_METADATA = {"format": "pt"}
"""Without it transformers does not know whose tensors these are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOut:
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    parts: Callable[[], Iterator[torch.Tensor]]
    """Contiguous CPU tensors whose bytes, in this order, are the tensor's bytes. Each is taken
    before the next is asked for, so all of them may be one buffer."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Shard:
    name: str
    head: bytes
    tensors: tuple[TensorOut, ...]

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors)


class ShardWriter:
    """Lays out the shards when made; `write` writes them.

    One shard is `<stem>.safetensors`; several are `<stem>-0000x-of-0000y.safetensors` and an index,
    as transformers writes them. Tensors go to shards in the order given, and within a shard the
    wider dtypes come first, so that each lies at a multiple of its element's size.
    """

    def __init__(
        self,
        tensors: Sequence[TensorOut],
        *,
        stem: str = "model",
        max_shard_nbytes: int = MAX_SHARD_NBYTES,
        private: bool = False,
    ) -> None:
        names = {tensor.name for tensor in tensors}
        assert len(names) == len(tensors), "two tensors of one name"
        assert "__metadata__" not in names, "__metadata__ is no name for a tensor"
        self.mode = 0o600 if private else 0o666
        groups = _split(tensors, max_shard_nbytes)
        self._shards = [
            _Shard(_shard_name(stem, i, len(groups)), *_lay_out(group))
            for i, group in enumerate(groups)
        ]
        self._index = _index(self._shards) if len(groups) > 1 else b""
        self._index_name = f"{stem}.safetensors.index.json"

    @property
    def nbytes(self) -> int:
        """Of all files together, to the byte, known before anything is written."""
        return sum(shard.nbytes for shard in self._shards) + len(self._index)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the files."""
        shards = tuple(shard.name for shard in self._shards)
        return (*shards, self._index_name) if self._index else shards

    def write(self, directory: str | Path, progress: Progress | None = None) -> None:
        """All files into an existing directory, synced; or, with the error raised, none of them."""
        folder, count = Path(directory), _Count(self.nbytes, progress)
        with told(folder, self.nbytes), contextlib.ExitStack() as undo:
            for shard in self._shards:
                with _new_file(folder / shard.name, self.mode, undo) as file:
                    file.write(memoryview(shard.head))
                    count.add(len(shard.head), "")
                    for tensor in shard.tensors:
                        _write_tensor(tensor, file, count)
            if self._index:
                with _new_file(folder / self._index_name, self.mode, undo) as file:
                    file.write(memoryview(self._index))
                    count.add(len(self._index), "")
            sync(folder)
            undo.pop_all()


# The layout.


def _split(tensors: Sequence[TensorOut], limit: int) -> list[list[TensorOut]]:
    """In order, a new shard where the next tensor would not fit. One larger than the limit has a
    shard of its own. No tensors at all make one empty shard."""
    groups: list[list[TensorOut]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return groups


def _lay_out(group: list[TensorOut]) -> tuple[bytes, tuple[TensorOut, ...]]:
    ordered = sorted(group, key=lambda tensor: -tensor.dtype.itemsize)  # stable
    entries, start = [], 0
    for tensor in ordered:
        entries.append(Entry(tensor.name, tensor.dtype, tensor.shape, start, tensor.nbytes))
        start += tensor.nbytes
    return build_header(entries, _METADATA), tuple(ordered)


def _shard_name(stem: str, number: int, total: int) -> str:
    return (
        f"{stem}-{number + 1:05d}-of-{total:05d}.safetensors"
        if total > 1
        else (f"{stem}.safetensors")
    )


def _index(shards: Sequence[_Shard]) -> bytes:
    weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()


# The writing.


@dataclass(slots=True)
class _Count:
    total: int
    progress: Progress | None
    done: int = 0

    def add(self, nbytes: int, what: str) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total, what)


@contextlib.contextmanager
def _new_file(path: Path, mode: int, undo: contextlib.ExitStack) -> Iterator[DirectWriter]:
    """A file that was not there before, synced at the end; `undo` will remove it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    undo.callback(_remove, path)
    try:
        with contextlib.closing(DirectWriter(fd)) as file:
            yield file
            file.sync()
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    # What went wrong before is what is to be told.
    with contextlib.suppress(OSError):
        os.unlink(path)


def _write_tensor(tensor: TensorOut, file: DirectWriter, count: _Count) -> None:
    left = tensor.nbytes
    for part in tensor.parts():
        assert part.device.type == "cpu", f"{tensor.name}: a part is on {part.device}"
        assert part.is_contiguous(), f"{tensor.name}: a part is not contiguous"
        assert part.nbytes <= left, f"{tensor.name}: parts of more than {tensor.nbytes} B"
        file.write(bytes_of(part))
        left -= part.nbytes
        count.add(part.nbytes, tensor.name)
    assert left == 0, f"{tensor.name}: parts of {tensor.nbytes - left} B for {tensor.nbytes} B"
