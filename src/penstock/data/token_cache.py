"""The token cache: tokens on disk that are written once and can be resumed.

A cache is a directory with three plain arrays and `state.json`, which records how much of them is
valid. While the cache is being written, the name of the directory ends in `.part`, and the state
serves as a journal: it is replaced after each chunk, once the chunk's bytes are on disk. A process
that finds a `.part` truncates the arrays to the journaled lengths and continues there. The last
operation is the rename, so a directory without `.part` is complete.

The state has checksums of the arrays and of itself. They are compared when a cache is opened: a
damaged cache is derived data, which is made again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from penstock.data.encode import Encoded, encode
from penstock.data.errors import (
    BadLinesError,
    CacheError,
    EmptyDataError,
    NoCacheError,
    SourceError,
)
from penstock.data.examples import RecordFormat
from penstock.data.items import Item, Source, SourceOffset
from penstock.data.tokenizer import Tokens
from penstock.durable_files import sync
from penstock.errors import RecordError
from penstock.machine.user_cache import cache_directory
from penstock.records import load, save, to_json
from penstock.units import MiB

MAGIC = "penstock tokens"
STATE = "state.json"
TOKENS, TRAINED, DOCUMENTS = ARRAYS = ("tokens.bin", "trained.bin", "documents.bin")
COLUMNS = 3
"""Columns of documents.bin: the end of the document in tokens, its targets, a hash of its
tokens."""

ENCODING = 3
"""Raised when the code makes other tokens or other bad lines from the same sources."""

KEPT_LINES = 100
"""Number of bad lines whose text is stored."""

CHUNK_BYTES = 2 * MiB
"""Maximum size of a chunk of source data that is encoded, written and journaled together."""

CHECKED_BYTES = 4 * MiB
"""Number of bytes of an array that are read at a time to check it."""

CHUNK_ITEMS = 4096
"""Maximum number of items in a chunk."""

OnProgress = Callable[[int, int, str], None]
"""Called with the bytes done, the total, and a description. A total of 0 means a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Progress of a cache that is being written, or the content of a complete one."""

    FORMAT: ClassVar[int] = 1

    magic: str
    """Identifies the file."""

    version: int
    """Version of the format."""

    key: str
    """Hash of the sources, the tokenizer and the template."""

    itemsize: int
    """Size of a token in bytes."""

    is_whole: bool = False
    """Whether the cache is complete."""

    source: int = 0
    """Number of finished sources. The next one is read from `offset`, after `number` lines."""

    offset: int = 0
    """Position in the current source."""

    number: int = 0
    """Number of lines before the position."""

    tokens: int = 0
    """Number of tokens."""

    trained: int = 0
    """Number of trained tokens."""

    documents: int = 0
    """Number of documents."""

    checksums: tuple[int, ...] = (0, 0, 0)
    """Checksums of the three arrays."""

    open_tokens: int = 0
    """Number of tokens of the last document, if it has not ended yet."""

    open_targets: int = 0
    """Number of trained tokens of the unfinished document."""

    open_hash: int = 0
    """Hash of the tokens of the unfinished document."""

    bad: int = 0
    """Number of bad lines."""

    bad_lines: tuple[str, ...] = ()
    """The first bad lines, with file and line number."""

    left_open: int = 0
    """Number of chats whose trained turns exclude the end-of-turn token."""

    reasoning_dropped: int = 0
    """Number of chats in which the template removed reasoning from trained turns."""

    source_ends: tuple[int, ...] = ()
    """Number of documents at the end of each source; earlier versions did not store it."""

    checksum: str = ""
    """Checksum of the other fields; earlier versions did not store it."""

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Number of valid bytes of each array."""
        return self.tokens * self.itemsize, self.tokens, self.documents * COLUMNS * 8

    def sealed(self) -> State:
        """Return the state with its checksum."""
        rest = to_json(replace(self, checksum=""))
        text = json.dumps(rest, sort_keys=True)
        return replace(self, checksum=f"{zlib.crc32(text.encode()):08x}")

    def content(self) -> str:
        """Return a string that is equal for equal tokens, wherever they came from."""
        sums = "".join(f"{part:08x}" for part in self.checksums)
        return f"{self.documents}-{self.tokens}-{sums}"


