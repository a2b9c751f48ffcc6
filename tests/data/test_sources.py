"""Sources: what can be read, and errors with file and line number for everything else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.data import items as data_items
from penstock.data import open_dataset, sources, text_files
from penstock.data.errors import BadLinesError, EmptyDataError, SourceError
from penstock.data.items import Item, SourceOffset
from penstock.data.json_files import LineFile
from penstock.data.text_files import TextFile
from tests.data.helpers import chat, dataset_of, trained_text, whole_text, write_lines
from tests.support.small_tokenizers import small_tokenizer

GOOD = {"text": "Water runs down."}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", r"is not JSON: [^(]* at column 2(?! \()"),
        ("[", "is not JSON.*Write one object per line, or an array of objects"),
        ("},", "is not JSON.*Write one object per line"),
        ("[1, 2]", "contains an array, not an object"),
        ("17", "contains a number"),
        ("{}", "has no keys; expected messages"),
        ('{"question": "x", "answer": "y"}', "has question, answer; expected messages.*--columns"),
        ('{"prompt": "x", "chosen": "y", "rejected": "z"}', "is a preference pair.*open_pairs"),
        ('{"text": 3}', "text must be a string, got 3"),
        ('{"text": "  "}', "text is empty"),
        ('{"messages": []}', "messages must be a list of messages"),
        ('{"messages": ["hello"]}', "message 1 of messages must be an object"),
        ('{"messages": [{"content": "x"}]}', r"message 1 of messages has no role \(or from\)"),
        ('{"messages": [{"role": "user"}]}', "message 1 of messages has no content"),
        (
            '{"messages": [{"role": "user", "content": 5}]}',
            "the content of message 1 of messages must be text",
        ),
        ('{"messages": [{"role": "user", "content": "x"}]}', "has no assistant turn to train"),
        (
            '{"messages": [{"role": "assistant", "content": "x", "weight": 2}]}',
            "message 1 has weight 2; it must be 0 or 1",
        ),
        ('{"prompt": "x", "completion": ""}', "completion is empty"),
        ('{"prompt": ["x"], "completion": "y"}', "prompt must be a string"),
        ('{"text": "\\ud83d"}', "contains half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named_with_its_number(line: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadLinesError, match=rf"data.jsonl:3: {words}") as caught:
        dataset_of(tmp_path, [GOOD, "", line, GOOD])

    assert caught.value.count == 1
    assert "--skip-bad-lines" in str(caught.value)


def test_bytes_that_are_not_utf8_are_named_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')

    with pytest.raises(BadLinesError, match=r"data.jsonl:2: is not UTF-8 at byte 10"):
        open_dataset(file, small_tokenizer(), cache_dir=tmp_path / "cache")


def test_bad_lines_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    records = [GOOD, "{", {"text": ""}, GOOD]
    with pytest.raises(BadLinesError) as caught:
        dataset_of(tmp_path, records)
    assert (caught.value.count, len(caught.value.lines)) == (2, 2)

    dataset = dataset_of(tmp_path, records, skip_bad_lines=True)
    assert (len(dataset), dataset.bad_count) == (2, 2)
    assert [line.split(" ")[0].rsplit(":", 2)[1] for line in dataset.bad_lines] == ["2", "3"]

    with pytest.raises(BadLinesError):  # also if the cache is complete now
        dataset_of(tmp_path, records)


def test_the_first_of_many_bad_lines_are_quoted(tmp_path: Path) -> None:
    with pytest.raises(BadLinesError, match=r"9 lines are not usable") as caught:
        dataset_of(tmp_path, [{f"column{number}": 1} for number in range(9)])
    assert str(caught.value).count("data.jsonl:") == 3
    assert "and 6 more" in str(caught.value)


def test_a_problem_of_many_lines_is_quoted_once(tmp_path: Path) -> None:
    with pytest.raises(BadLinesError, match=r"9 lines are not usable") as caught:
        dataset_of(tmp_path, [*["{"] * 8, {"text": ""}])
    assert str(caught.value).count("data.jsonl:") == 2
    assert "(also 7 other lines)" in str(caught.value)
    assert "more" not in str(caught.value)


def test_chats_under_another_name_are_recognized(tmp_path: Path) -> None:
    record = {"id": 1, "dialog": chat("x", "y")["messages"]}
    with pytest.raises(BadLinesError, match=r"in 'dialog', pass --columns messages=dialog"):
        dataset_of(tmp_path, [record])


@pytest.mark.parametrize("records", [[], ["", "  "]])
def test_empty_data_is_an_error(records: list[Any], tmp_path: Path) -> None:
    with pytest.raises(EmptyDataError, match="no example"):
        dataset_of(tmp_path, records)


def test_data_with_only_bad_lines_is_empty_if_they_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(EmptyDataError, match=r"\(1 bad line\)"):
        dataset_of(tmp_path, ["{"], skip_bad_lines=True)


def test_a_chat_that_the_template_rejects_is_a_bad_line(tmp_path: Path) -> None:
    template = "{{ raise_exception('System role not supported') }}"

    with pytest.raises(BadLinesError, match=r":1: the chat template rejects it: System role not"):
        dataset_of(tmp_path, [chat("x", "y")], small_tokenizer(template))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.jsonl", "no such file"),
        ("data.xlsx", r"unknown format; Penstock reads JSON \(.jsonl"),
        ("data.jsonl.gz", "cannot be decompressed"),
        ("data.csv", "has no header row"),
        ("data.parquet.gz", "unknown format"),
        ("empty", "contains no data files"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, words: str, tmp_path: Path) -> None:
    for file in ("data.csv", "data.xlsx", "data.parquet.gz"):
        (tmp_path / file).write_text("")
    (tmp_path / "data.jsonl.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "empty").mkdir()

    with pytest.raises(SourceError, match=words) as caught:
        open_dataset(tmp_path / name, small_tokenizer(), cache_dir=tmp_path / "cache")
    assert name in caught.value.source


@pytest.mark.parametrize("name", ["folder/gone.jsonl", "a/longer/path", "gone"])
def test_a_missing_file_is_not_taken_for_a_dataset_of_the_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file or directory"):
        open_dataset(name, small_tokenizer(), cache_dir=tmp_path)


@pytest.mark.parametrize(("name", "library"), [("d.parquet", "pyarrow"), ("own/er", "datasets")])
def test_a_missing_library_is_named(
    name: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    source = tmp_path / name if library == "pyarrow" else name

    with pytest.raises(SourceError, match=rf"install {library}: pip install {library}"):
        open_dataset(source, small_tokenizer(), cache_dir=tmp_path / "cache")


def test_the_files_of_a_directory_are_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "b.jsonl", [{"text": "second"}])
    write_lines(folder / "a.jsonl", [{"text": "first"}])
    (folder / "c.txt").write_text("third")
    (folder / "README").write_text("not data")

    dataset = open_dataset(folder, small_tokenizer(), cache_dir=tmp_path / "cache")

    texts = [whole_text(dataset, number) for number in range(len(dataset))]
    assert texts == ["first<|end|>", "second<|end|>", "third<|end|>"]


def test_lines_are_counted_from_one_in_every_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [GOOD] * 3)
    write_lines(folder / "b.jsonl", [GOOD, "{"])

    with pytest.raises(BadLinesError, match=r"b\.jsonl:2: "):
        open_dataset(folder, small_tokenizer(), cache_dir=tmp_path / "cache")


class FakeBatch:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.num_rows = rows, len(rows)

    def slice(self, at: int, length: int) -> FakeBatch:
        return FakeBatch(self.rows[at : at + length])

    def to_pylist(self) -> list[dict[str, Any]]:
        return self.rows


class FakeParquet:
    """The used part of pyarrow.parquet.ParquetFile."""

    ROWS: tuple[dict[str, Any], ...] = tuple(
        {"text": f"row {n}", "messages": None} for n in range(600)
    )

    def __init__(self, path: Path) -> None:
        self.metadata = type("Metadata", (), {"num_rows": len(self.ROWS)})

    def iter_batches(self, batch_size: int) -> Iterator[FakeBatch]:
        for at in range(0, len(self.ROWS), batch_size):
            yield FakeBatch(list(self.ROWS[at : at + batch_size]))


def test_a_parquet_file_can_be_read_from_any_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("pyarrow.parquet")
    module.ParquetFile = FakeParquet  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    (tmp_path / "d.parquet").write_bytes(b"PAR1")

    ((source,),) = sources.find_sources(tmp_path / "d.parquet")
    items = list(source.read(SourceOffset(300, 300)))

    assert len(items) == 300
    assert items[0].record == {"text": "row 300"}  # an empty column is a missing key
    assert items[0].where.endswith("d.parquet, row 301")
    assert len(open_dataset(tmp_path / "d.parquet", small_tokenizer(), cache_dir=tmp_path)) == 600


def test_a_hub_dataset_is_read_with_its_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load_dataset(name: str, split: str) -> list[dict[str, str]]:
        calls.append((name, split))
        return [{"text": "first"}, {"text": "second"}]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)

    for name in ("owner/name", "owner/name:test[:10%]"):
        dataset = open_dataset(name, small_tokenizer(), cache_dir=tmp_path)
        assert trained_text(dataset, 1) == ["second<|end|>"]
    assert calls == [("owner/name", "train"), ("owner/name", "test[:10%]")]


def test_a_hub_dataset_that_changed_is_tokenized_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rows(list[dict[str, str]]):
        _fingerprint = ""

    rows = Rows([{"text": "first"}])
    module = ModuleType("datasets")
    module.load_dataset = lambda name, split: rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)

    for text in ("one", "two"):
        rows[0], rows._fingerprint = {"text": text}, text
        dataset = open_dataset("owner/name", small_tokenizer(), cache_dir=tmp_path)
        assert whole_text(dataset) == f"{text}<|end|>"


def test_only_a_form_feed_separates_documents(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("One.\n\nStill one.\n\fTwo.\f \n\fThree.\n")

    dataset = open_dataset(file, small_tokenizer(), cache_dir=tmp_path / "cache")

    texts = [whole_text(dataset, number) for number in range(len(dataset))]
    assert texts == ["One.\n\nStill one.\n<|end|>", "Two.<|end|>", "Three.\n<|end|>"]


def test_text_that_is_not_utf8_is_rejected_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")

    with pytest.raises(SourceError, match="not UTF-8 text at byte 3"):
        open_dataset(tmp_path / "latin.txt", small_tokenizer(), cache_dir=tmp_path / "cache")


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_bytes(b"\xef\xbb\xbfOne.\fTwo.")
    (tmp_path / "bad.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9 au lait")

    dataset = open_dataset(tmp_path / "good.txt", small_tokenizer(), cache_dir=tmp_path / "cache")

    assert [whole_text(dataset, n) for n in (0, 1)] == ["One.<|end|>", "Two.<|end|>"]
    with pytest.raises(SourceError, match="not UTF-8 text at byte 6"):
        open_dataset(tmp_path / "bad.txt", small_tokenizer(), cache_dir=tmp_path / "cache")


def as_documents(items: list[Item]) -> list[str]:
    documents, document = [], ""
    for item in items:
        document = ("" if item.opens else document) + item.record["text"]
        if item.closes:
            documents.append(document)
    return documents


@settings(max_examples=100, deadline=None)
@example(text="     ", piece=4, stop=0)
@example(text="     \f          a \f      ", piece=4, stop=1)
@given(
    text=st.text(st.sampled_from("ab é日\n\f"), max_size=200),
    piece=st.integers(4, 40),
    stop=st.integers(0, 30),
)
def test_a_long_text_is_split_at_the_same_positions_when_resumed(
    text: str, piece: int, stop: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, _text_file(text) as file:
        patch.setattr(text_files, "TEXT_PIECE", piece)
        source = TextFile(file)
        items = list(source.read(SourceOffset()))

        expected = [part for part in text.split("\f") if part.strip()]
        assert as_documents(items) == expected
        assert all(len(item.record["text"].encode()) <= piece for item in items)
        if items:
            at = items[min(stop, len(items) - 1)].after
            assert [i for i in items if i.after.offset > at.offset] == list(source.read(at))


def _text_file(text: str) -> Any:
    import contextlib
    import tempfile

    @contextlib.contextmanager
    def create() -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "text.txt"
            file.write_bytes(text.encode())
            yield file

    return create()


def test_a_line_that_is_too_long_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_items, "LONGEST_RECORD", 32)
    file = write_lines(tmp_path / "data.jsonl", [{"text": "x" * 100}, GOOD])

    first, second = LineFile(file).read(SourceOffset())

    assert "long; the limit is 32 B" in first.problem
    assert (second.where, second.problem, second.record) == (f"{file}:2", "", GOOD)
    assert second.after == SourceOffset(file.stat().st_size, 2)
