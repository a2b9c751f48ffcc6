"""Read tensors from safetensors files, piece by piece.

`ShardReader` reads and checks every header when it is created, so a missing, truncated or invalid
file is found before any tensor is used. Large reads bypass the page cache, and small ones do not
leave pages behind in it.

If the directory has a manifest with checksums, every byte that is read is compared with it: the
headers first, and each tensor as soon as all of it has been read.
"""

from __future__ import annotations

import contextlib
import difflib
import mmap
import os
import stat
import threading
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import torch

from penstock.checkpoint.checksums import (
    RangeChecksums,
    checksum_file,
    combine,
    crc32c,
    to_hex,
)
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
from penstock.checkpoint.manifest import (
    COMPLETE,
    FileRecord,
    Manifest,
    check_size,
    checksum_error,
    find_manifest,
)
from penstock.checkpoint.safetensors_header import (
    PREFIX_NBYTES,
    Entry,
    dtype_name,
    header_nbytes,
    parse_header,
)
from penstock.checkpoint.shard_template import ShardTemplate, TemplateShard
from penstock.errors import RecordError
from penstock.records import parse
from penstock.storage.direct_file import BLOCK, is_direct_io_refused
from penstock.units import MiB, round_up

Shards = dict[Path, tuple[str, ...] | None]
"""Files, and the tensors to read from each; None means all of them."""

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".bin.index.json")
_MAX_INDEX_NBYTES = 100_000_000

_BUFFERED_NBYTES = 16 * MiB
"""Size of one buffered read, after which its pages are dropped from the page cache."""

_DIRECT_NBYTES = 8 * MiB
"""Size of one direct read. Buffered reads reach only a third of a fast disk's speed: the kernel
requests 128 KiB at a time and copies them."""

_thread = threading.local()
"""Per thread: an aligned buffer for direct reads, and a tensor over it."""


