"""Write safetensors shards part by part, in bounded memory."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.checkpoint.checksums import PIECE_NBYTES, combine, crc32c, to_hex
from penstock.checkpoint.disk import bytes_of, translate_write_errors
from penstock.checkpoint.manifest import FileRecord
from penstock.checkpoint.safetensors_header import Entry, build_header
from penstock.checkpoint.shard_template import ShardTemplate
from penstock.durable_files import name_file, sync
from penstock.storage.direct_file import DirectWriter

MAX_SHARD_NBYTES = 5_000_000_000
"""Maximum size of the tensors in one file; the default of transformers."""

Progress = Callable[[int, int, str], None]
"""Called with the bytes written, the total, and the name of the tensor being written."""

_METADATA = {"format": "pt"}
"""transformers reads from this entry that the file holds PyTorch tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOut:
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    parts: Callable[[], Iterator[torch.Tensor]]
    """Yields contiguous CPU tensors whose bytes, in this order, are the tensor's bytes. Each part
    is copied before the next one is requested, so all of them may be views of one buffer."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Shard:
    name: str
    header: bytes
    tensors: tuple[TensorOut, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


class ShardWriter:
    """Lay out the shards of a set of tensors; `write` writes them.

    One shard is named `<stem>.safetensors`. Several are named
    `<stem>-0000x-of-0000y.safetensors` and have an index, as transformers writes them. Tensors are
    assigned to shards in the order given. Within a shard the wider dtypes come first, so that every
    tensor starts at a multiple of its element size.

    With a `template` of files that have the same tensors, the new files have their names, headers
    and order: only the elements can differ.
    """

    def __init__(
        self,
        tensors: Sequence[TensorOut],
        *,
        stem: str = "model",
        max_shard_nbytes: int = MAX_SHARD_NBYTES,
        private: bool = False,
        template: ShardTemplate | None = None,
    ) -> None:
        names = {tensor.name for tensor in tensors}
        assert len(names) == len(tensors), "two tensors have the same name"
        assert "__metadata__" not in names, "__metadata__ is not a valid tensor name"
        self.mode = 0o600 if private else 0o666
        if template is not None and template.fits(map(_entry, tensors)):
            self._shards, self._index = _follow(template, tensors), template.index
        else:
            groups = _split(tensors, max_shard_nbytes)
            self._shards = [
                _Shard(_shard_name(stem, i, len(groups)), *_lay_out(group))
                for i, group in enumerate(groups)
            ]
            self._index = _build_index(self._shards) if len(groups) > 1 else b""
        self._index_name = f"{stem}.safetensors.index.json"

    @property
    def nbytes(self) -> int:
        """Exact size of all files, known before anything is written."""
        return sum(shard.nbytes for shard in self._shards) + len(self._index)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files."""
        shards = tuple(shard.name for shard in self._shards)
        return (*shards, self._index_name) if self._index else shards

    def write(
        self,
        directory: str | Path,
        progress: Progress | None = None,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> dict[str, FileRecord]:
        """Write and sync files in an existing directory. A failure leaves none of them behind.

        Of `world` ranks, each writes every `world`-th shard, all of them at the same time, and
        requests the parts of all shards, which may come from several ranks. If it cannot write, it
        requests what is left before it raises the error, because the others do; if it cannot read,
        it raises PartsError immediately. Rank 0 writes the index.

        Returns what the manifest needs: sizes and checksums of the files, summed while writing.
        """
        folder, counter = Path(directory), _ProgressCounter(self.nbytes, progress)
        written: dict[str, FileRecord] = {}
        unread = [_ShardParts(shard, alone=world == 1) for shard in self._shards]
        waves = [unread[first : first + world] for first in range(0, len(unread), world)]
        try:
            with translate_write_errors(folder, self.nbytes), contextlib.ExitStack() as undo:
                for wave in waves:
                    written |= self._write_wave(wave, rank, folder, undo, counter)
                if self._index and rank == 0:
                    written[self._index_name] = self._write_index(folder, undo, counter)
                sync(folder)
                undo.pop_all()
        except PartsError:
            raise
        except Exception:
            for wave in waves if world > 1 else ():
                for _ in _rounds(wave, None):
                    pass
            raise
        return written

    def _write_wave(
        self, wave: Sequence[_ShardParts], rank: int, folder: Path,
        undo: contextlib.ExitStack, counter: _ProgressCounter,
    ) -> dict[str, FileRecord]:  # fmt: skip
        """Write this rank's shard of a wave, if it has one, while the others write theirs."""
        if rank >= len(wave):
            for _, nbytes in _rounds(wave, None):
                counter.add(nbytes, "")
            return {}
        shard = wave[rank].shard
        with _new_file(folder / shard.name, self.mode, undo) as file:
            return {shard.name: _write_shard(shard, _rounds(wave, rank), file, counter)}

    def _write_index(
        self, folder: Path, undo: contextlib.ExitStack, counter: _ProgressCounter
    ) -> FileRecord:
        with _new_file(folder / self._index_name, self.mode, undo) as file:
            file.write(memoryview(self._index))
            counter.add(len(self._index), "")
        return FileRecord(nbytes=len(self._index), crc32c=to_hex(crc32c(self._index)))


def _entry(tensor: TensorOut) -> Entry:
    return Entry(tensor.name, tensor.dtype, tensor.shape, 0, tensor.nbytes)


def _follow(template: ShardTemplate, tensors: Sequence[TensorOut]) -> list[_Shard]:
    """Arrange tensors as they are in other files."""
    by_name = {tensor.name: tensor for tensor in tensors}
    return [
        _Shard(shard.name, shard.header, tuple(by_name[entry.name] for entry in shard.entries))
        for shard in template.shards
    ]


def _split(tensors: Sequence[TensorOut], limit: int) -> list[list[TensorOut]]:
    """Assign tensors to shards in order, with a new shard when the next tensor does not fit.

    A tensor larger than the limit gets its own shard. Without tensors there is one empty shard.
    """
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
    ordered = sorted(group, key=lambda tensor: -tensor.dtype.itemsize)  # a stable sort
    entries, start = [], 0
    for tensor in ordered:
        entries.append(Entry(tensor.name, tensor.dtype, tensor.shape, start, tensor.nbytes))
        start += tensor.nbytes
    return build_header(entries, _METADATA), tuple(ordered)


def _shard_name(stem: str, number: int, total: int) -> str:
    if total == 1:
        return f"{stem}.safetensors"
    return f"{stem}-{number + 1:05d}-of-{total:05d}.safetensors"


def _build_index(shards: Sequence[_Shard]) -> bytes:
    weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()


@dataclass(slots=True)
class _ProgressCounter:
    total: int
    progress: Progress | None
    done: int = 0

    def add(self, nbytes: int, tensor: str) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total, tensor)