def open_cache(
    sources: Sequence[Source],
    tokens: Tokens,
    directory: Path,
    *,
    format_: RecordFormat,
    skip_bad: bool,
    on_progress: OnProgress,
) -> Cache:
    """Open the token cache of these sources; create or finish it if necessary."""
    key = _key(sources, tokens, format_)
    final, expected = directory / key, empty_state(key, tokens.size)
    if (cache := _open_complete(final, expected, tokens.size, on_progress)) is None:
        with _lock(directory, key, on_progress):
            # Another process may have created it while this one waited for the lock.
            cache = _open_complete(final, expected, tokens.size, on_progress)
            if cache is None:
                state = _tokenize(
                    final, expected, sources, tokens, format_, skip_bad=skip_bad,
                    on_progress=on_progress,
                )  # fmt: skip
                cache = Cache(final, state, tokens.size)
    if cache.state.bad and not skip_bad:
        raise BadLinesError(cache.state.bad_lines, cache.state.bad)
    if not cache.state.documents:
        names = ", ".join(source.name for source in sources)
        bad = cache.state.bad
        noun = "line" if bad == 1 else "lines"
        raise EmptyDataError(f"{names}: no example found ({bad} bad {noun})")
    return cache


def default_directory() -> Path:
    """Return the default directory for token caches."""
    return cache_directory() / "tokens"


def empty_state(key: str, vocabulary: int) -> State:
    """Return the state of an empty cache."""
    itemsize = 2 if vocabulary <= 1 << 16 else 4
    return State(magic=MAGIC, version=State.FORMAT, key=key, itemsize=itemsize)


def read_state(directory: Path, expected: State) -> State:
    """Read the state of a cache. Raises CacheError if it is damaged or another cache."""
    try:
        state = load(State, directory / STATE)
    except RecordError as problem:
        raise CacheError(str(directory), problem.problem or "its state is invalid") from None
    for field in ("magic", "version", "key", "itemsize"):
        if getattr(state, field) != getattr(expected, field):
            raise CacheError(
                str(directory),
                f"{field} is {getattr(state, field)!r}, expected {getattr(expected, field)!r}",
            )
    if state.checksum and state.checksum != state.sealed().checksum:
        raise CacheError(str(directory), f"{STATE} does not match its checksum")
    for name, length in zip(ARRAYS, state.lengths, strict=True):
        file = directory / name
        size = file.stat().st_size if file.is_file() else 0
        if size < length or (state.is_whole and size != length):
            raise CacheError(str(directory), f"{name} has {size} B, expected {length} B")
    return state


def check_arrays(directory: Path, state: State, on_progress: OnProgress) -> None:
    """Read the arrays, and raise CacheError if the disk returns other bytes than were written."""
    total, before = sum(state.lengths), 0
    for name, length, expected in zip(ARRAYS, state.lengths, state.checksums, strict=True):
        crc, done = 0, 0
        try:
            with (directory / name).open("rb") as file:
                while done < length and (piece := file.read(min(length - done, CHECKED_BYTES))):
                    crc, done = zlib.crc32(piece, crc), done + len(piece)
                    if total > CHECKED_BYTES:  # otherwise it takes no time
                        on_progress(before + done, total, "checking the token cache")
        except OSError as error:
            raise CacheError(str(directory), f"{name} cannot be read: {error.strerror}") from error
        if crc != expected:
            problem = f"{name} has other bytes than were written (it does not match its checksum)"
            raise CacheError(str(directory), problem)
        before += length