class Spec(NamedTuple):
    """The dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class ShardReader:
    """The tensors of a directory's `<stem>` files, of an index, or of one file.

    The reader keeps every file open until `close()`. Several threads may read concurrently. At the
    end of a `with` block, tensors of which only a part was read are read as a whole and checked.

    Args:
        path: The directory, index or file.
        stem: How the names of the files begin, if `path` is a directory.
        keep_cached: Whether to leave the bytes in the page cache, for a program that reads them
            again.
    """

    def __init__(self, path: str | Path, stem: str = "model", *, keep_cached: bool = False) -> None:
        self.path = str(path)
        self._tensors: dict[str, tuple[_Shard, Entry]] = {}
        self._partly_read: dict[str, RangeChecksums] = {}
        self._lock = threading.Lock()
        manifest = _find_checksums(Path(path), stem)
        shards = find_shards(Path(path), stem)
        with contextlib.ExitStack() as open_files:
            for file, wanted in shards.items():
                shard = _open_shard(file, manifest, keep_cached, open_files)
                for name in shard.entries if wanted is None else wanted:
                    if name not in shard.entries:
                        problem = "the index says that it is in this file, and it is not"
                        raise CorruptShardError(shard.path, problem, tensor=name)
                    self._tensors[name] = (shard, shard.entries[name])
            self._files = open_files.pop_all()
        self.files = tuple(shards)
        index = Path(path, f"{stem}.safetensors.index.json") if os.path.isdir(path) else Path(path)
        is_used = all(wanted is not None for wanted in shards.values())
        self._index = index if is_used else None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(self._tensors)

    @property
    def names_set(self) -> Set[str]:
        """Names of the tensors, for fast look-ups."""
        return self._tensors.keys()

    def file_of(self, name: str) -> str:
        """Return the path of the file that has a tensor."""
        return self._find(name)[0].path

    def spec(self, name: str) -> Spec:
        """Return the dtype and shape of a tensor."""
        entry = self._find(name)[1]
        return Spec(entry.dtype, entry.shape)

    def read_into(self, name: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill `out` with elements of the flattened tensor, from element `start` on.

        `out` must be a contiguous CPU tensor of the tensor's dtype.
        """
        shard, entry = self._find(name)
        assert out.device.type == "cpu", f"{name}: cannot read into a tensor on {out.device}"
        assert out.is_contiguous(), f"{name}: cannot read into a tensor that is not contiguous"
        size, stop = entry.dtype.itemsize, start + out.numel()
        if out.dtype != entry.dtype:
            wanted, had = dtype_name(out.dtype), dtype_name(entry.dtype)
            raise TensorMismatchError(shard.path, name, wanted=wanted, had=had)
        if start < 0 or stop * size > entry.nbytes:
            had = f"{entry.nbytes // size}"
            wanted = f"elements {start} to {stop}"
            raise TensorMismatchError(shard.path, name, wanted=wanted, had=had)
        offset = shard.data_start + entry.start + start * size
        if shard.direct_fd is None or out.numel() * size < _DIRECT_NBYTES // 8:
            crc = _read(shard, name, bytes_of(out), offset)
        else:
            crc = _read_direct(shard, name, out.detach().reshape(-1).view(torch.uint8), offset)
        if shard.record is not None:
            self._check(shard, entry, start * size, stop * size, crc)

    def template(self) -> ShardTemplate:
        """Return how the tensors are arranged in the files."""
        shards = {id(shard): shard for shard, _ in self._tensors.values()}.values()
        index = self._index.read_bytes() if self._index is not None else b""
        return ShardTemplate(tuple(map(_template_of, shards)), index)

    def check_partly_read(self) -> None:
        """Read every tensor of which only a part was read, and check it."""
        for name in tuple(self._partly_read):
            shard, entry = self._tensors[name]
            self._partly_read.pop(name)
            piece = torch.empty(min(entry.nbytes, _DIRECT_NBYTES), dtype=torch.uint8)
            for start in range(0, entry.nbytes, _DIRECT_NBYTES):
                part = piece[: entry.nbytes - start]
                crc = _read(shard, name, bytes_of(part), shard.data_start + entry.start + start)
                self._check(shard, entry, start, start + part.numel(), crc)

    def close(self) -> None:
        """Close the files."""
        self._files.close()
        self._tensors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.check_partly_read()
        finally:
            self.close()

    def _check(self, shard: _Shard, entry: Entry, start: int, stop: int, crc: int) -> None:
        """Add the checksum of a range; compare when the tensor has been read as a whole."""
        assert shard.record is not None
        with self._lock:
            ranges = self._partly_read.setdefault(entry.name, RangeChecksums(entry.nbytes))
            whole = ranges.add(start, stop, crc)
            if whole is None:
                return
            del self._partly_read[entry.name]
        expected = shard.record.tensors.get(entry.name, "")
        if to_hex(whole) != expected:
            file = Path(shard.path)
            raise checksum_error(
                file.parent, file.name, tensor=entry.name, expected=expected, found=to_hex(whole)
            )

    def _find(self, name: str) -> tuple[_Shard, Entry]:
        try:
            return self._tensors[name]
        except KeyError:
            close = difflib.get_close_matches(name, self._tensors, n=1)
            total = len(self._tensors)
            raise TensorNotFoundError(self.path, name, close=close, total=total) from None


def _template_of(shard: _Shard) -> TemplateShard:
    entries = sorted(shard.entries.values(), key=lambda entry: (entry.start, entry.nbytes))
    return TemplateShard(Path(shard.path).name, shard.header, tuple(entries))


def _find_checksums(path: Path, stem: str) -> Manifest | None:
    """Read the manifest next to the files, and check the index with it; None without checksums."""
    folder = path if path.is_dir() else path.parent
    manifest = find_manifest(folder)
    if manifest is None or not manifest.has_checksums:
        return None
    index = f"{stem}.safetensors.index.json" if path.is_dir() else path.name
    record = manifest.files.get(index)
    if record is not None and index.endswith(".json"):
        check_size(folder, index, record)
        crc = to_hex(checksum_file(folder / index))
        if crc != record.crc32c:
            raise checksum_error(folder, index, expected=record.crc32c, found=crc)
    return manifest


def find_shards(path: Path, stem: str) -> Shards:
    """Find the weight files of a directory, an index, or one file, as transformers does."""
    if not os.path.exists(path):
        raise NoWeightsError(str(path), "there is no such file or directory")
    if os.path.isdir(path):
        return _find_in_directory(path, stem)
    if path.name.endswith(_PICKLED):
        raise PickledWeightsError(str(path))
    return _read_index(path) if path.name.endswith(".index.json") else {path: None}


