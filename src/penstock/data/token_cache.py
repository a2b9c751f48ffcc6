"""Tokens on disk: written once, resumable, whole or not taken for whole. Room: show.

A cache is a directory of three plain arrays and `state.json`, which says how much of them is valid.
While it is being made the directory's name ends in `.part`, and the state is also the journal: it
is replaced after each chunk, once the chunk's bytes are on disk. Who finds a `.part` cuts the
arrays to what the journal vouches for and goes on there; the last act is the rename.
"""

from __future__ import annotations

import contextlib
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
from penstock.data.errors import BadLinesError, CacheError, EmptyDataError, SourceError
from penstock.data.sources import Item, Place, Source
from penstock.data.tokenizer import Tokens
from penstock.errors import RecordError
from penstock.records import load, save
from penstock.units import MiB

MAGIC = "penstock tokens"
STATE = "state.json"
TOKENS, TRAINED, DOCUMENTS = ARRAYS = ("tokens.bin", "trained.bin", "documents.bin")
COLUMNS = 3
"""Of documents.bin: the document's end in tokens, its targets, a hash of its tokens."""

KEPT_LINES = 100
"""Bad lines that are remembered word by word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """How far a cache is, or with `is_whole` what it holds."""

    FORMAT: ClassVar[int] = 1

    magic: str
    version: int
    key: str
    """Of the sources, the tokenizer and the template."""

    itemsize: int
    """Bytes of a token."""

    is_whole: bool = False
    source: int = 0
    """Sources that are done; the next one is read from `offset`, after `number` lines."""

    offset: int = 0
    number: int = 0
    tokens: int = 0
    trained: int = 0
    documents: int = 0
    checksums: tuple[int, ...] = (0, 0, 0)
    """Of the three arrays."""

    open_tokens: int = 0
    open_targets: int = 0
    open_hash: int = 0
    """Of a document that is not over yet."""

    bad: int = 0
    bad_lines: tuple[str, ...] = ()
    left_open: int = 0
    """Chats whose trained turns stop before the end-of-turn token."""

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Valid bytes of each array."""
        return self.tokens * self.itemsize, self.tokens, self.documents * COLUMNS * 8

    def content(self) -> str:
        """The same for the same tokens, wherever they came from."""
        sums = "".join(f"{part:08x}" for part in self.checksums)
        return f"{self.documents}-{self.tokens}-{sums}"


def begin(key: str, vocabulary: int) -> State:
    """The state of an empty cache."""
    itemsize = 2 if vocabulary <= 1 << 16 else 4
    return State(magic=MAGIC, version=State.FORMAT, key=key, itemsize=itemsize)


def read_state(directory: Path, wanted: State) -> State:
    """The state of the cache there. CacheError if there is another thing, or it is damaged."""
    try:
        state = load(State, directory / STATE)
    except RecordError as problem:
        raise CacheError(str(directory), problem.problem or "its state cannot be read") from None
    for field in ("magic", "version", "key", "itemsize"):
        if getattr(state, field) != getattr(wanted, field):
            raise CacheError(str(directory), f"{field} is {getattr(state, field)!r}")
    for name, length in zip(ARRAYS, state.lengths, strict=True):
        file = directory / name
        there = file.stat().st_size if file.is_file() else 0
        if there < length or (state.is_whole and there != length):
            raise CacheError(str(directory), f"{name} has {there} B of {length}")
    return state