class Writer:
    """Appends documents to the arrays of a `.part` directory, starting from a journaled state."""

    def __init__(self, directory: Path, state: State) -> None:
        self.directory, self.state = directory, state
        with cache_write_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._files = [(directory / name).open("ab") for name in ARRAYS]
            # Discard what an interrupted run wrote after its last journal entry.
            for file, length in zip(self._files, state.lengths, strict=True):
                file.truncate(length)

    def append(self, documents: Sequence[Encoded], **progress: Any) -> None:
        """Write and sync documents, then journal them with the `progress` of the sources."""
        ids = [document.ids for document in documents]
        trained = [document.trained for document in documents]
        arrays = (
            np.concatenate([*ids, np.zeros(0, np.int64)]).astype(f"<u{self.state.itemsize}"),
            np.concatenate([*trained, np.zeros(0, np.uint8)]),
        )
        rows, state = self._rows(documents, [part.tobytes() for part in ids])
        sums = []
        parts = zip(self._files, (*arrays, rows), self.state.checksums, strict=True)
        # The arrays must be on disk before the journal says so: a journal that is behind the arrays
        # only repeats work, but one that is ahead of them would vouch for missing data.
        with cache_write_errors(self.directory):
            for file, array, before in parts:
                raw = array.tobytes()
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
                sums.append(zlib.crc32(raw, before))
        self.state = replace(
            state,
            tokens=state.tokens + len(arrays[0]),
            trained=state.trained + int(arrays[1].sum()),
            checksums=tuple(sums),
            left_open=state.left_open + sum(document.leaves_end_open for document in documents),
            reasoning_dropped=state.reasoning_dropped + sum(d.drops_reasoning for d in documents),
            **progress,
        )
        with cache_write_errors(self.directory):
            save(self.state.sealed(), self.directory / STATE)

    def _rows(
        self, documents: Sequence[Encoded], raws: Sequence[bytes]
    ) -> tuple[npt.NDArray[np.int64], State]:
        """Return a row for each document that ends here, and the state of an unfinished one."""
        rows, end = [], self.state.tokens
        length, targets = self.state.open_tokens, self.state.open_targets
        hashed = self.state.open_hash
        for document, raw in zip(documents, raws, strict=True):
            untrained = 1 if length == 0 else 0  # the first token of a document is never a target
            targets += int(document.trained[untrained:].sum())
            hashed = zlib.crc32(raw, hashed)
            end, length = end + len(document.ids), length + len(document.ids)
            if document.ends:
                rows.append((end, targets, hashed))
                length = targets = hashed = 0
        state = replace(
            self.state,
            documents=self.state.documents + len(rows),
            open_tokens=length,
            open_targets=targets,
            open_hash=hashed,
        )
        return np.array(rows, "<i8").reshape(-1, COLUMNS), state

    def finish(self, final: Path) -> State:
        """Mark the cache as complete and rename it to its final name."""
        self.close()
        self.state = replace(self.state, is_whole=True)
        with cache_write_errors(self.directory):
            save(self.state.sealed(), self.directory / STATE)
            if final.exists():
                shutil.rmtree(final)
            os.rename(self.directory, final)
            # Sync the parent directory, too, so that a power failure does not undo the rename.
            sync(final.parent)
        return self.state

    def close(self) -> None:
        """Close the arrays."""
        for file in self._files:
            # Journaled data is on disk already, and the next writer truncates the rest.
            with contextlib.suppress(OSError):
                file.close()


@contextlib.contextmanager
def cache_write_errors(directory: Path, kind: type[CacheError] = CacheError) -> Iterator[None]:
    """Raise errors of a full or read-only disk as CacheError."""
    try:
        yield
    except (OSError, RecordError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "problem", None) or error
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space, or choose" if is_full else "choose"
        raise kind(
            str(directory),
            f"the token cache cannot be written: {reason}; {remedy} another directory with "
            f"--cache. The next run continues from the tokens written so far",
        ) from error


class Cache:
    """A complete cache, memory-mapped."""

    def __init__(self, directory: Path, state: State, vocabulary: int) -> None:
        self.directory, self.state, self.vocabulary = directory, state, vocabulary
        self._maps = [_map(directory / name) for name in ARRAYS]
        raw: list[Any] = [mapped if mapped is not None else b"" for mapped in self._maps]
        self.tokens = np.frombuffer(raw[0], f"<u{state.itemsize}")
        self.trained = np.frombuffer(raw[1], np.uint8)
        self.documents = np.frombuffer(raw[2], "<i8").reshape(-1, COLUMNS)

    def release_pages(self) -> None:
        """Release the mapped pages, so that they do not count as memory of this process."""
        for mapped in self._maps[:2]:
            if mapped is not None:
                mapped.madvise(mmap.MADV_DONTNEED)