def _find_in_directory(folder: Path, stem: str) -> Shards:
    single = folder / f"{stem}.safetensors"
    index = folder / f"{stem}.safetensors.index.json"
    if os.path.exists(single):
        return {single: None}
    if os.path.exists(index):
        return _read_index(index)
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointReadError(str(folder), error.errno or 0) from error
    shards = [n for n in names if n.startswith(f"{stem}-") and n.endswith(".safetensors")]
    if shards:
        raise NoWeightsError(
            str(folder),
            f"there is {shards[0]} but no {index.name}, which lists the tensors of each shard; "
            f"download or copy it as well",
        )
    pickled = [name for name in names if name.endswith(_PICKLED) and name != "training_args.bin"]
    if pickled:
        raise PickledWeightsError(str(folder / pickled[0]))
    raise NoWeightsError(
        str(folder),
        f"there is neither {single.name} nor {index.name}; use a directory that has one of them",
    )


def _read_index(index: Path) -> Shards:
    by_file: dict[str, list[str]] = {}
    for tensor, name in _weight_map(index).items():
        # Only plain names: a name with a slash could lead to any file on the machine.
        plain = isinstance(name, str) and name.isprintable() and name not in ("", ".", "..")
        if not plain or "/" in str(name):
            raise CorruptIndexError(
                str(index),
                f"weight_map must name files in the same directory, got {str(name)[:60]!r}",
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
            raise CorruptIndexError(
                str(index), f"has {nbytes} B, and an index may have {_MAX_INDEX_NBYTES} B"
            )
        document = parse(index.read_bytes())
    except RecordError as error:
        raise CorruptIndexError(str(index), str(error)) from None
    except OSError as error:
        raise CheckpointReadError(str(index), error.errno or 0) from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptIndexError(str(index), "must have a weight_map that is not empty")
    return weight_map


@dataclass(frozen=True, slots=True)
class _Shard:
    """An open safetensors file."""

    path: str
    fd: int
    direct_fd: int | None
    """The same file opened with O_DIRECT; None if the file system does not support that."""
    data_start: int
    header: bytes
    nbytes: int
    entries: dict[str, Entry]
    record: FileRecord | None
    """Checksums of the file; None if it was written without."""
    keep_cached: bool
    page_cache: _PageCache


@dataclass(slots=True)
class _PageCache:
    """Whether a file may be in the page cache."""

    may_have: bool = True
    """False after the first read that did not find its bytes there. Trying again would let the
    kernel read ahead, 2 MiB each time."""


def _open_shard(
    file: Path, manifest: Manifest | None, keep_cached: bool, open_files: contextlib.ExitStack
) -> _Shard:
    path, record = str(file), None
    if manifest is not None:
        record = manifest.files.get(file.name)
        if record is None:
            raise CorruptShardError(path, f"is not in the list of files in {COMPLETE}")
        check_size(file.parent, file.name, record)
    with _translate_read_errors(path):
        # O_NONBLOCK: if the path names a pipe, opening it must not block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        open_files.callback(os.close, fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptShardError(path, "is not a regular file")
        nbytes = status.st_size
        prefix = os.pread(fd, PREFIX_NBYTES, 0)
        length = header_nbytes(prefix, nbytes, path)
        raw = bytearray(length)
        direct_fd = None if keep_cached else _open_direct(path, open_files)
        start = PREFIX_NBYTES + length
        shard = _Shard(
            path, fd, direct_fd, start, prefix, nbytes, {}, record, keep_cached, _PageCache()
        )
        _read(shard, "", memoryview(raw), PREFIX_NBYTES)
    shard = replace(shard, header=prefix + bytes(raw))
    if record is not None:
        crc = to_hex(crc32c(raw, crc32c(prefix)))
        if crc != record.header:
            raise checksum_error(file.parent, file.name, expected=record.header, found=crc)
    shard.entries.update(parse_header(bytes(raw), nbytes - shard.data_start, path))
    return shard


def _open_direct(path: str, open_files: contextlib.ExitStack) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT)
    except OSError:  # tmpfs and some others
        return None
    open_files.callback(os.close, fd)
    return fd