class Writer:
    """Appends documents to the arrays of a `.part`, from a journaled state on."""

    def __init__(self, directory: Path, state: State) -> None:
        self.directory, self.state = directory, state
        with written_to(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._files = [(directory / name).open("ab") for name in ARRAYS]
            for file, length in zip(self._files, state.lengths, strict=True):
                file.truncate(length)

    def append(self, documents: Sequence[Encoded], **progress: Any) -> None:
        """Write them, sync, and journal: them and the `progress` of the sources, or neither."""
        ids = [document.ids for document in documents]
        trained = [document.trained for document in documents]
        arrays = (
            np.concatenate([*ids, np.zeros(0, np.int64)]).astype(f"<u{self.state.itemsize}"),
            np.concatenate([*trained, np.zeros(0, np.uint8)]),
        )
        rows, state = self._rows(documents, [part.tobytes() for part in ids])
        sums = []
        parts = zip(self._files, (*arrays, rows), self.state.checksums, strict=True)
        with written_to(self.directory):
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
            **progress,
        )
        with written_to(self.directory):
            save(self.state, self.directory / STATE)

    def _rows(
        self, documents: Sequence[Encoded], raws: Sequence[bytes]
    ) -> tuple[npt.NDArray[np.int64], State]:
        """A row for each document that ends here, and the state of the one that does not."""
        rows, end = [], self.state.tokens
        length, targets = self.state.open_tokens, self.state.open_targets
        hashed = self.state.open_hash
        for document, raw in zip(documents, raws, strict=True):
            given = 1 if length == 0 else 0  # the first token of a document is never a target
            targets += int(document.trained[given:].sum())
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
        """Say that it is whole, and give it its name."""
        self.close()
        self.state = replace(self.state, is_whole=True)
        with written_to(self.directory):
            save(self.state, self.directory / STATE)
            if final.exists():
                shutil.rmtree(final)
            os.rename(self.directory, final)
            descriptor = os.open(final.parent, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        return self.state

    def close(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):  # what was journaled is on disk, the rest not kept
                file.close()


@contextlib.contextmanager
def written_to(directory: Path) -> Iterator[None]:
    """Tell of a disk that is full or not writable as an error the user can mend."""
    try:
        yield
    except (OSError, RecordError) as failed:
        reason = getattr(failed, "strerror", None) or getattr(failed, "problem", None) or failed
        raise CacheError(
            str(directory),
            f"the token cache cannot be written: {reason}; free some room, or choose another "
            f"directory with --cache. What was tokenized is kept and gone on from",
        ) from failed


class Cache:
    """A whole cache, mapped."""

    def __init__(self, directory: Path, state: State, vocabulary: int) -> None:
        self.directory, self.state, self.vocabulary = directory, state, vocabulary
        self._maps = [_map(directory / name) for name in ARRAYS]
        raw: list[Any] = [kept if kept is not None else b"" for kept in self._maps]
        self.tokens = np.frombuffer(raw[0], f"<u{state.itemsize}")
        self.trained = np.frombuffer(raw[1], np.uint8)
        self.documents = np.frombuffer(raw[2], "<i8").reshape(-1, COLUMNS)
        if zlib.crc32(raw[2]) != state.checksums[2]:
            raise CacheError(str(directory), f"{DOCUMENTS} holds other bytes than were written")

    def let_go(self) -> None:
        """Give the pages back, so that what was read once does not count as this process's."""
        for kept in self._maps[:2]:
            if kept is not None:
                kept.madvise(mmap.MADV_DONTNEED)


def _map(path: Path) -> mmap.mmap | None:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return None
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


# --------
# Making a token cache, or finding it made. Room: show.

CHUNK_BYTES = 2 * MiB
CHUNK_ITEMS = 4096
"""At most so much is encoded at once, written and journaled."""

Tell = Callable[[int, int, str], None]


def default_directory() -> Path:
    """Where caches are kept unless the user says otherwise."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "penstock" / "tokens"


def open_cache(
    sources: Sequence[Source], tokens: Tokens, directory: Path, *, skip_bad: bool, tell: Tell
) -> Cache:
    """The cache of these sources' tokens; made, or made to the end, where it is not whole."""
    key = _key(sources, tokens)
    final, wanted = directory / key, begin(key, tokens.size)
    if (cache := _open_whole(final, wanted, tokens.size, tell)) is None:
        with _lock(directory, key, tell):
            # Another process may have made it while this one waited.
            cache = _open_whole(final, wanted, tokens.size, tell)
            if cache is None:
                state = _make(final, wanted, sources, tokens, skip_bad=skip_bad, tell=tell)
                cache = Cache(final, state, tokens.size)
    if cache.state.bad and not skip_bad:
        raise BadLinesError(cache.state.bad_lines, cache.state.bad)
    if not cache.state.documents:
        names = ", ".join(source.name for source in sources)
        raise EmptyDataError(f"{names}: there is no example in it ({cache.state.bad} bad lines)")
    return cache


def _key(sources: Sequence[Source], tokens: Tokens) -> str:
    parts = [State.FORMAT, tokens.fingerprint(), [source.identity() for source in sources]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _open_whole(final: Path, wanted: State, vocabulary: int, tell: Tell) -> Cache | None:
    if not final.exists():
        return None
    try:
        state = read_state(final, wanted)
        if not state.is_whole:
            raise CacheError(str(final), "is not whole")
        return Cache(final, state, vocabulary)
    except CacheError as problem:
        tell(0, 0, f"tokenizing again: {problem}")
        return None


def _make(
    final: Path,
    wanted: State,
    sources: Sequence[Source],
    tokens: Tokens,
    *,
    skip_bad: bool,
    tell: Tell,
) -> State:
    """Tokenize from where it was left. The `.part` stays if this is stopped, for the next time."""
    part = final.with_name(f"{final.name}.part")
    writer = Writer(part, _resume(part, wanted, tell))
    try:
        sizes = [source.size for source in sources]
        while writer.state.source < len(sources):
            if writer.state.bad and not skip_bad:
                raise BadLinesError(writer.state.bad_lines, writer.state.bad)
            number = writer.state.source
            place = Place(writer.state.offset, writer.state.number)
            for chunk in _chunks(sources[number].read(place), place):
                _add(writer, chunk, tokens)
                done = sum(sizes[:number]) + writer.state.offset
                tell(done, sum(sizes), f"tokenizing {sources[number].name}")
                if writer.state.bad and not skip_bad:
                    raise BadLinesError(writer.state.bad_lines, writer.state.bad)
            writer.append([], source=number + 1, offset=0, number=0)
        if _key(sources, tokens) != wanted.key:
            raise SourceError("data", "a source changed while it was read; start again")
        return writer.finish(final)
    finally:
        writer.close()


def _resume(part: Path, wanted: State, tell: Tell) -> State:
    if part.exists():
        try:
            return read_state(part, wanted)
        except CacheError as problem:
            tell(0, 0, f"starting over: {problem}")
            shutil.rmtree(part)
    return wanted


def _chunks(items: Iterator[Item], place: Place) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    start = place.offset
    for item in items:
        chunk.append(item)
        if item.after.offset - start >= CHUNK_BYTES or len(chunk) >= CHUNK_ITEMS:
            yield chunk
            chunk, start = [], item.after.offset
    if chunk:
        yield chunk


def _add(writer: Writer, chunk: list[Item], tokens: Tokens) -> None:
    encoding = encode(chunk, tokens)
    after, state = chunk[-1].after, writer.state
    room = max(0, KEPT_LINES - len(state.bad_lines))
    writer.append(
        encoding.documents,
        offset=after.offset,
        number=after.number,
        bad=state.bad + len(encoding.problems),
        bad_lines=(*state.bad_lines, *encoding.problems[:room]),
    )


@contextlib.contextmanager
def _lock(directory: Path, key: str, tell: Tell) -> Iterator[None]:
    """One process at a time makes a cache. The kernel lets go of it when the process ends."""
    with written_to(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / f"{key}.lock").open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(0, 0, "waiting for another process that tokenizes the same data")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
