"""Making a token cache, or finding it made. Room: show."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.data.cache import KEPT_LINES, Cache, State, Writer, begin, read_state, written_to
from penstock.data.encode import encode
from penstock.data.errors import BadLinesError, CacheError, EmptyDataError, SourceError
from penstock.data.sources import Item, Place, Source
from penstock.data.tokenizer import Tokens
from penstock.units import MiB

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
