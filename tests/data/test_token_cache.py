"""The token cache is written once, resumed after a kill, and never used if incomplete."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.data import open_dataset, token_cache
from penstock.data.errors import BadLinesError, CacheError, SourceError
from penstock.data.token_cache import ARRAYS, STATE
from tests.data.helpers import chat, write_lines
from tests.support.small_tokenizers import MARKED, small_tokenizer

RECORDS = [chat(f"What is {n}?", f"It is {n}, {'very ' * (n % 7)}much.") for n in range(200)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "data.jsonl", RECORDS)


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class Reports(list[tuple[int, int, str]]):
    """Collects the calls of `on_progress`."""

    def __call__(self, done: int, total: int, what: str) -> None:
        self.append((done, total, what))

    @property
    def messages(self) -> str:
        return "; ".join(what for _, total, what in self if not total)


def bytes_of(caches: Path) -> dict[str, bytes]:
    """Return the arrays and the state of the only cache, which must be complete."""
    (whole,) = (path for path in caches.iterdir() if path.is_dir())
    assert not whole.name.endswith(".part")
    return {name: (whole / name).read_bytes() for name in (*ARRAYS, STATE)}


def test_data_is_tokenized_once(file: Path, caches: Path) -> None:
    first, second = Reports(), Reports()
    dataset = open_dataset(file, small_tokenizer(), cache_dir=caches, on_progress=first)
    again = open_dataset(file, small_tokenizer(), cache_dir=caches, on_progress=second)

    assert first[-1][:2] == (file.stat().st_size, file.stat().st_size)
    assert second == []
    assert all((dataset[n].ids == again[n].ids).all() for n in range(200))


def test_bad_lines_of_an_earlier_encoding_are_read_again(
    tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines(tmp_path / "data.jsonl", [chat("What is two?", "Two."), {"other": 1}])
    with monkeypatch.context() as earlier:
        earlier.setattr(token_cache, "ENCODING", token_cache.ENCODING - 1)
        with pytest.raises(BadLinesError):
            open_dataset(file, small_tokenizer(), cache_dir=caches)
    reports = Reports()

    with pytest.raises(BadLinesError):
        open_dataset(file, small_tokenizer(), cache_dir=caches, on_progress=reports)

    assert reports  # it was tokenized again


def test_another_file_tokenizer_or_template_uses_another_cache(file: Path, caches: Path) -> None:
    def count() -> int:
        open_dataset(file, tokenizer, cache_dir=caches)
        return len([path for path in caches.iterdir() if path.is_dir()])

    tokenizer = small_tokenizer()
    assert count() == 1
    tokenizer = small_tokenizer(MARKED)
    assert count() == 2
    tokenizer = small_tokenizer(vocabulary=380)
    assert count() == 3
    os.utime(file, ns=(1, 1))
    assert count() == 4


CHILD = """
import sys
import threading
from pathlib import Path
from penstock.data import token_cache, open_dataset
from tests.support.small_tokenizers import small_tokenizer
token_cache.CHUNK_ITEMS = 20
real, left = token_cache.encode, int(sys.argv[3])
def encode(items, tokens, format_):
    global left
    left -= 1
    if left < 0:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    return real(items, tokens, format_)