def _map(path: Path) -> mmap.mmap | None:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return None
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _key(sources: Sequence[Source], tokens: Tokens, format_: RecordFormat) -> str:
    parts = [State.FORMAT, ENCODING, tokens.fingerprint()]
    parts += [[source.identity() for source in sources]]
    parts += format_.identity()
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _open_complete(
    final: Path, expected: State, vocabulary: int, on_progress: OnProgress
) -> Cache | None:
    if not final.exists():
        return None
    try:
        state = read_state(final, expected)
        if not state.is_whole:
            raise CacheError(str(final), "is incomplete")
        check_arrays(final, state, on_progress)
        return Cache(final, state, vocabulary)
    except CacheError as problem:
        on_progress(0, 0, f"tokenizing again: {problem}")
        return None


def _tokenize(
    final: Path,
    expected: State,
    sources: Sequence[Source],
    tokens: Tokens,
    format_: RecordFormat,
    *,
    skip_bad: bool,
    on_progress: OnProgress,
) -> State:
    """Tokenize the sources from the journaled position. If interrupted, the `.part` remains."""
    part = final.with_name(f"{final.name}.part")
    writer = Writer(part, _journaled_state(part, expected, on_progress))
    try:
        sizes = [source.size for source in sources]
        while writer.state.source < len(sources):
            if writer.state.bad and not skip_bad:
                raise BadLinesError(writer.state.bad_lines, writer.state.bad)
            number = writer.state.source
            position = SourceOffset(writer.state.offset, writer.state.number)
            for chunk in _chunks(sources[number].read(position), position):
                _append_chunk(writer, chunk, tokens, format_)
                # A compressed file is smaller than its content, and a stream has no size.
                done = sum(sizes[:number]) + min(writer.state.offset, sizes[number])
                on_progress(done, max(1, sum(sizes)), f"tokenizing {sources[number].name}")
                if writer.state.bad and not skip_bad:
                    raise BadLinesError(writer.state.bad_lines, writer.state.bad)
            ends = (*writer.state.source_ends, writer.state.documents)
            writer.append([], source=number + 1, offset=0, number=0, source_ends=ends)
        # A source that was modified meanwhile would leave tokens of both versions in the cache.
        if _key(sources, tokens, format_) != expected.key:
            raise SourceError("data", "a source changed while it was being read; start again")
        return writer.finish(final)
    finally:
        writer.close()


def _journaled_state(part: Path, expected: State, on_progress: OnProgress) -> State:
    if part.exists():
        try:
            state = read_state(part, expected)
            check_arrays(part, state, on_progress)
            return state
        except CacheError as problem:
            on_progress(0, 0, f"starting over: {problem}")
            shutil.rmtree(part)
    return expected


def _chunks(items: Iterator[Item], position: SourceOffset) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    start = position.offset
    for item in items:
        chunk.append(item)
        if item.after.offset - start >= CHUNK_BYTES or len(chunk) >= CHUNK_ITEMS:
            yield chunk
            chunk, start = [], item.after.offset
    if chunk:
        yield chunk


def _append_chunk(writer: Writer, chunk: list[Item], tokens: Tokens, format_: RecordFormat) -> None:
    encoding = encode(chunk, tokens, format_)
    after, state = chunk[-1].after, writer.state
    space = max(0, KEPT_LINES - len(state.bad_lines))
    writer.append(
        encoding.documents,
        offset=after.offset,
        number=after.number,
        bad=state.bad + len(encoding.problems),
        bad_lines=(*state.bad_lines, *encoding.problems[:space]),
    )


@contextlib.contextmanager
def _lock(directory: Path, key: str, on_progress: OnProgress) -> Iterator[None]:
    """Lock a cache while it is created. The kernel releases the lock when the process ends."""
    with cache_write_errors(directory, NoCacheError):
        directory.mkdir(parents=True, exist_ok=True)
        # A link with this name, planted by somebody else, is an error: it must not create a file.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = open(os.open(directory / f"{key}.lock", flags, 0o666), "r+b")  # noqa: SIM115
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress(0, 0, "waiting for another process that tokenizes the same data")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