@contextlib.contextmanager
def _new_file(path: Path, mode: int, undo: contextlib.ExitStack) -> Iterator[DirectWriter]:
    """Create a file, and sync it at the end. `undo` removes it again."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    undo.callback(_remove, path)
    try:
        with name_file(path), contextlib.closing(DirectWriter(fd, str(path))) as file:
            yield file
            file.sync()
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    # Do not hide the error that led here.
    with contextlib.suppress(OSError):
        os.unlink(path)


class PartsError(Exception):
    """A part could not be read, and other ranks wait for it: none of them can continue."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause
        super().__init__(str(cause))


class _ShardParts:
    """The parts of a shard's tensors, of which some may have been requested already."""

    def __init__(self, shard: _Shard, *, alone: bool) -> None:
        self.shard, self._alone = shard, alone
        self._left = ((tensor, part) for tensor in shard.tensors for part in tensor.parts())

    def request(self) -> tuple[TensorOut, torch.Tensor] | None:
        """Return the next part and its tensor; None after the last."""
        try:
            return next(self._left, None)
        except Exception as error:
            if self._alone:
                raise
            raise PartsError(error) from error


_Round = tuple[tuple[TensorOut, torch.Tensor] | None, int]
"""A part of the rank's own shard, if there is one left, and the bytes of the other parts."""


def _rounds(wave: Sequence[_ShardParts], own: int | None) -> Iterator[_Round]:
    """Request one part of each shard of a wave in turn, until all of them are complete.

    All ranks make these requests in the same order. A rank writes its part after a round, not
    within it, so that all ranks write at the same time.
    """
    left = dict(enumerate(wave))
    while left:
        part, others = None, 0
        for number, parts in list(left.items()):
            found = parts.request()
            if found is None:
                del left[number]
            elif number == own:
                tensor, values = found
                # The parts of the next shards may use the same memory.
                part = (tensor, values if len(wave) == 1 else values.clone())
            else:
                others += found[1].nbytes
        if left:
            yield part, others


def _write_shard(
    shard: _Shard, rounds: Iterator[_Round], file: DirectWriter, counter: _ProgressCounter
) -> FileRecord:
    file.write(memoryview(shard.header))
    counter.add(len(shard.header), "")
    crcs = {tensor.name: 0 for tensor in shard.tensors}
    left = {tensor.name: tensor.nbytes for tensor in shard.tensors}
    for own, others in rounds:
        counter.add(others, "")
        if own is None:
            continue
        tensor, part = own
        name = tensor.name
        assert part.device.type == "cpu", f"{name}: a part is on {part.device}"
        assert part.is_contiguous(), f"{name}: a part is not contiguous"
        assert part.nbytes <= left[name], f"{name}: parts have more than {tensor.nbytes} B"
        crcs[name] = _write_part(part, file, crcs[name])
        left[name] -= part.nbytes
        counter.add(part.nbytes, name)
    whole = header = crc32c(shard.header)
    for tensor in shard.tensors:
        missing = left[tensor.name]
        had = tensor.nbytes - missing
        assert not missing, f"{tensor.name}: parts have {had} of {tensor.nbytes} B"
        whole = combine(whole, crcs[tensor.name], tensor.nbytes)
    tensors = {name: to_hex(crc) for name, crc in crcs.items()}
    return FileRecord(
        nbytes=shard.nbytes, crc32c=to_hex(whole), header=to_hex(header), tensors=tensors
    )


def _write_part(part: torch.Tensor, file: DirectWriter, crc: int) -> int:
    """Write a part of a tensor, and return the checksum of the tensor so far."""
    data = bytes_of(part)
    for start in range(0, len(data), PIECE_NBYTES):
        piece = data[start : start + PIECE_NBYTES]
        # Sum the caller's bytes, not the writer's copy of them: a copy that goes wrong is then
        # found as well.
        crc = crc32c(piece, crc)
        file.write(piece)
    return crc