token_cache.encode = encode
open_dataset(Path(sys.argv[1]), small_tokenizer(), cache_dir=sys.argv[2])
"""


def tokenize_until_killed(file: Path, caches: Path, chunks: int) -> None:
    command = [sys.executable, "-c", CHILD, str(file), str(caches), str(chunks)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, check=False, env={**os.environ, "PYTHONPATH": "."})
    assert ended.returncode == -signal.SIGKILL


def test_a_killed_tokenization_resumes_where_it_stopped(
    file: Path, caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_dataset(file, small_tokenizer(), cache_dir=tmp_path / "uninterrupted")
    tokenize_until_killed(file, caches, 3)
    tokenize_until_killed(file, caches, 2)
    (part,) = (path for path in caches.iterdir() if path.is_dir())
    assert part.name.endswith(".part")
    journal = json.loads((part / STATE).read_text())
    assert journal["documents"] == 100
    for name in ARRAYS:  # bytes after the journaled length are discarded
        with (part / name).open("ab") as array:
            array.write(b"half a chunk")

    encoded = []
    real = token_cache.encode
    monkeypatch.setattr(
        token_cache, "encode", lambda items, t, f: encoded.extend(items) or real(items, t, f)
    )
    dataset = open_dataset(file, small_tokenizer(), cache_dir=caches)

    assert [item.where.rsplit(":")[-1] for item in encoded] == [str(n) for n in range(101, 201)]
    assert len(dataset) == 200
    assert bytes_of(caches) == bytes_of(tmp_path / "uninterrupted")


def test_tokenizing_resumes_in_the_middle_of_a_document(
    caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.data.text_files.TEXT_PIECE", 64)
    monkeypatch.setattr(token_cache, "CHUNK_ITEMS", 5)
    text = tmp_path / "book.txt"
    text.write_text("".join(f"Water runs down pipe {n}.\n" for n in range(100)) + "\fThe end.")
    open_dataset(text, small_tokenizer(), cache_dir=tmp_path / "uninterrupted")
    real, left = token_cache.encode, [3]

    def encode(items: Any, tokens: Any, format_: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(items, tokens, format_)

    monkeypatch.setattr(token_cache, "encode", encode)
    with pytest.raises(KeyboardInterrupt):
        open_dataset(text, small_tokenizer(), cache_dir=caches)
    monkeypatch.setattr(token_cache, "encode", real)

    dataset = open_dataset(text, small_tokenizer(), cache_dir=caches)
    assert len(dataset) == 2
    assert dataset[0].ids.tolist().count(small_tokenizer().eos_token_id) == 1
    assert bytes_of(caches) == bytes_of(tmp_path / "uninterrupted")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGE = [
    ("tokens.bin", truncate, "tokens.bin has"),
    ("trained.bin", truncate, "trained.bin has"),
    ("trained.bin", Path.unlink, "trained.bin has 0 B"),
    ("documents.bin", truncate, "documents.bin has"),
    ("documents.bin", flip, "documents.bin has other bytes than were written"),
    ("tokens.bin", flip, "tokens.bin has other bytes than were written"),
    ("trained.bin", flip, "trained.bin has other bytes than were written"),
    (
        STATE,
        lambda path: path.write_text(path.read_text().replace('ends": [200', 'ends": [100')),
        "state.json does not match its checksum",
    ),
    (STATE, Path.unlink, "cannot be read"),
    (STATE, lambda path: path.write_text("{}"), ""),
    (
        STATE,
        lambda path: path.write_text(path.read_text().replace("penstock tokens", "x")),
        "magic",
    ),
    (
        STATE,
        lambda path: path.write_text(path.read_text().replace("true", "false")),
        "does not match its checksum",
    ),
    (
        STATE,
        lambda path: path.write_text(path.read_text().replace('version": 1', 'version": 9')),
        "",
    ),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGE)
def test_a_damaged_cache_is_detected_and_created_again(
    name: str, damage: Any, words: str, file: Path, caches: Path
) -> None:
    open_dataset(file, small_tokenizer(), cache_dir=caches)
    before = bytes_of(caches)
    (whole,) = (path for path in caches.iterdir() if path.is_dir())
    damage(whole / name)

    reports = Reports()
    dataset = open_dataset(file, small_tokenizer(), cache_dir=caches, on_progress=reports)

    assert "tokenizing again" in reports.messages
    assert words in reports.messages
    assert len(dataset) == 200
    assert bytes_of(caches) == before


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_part_is_started_over(damage: Any, file: Path, caches: Path) -> None:
    tokenize_until_killed(file, caches, 2)
    (part,) = (path for path in caches.iterdir() if path.is_dir())
    damage(part / "tokens.bin")

    reports = Reports()
    assert len(open_dataset(file, small_tokenizer(), cache_dir=caches, on_progress=reports)) == 200
    assert "starting over" in reports.messages


def test_a_cache_of_an_earlier_version_is_used(file: Path, caches: Path) -> None:
    """Its state has no checksum of its own."""
    open_dataset(file, small_tokenizer(), cache_dir=caches)
    (whole,) = (path for path in caches.iterdir() if path.is_dir())
    state = json.loads((whole / STATE).read_text())
    del state["checksum"]
    (whole / STATE).write_text(json.dumps(state))

    reports = Reports()
    open_dataset(file, small_tokenizer(), cache_dir=caches, on_progress=reports)

    assert "again" not in reports.messages


def test_a_source_that_changes_while_it_is_read_is_rejected(
    file: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = token_cache.encode

    def encode(items: Any, tokens: Any, format_: Any) -> Any:
        with file.open("a") as more:
            more.write("\n")
        return real(items, tokens, format_)

    monkeypatch.setattr(token_cache, "encode", encode)
    with pytest.raises(SourceError, match="changed while it was being read"):
        open_dataset(file, small_tokenizer(), cache_dir=caches)
    assert all(path.name.endswith((".part", ".lock")) for path in caches.iterdir())


def test_a_full_disk_is_reported_and_tokenizing_resumes_later(
    file: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "CHUNK_ITEMS", 20)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, old[1]))
        with pytest.raises(CacheError, match=r"cannot be written: File too large.*--cache"):
            open_dataset(file, small_tokenizer(), cache_dir=caches)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    (part,) = (path for path in caches.iterdir() if path.is_dir())
    assert json.loads((part / STATE).read_text())["documents"] > 0

    assert len(open_dataset(file, small_tokenizer(), cache_dir=caches)) == 200


def test_a_cache_directory_that_cannot_be_created_is_reported(file: Path, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file")

    with pytest.raises(CacheError, match="cannot be written: Not a directory; choose another"):
        open_dataset(file, small_tokenizer(), cache_dir=tmp_path / "occupied" / "cache")


def test_a_process_waits_while_another_creates_the_cache(file: Path, caches: Path) -> None:
    open_dataset(file, small_tokenizer(), cache_dir=caches)
    (whole,) = (path for path in caches.iterdir() if path.is_dir())
    whole.rename(whole.with_name("aside"))  # as if another process were still writing it
    waits, found = threading.Event(), []

    def on_progress(done: int, total: int, what: str) -> None:
        assert "waiting for another process" in what  # it never tokenizes
        waits.set()

    def work() -> None:
        found.append(
            open_dataset(file, small_tokenizer(), cache_dir=caches, on_progress=on_progress)
        )

    with (caches / f"{whole.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=work)
        thread.start()
        assert waits.wait(60)
        whole.with_name("aside").rename(whole)
    thread.join()

    assert len(found[0]) == 200


def test_the_default_cache_directory_follows_xdg_cache_home(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    open_dataset(file, small_tokenizer())

    assert bytes_of(tmp_path / "xdg" / "penstock" / "tokens")


def test_a_planted_link_in_place_of_the_lock_is_not_followed(file: Path, caches: Path) -> None:
    open_dataset(file, small_tokenizer(), cache_dir=caches)
    (lock,) = caches.glob("*.lock")
    shutil.rmtree(lock.with_suffix(""))
    lock.unlink()
    precious = caches / "precious"
    precious.write_text("precious")
    lock.symlink_to(precious)
    with pytest.raises(CacheError, match="cannot be written: Too many levels of symbolic links"):
        open_dataset(file, small_tokenizer(), cache_dir=caches)
    assert precious.read_text() == "precious"


def test_the_numbers_of_a_vocabulary_may_have_gaps(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "</s>": 1, "a": 2, "b": 90_000}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    file = write_lines(tmp_path / "data.jsonl", [{"text": "a b a b"}])

    dataset = open_dataset(file, tokenizer, cache_dir=tmp_path / "cache")
    (batch,) = dataset.pack(8).batches(1, epochs=1)

    assert batch["input_ids"][0, :4].tolist() == [2, 90_000, 2, 90_000]