def _read_direct(shard: _Shard, name: str, out: torch.Tensor, offset: int) -> int:
    """Fill `out` past the page cache, by way of an aligned buffer of this thread.

    Bytes that are in the page cache, such as those of a file that was just downloaded, are copied
    from there, which is faster than any disk. They stay there: somebody else has put them there.

    Returns the checksum of the bytes, 0 if there is none to compare it with.

    Tensors start anywhere in the file, so a direct read covers whole blocks around the wanted bytes
    and the wanted ones are copied out.
    """
    buffer = getattr(_thread, "buffer", None)
    if buffer is None:
        buffer = _thread.buffer = mmap.mmap(-1, _DIRECT_NBYTES + 2 * BLOCK)
        _thread.bytes = torch.frombuffer(buffer, dtype=torch.uint8)
    assert shard.direct_fd is not None
    done, size, crc = 0, out.numel(), 0
    with _translate_read_errors(shard.path, name), memoryview(buffer) as view:
        while done < size:
            if count := _read_cached(shard, bytes_of(out[done:]), offset + done):
                crc = _add(shard, bytes_of(out[done : done + count]), crc)
                done += count
                continue
            block_start = (offset + done) // BLOCK * BLOCK
            skip = offset + done - block_start
            wanted = min(len(view), round_up(skip + size - done, BLOCK))
            try:
                got = os.preadv(shard.direct_fd, [view[:wanted]], block_start) - skip
            except OSError as error:
                # Some file systems accept O_DIRECT at open and refuse it at the first read.
                if not is_direct_io_refused(error):
                    raise
                rest = _read(shard, name, bytes_of(out[done:]), offset + done)
                return combine(crc, rest, size - done)
            if got <= 0:
                end = offset + done
                raise TruncatedShardError(shard.path, wanted=shard.nbytes, had=end, tensor=name)
            count = min(got, size - done)
            out[done : done + count].copy_(_thread.bytes[skip : skip + count])
            crc = _add(shard, bytes_of(out[done : done + count]), crc)
            done += count
    return crc


def _read_cached(shard: _Shard, out: memoryview, offset: int) -> int:
    """Fill the beginning of `out` from the page cache, without waiting; return how many bytes."""
    if not shard.page_cache.may_have:
        return 0
    try:
        count = os.preadv(shard.fd, [out[:_DIRECT_NBYTES]], offset, os.RWF_NOWAIT)
    except OSError:  # not there, or the file system cannot tell
        count = 0
    shard.page_cache.may_have = count > 0
    return count


def _read(shard: _Shard, name: str, out: memoryview, offset: int) -> int:
    """Fill `out` through the page cache, and drop the pages again that were not there before.

    Returns the checksum of the bytes, 0 if there is none to compare it with.
    """
    done = crc = 0
    with _translate_read_errors(shard.path, name):
        while done < len(out):
            start = offset + done
            cached = _read_cached(shard, out[done:], start)
            got = cached or os.preadv(shard.fd, [out[done : done + _BUFFERED_NBYTES]], start)
            if got == 0:
                raise TruncatedShardError(shard.path, wanted=shard.nbytes, had=start, tensor=name)
            crc = _add(shard, out[done : done + got], crc)
            done += got
            if shard.keep_cached or cached:  # others have put it there, and may need it
                continue
            # Include the previous piece: the kernel does not drop a folio that reaches beyond the
            # range it is asked about, so some of that piece may still be cached.
            first = max(0, start - _BUFFERED_NBYTES)
            os.posix_fadvise(shard.fd, first, start + got - first, os.POSIX_FADV_DONTNEED)
    return crc


def _add(shard: _Shard, data: memoryview, crc: int) -> int:
    """Continue the checksum `crc` with the bytes of a file, unless nothing is known to compare."""
    return crc if shard.record is None else crc32c(data, crc)


@contextlib.contextmanager
def _translate_read_errors(path: str, tensor: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not an error of the kernel
            raise
        raise CheckpointReadError(path, error.errno, tensor=tensor) from error
