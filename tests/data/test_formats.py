"""File formats: JSON arrays, CSV and compressed files, from any position, and their errors."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import json_files, open_dataset
from penstock.data.csv_files import CsvFile
from penstock.data.errors import BadLinesError, SourceError
from penstock.data.items import Item, Source, SourceOffset
from penstock.data.json_files import ArrayFile, LineFile, open_json
from penstock.data.sources import find_sources
from tests.data.helpers import trained_text, whole_text, write_lines
from tests.support.small_tokenizers import small_tokenizer

CELLS = st.text(st.sampled_from('ab é日"\n,;\\[]{}'), max_size=12)


def items_of(source: Source) -> list[Item]:
    """Read a source, and check that it can be read from every position."""
    items = list(source.read(SourceOffset()))
    for number, item in enumerate(items):
        assert list(source.read(item.after)) == items[number + 1 :]
    return items


def texts(path: Path, tmp_path: Path, **options: Any) -> list[str]:
    dataset = open_dataset(path, small_tokenizer(), cache_dir=tmp_path / "cache", **options)
    return [whole_text(dataset, number) for number in range(len(dataset))]


# JSON arrays.


@settings(max_examples=60, deadline=None)
@given(values=st.lists(CELLS, max_size=6), indent=st.sampled_from([None, 1]), ascii_=st.booleans(),
       piece=st.integers(1, 9), mark=st.sampled_from([b"", b"\xef\xbb\xbf"]))  # fmt: skip
def test_an_array_is_read_from_any_position(
    values: list[str], indent: int | None, ascii_: bool, piece: int, mark: bytes,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("array") / "data.json"
    records = [{"text": value} for value in values]
    text = json.dumps(records, indent=indent, ensure_ascii=ascii_)
    path.write_bytes(mark + b"\n " + text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_files, "READ_BYTES", piece)
        source = open_json(path)
        assert isinstance(source, ArrayFile)

        items = items_of(source)

    assert [item.record for item in items] == records
    assert [item.where for item in items] == [f"{path}, element {n + 1}" for n in range(len(items))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"text": "a"} {"text": "b"}]', "element 2 .* is preceded by '{' instead of ','"),
        ('[{"text": "a"}, {"text": ]', "element 2 of its JSON array is not JSON: Expecting value"),
        ('[{"text": "a"}', "element 2 .* 'the end of the file' instead of ','"),
        ('[{"text": "a"}] [', "has more text after the end of its JSON array"),
    ],
)
def test_a_broken_array_is_an_error_with_the_element(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(text)

    with pytest.raises(SourceError, match=words):
        texts(tmp_path / "data.json", tmp_path)


def test_an_element_that_is_not_an_object_is_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('[{"text": "a b"}, 17, {"text": "\\ud83d"}]')

    with pytest.raises(BadLinesError, match="element 2: contains a number") as caught:
        texts(tmp_path / "data.json", tmp_path)
    assert caught.value.count == 2
    assert texts(tmp_path / "data.json", tmp_path, skip_bad_lines=True) == ["a b<|end|>"]


def test_a_file_of_lines_stays_one(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.json", [{"text": "[a]"}])

    assert isinstance(open_json(path), LineFile)


# CSV.


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(CELLS, CELLS), max_size=5), delimiter=st.sampled_from([",", ";"]))
def test_csv_is_read_from_any_position(
    rows: list[tuple[str, str]], delimiter: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("csv") / "data.csv"
    quoted = [['"' + cell.replace('"', '""') + '"' for cell in row] for row in rows]
    lines = [delimiter.join(row) for row in [["prompt", "completion"], *quoted]]
    path.write_text("\ufeff" + "\r\n\r\n".join(lines), encoding="utf-8", newline="")

    items = items_of(CsvFile(path))

    assert [tuple(item.record.values()) for item in items] == rows
    assert all(list(item.record) == ["prompt", "completion"] for item in items)


def test_the_columns_of_csv_and_tsv_are_keys(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,completion,id\n"Two, or\nthree?"," Five.",1\n')
    (tmp_path / "b.tsv").write_text("text\tid\nWater, runs\t2\n")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    cell = json.dumps(messages).replace('"', '""')
    (tmp_path / "c.csv").write_text(f'messages\n"{cell}"\n')
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache"}

    dataset = open_dataset([tmp_path / n for n in ("a.csv", "b.tsv", "c.csv")], small_tokenizer(),
                           **options)  # fmt: skip

    assert whole_text(dataset, 0) == "Two, or\nthree? Five.<|end|>"
    assert trained_text(dataset, 0) == [" Five.<|end|>"]
    assert whole_text(dataset, 1) == "Water, runs<|end|>"
    assert trained_text(dataset, 2) == ["Hello!<|im_end|>"]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("text\n\na\nb,c\n", BadLinesError, "row 2: has 2 values for 1 columns"),
        ('text\n"a b\nc\n', SourceError, "is not CSV near row 1 .*check its quotes"),
        ("text,text\na,b\n", SourceError, "has more than one column 'text'"),
        ("title,body\na,b\n", BadLinesError, "row 1: has title, body; expected messages"),
    ],
)
def test_wrong_csv_is_named_with_its_row(
    text: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    (tmp_path / "data.csv").write_text(text)

    with pytest.raises(error, match=words):
        texts(tmp_path / "data.csv", tmp_path)


def test_a_field_may_be_longer_than_the_csv_module_allows_by_default(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("text\n" + "a" * 200_000 + "\n")

    (item,) = items_of(CsvFile(tmp_path / "data.csv"))

    assert len(item.record["text"]) == 200_000


# Compressed files.


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.jsonl", b'{"text": "one"}\n\n{"text": "two"}\n'),
        ("data.json", b'[{"text": "one"}, {"text": "two"}]'),
        ("data.csv", b"text\none\ntwo\n"),
        ("data.txt", b"one\ftwo"),
    ],
)
def test_a_compressed_file_is_read_like_its_content(
    suffix: str, compress: Callable[[bytes], bytes], name: str, content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / (name + suffix)
    path.write_bytes(compress(content))

    ((source,),) = find_sources(path)
    items = items_of(source)

    assert [item.record["text"] for item in items] == ["one", "two"]
    assert texts(path, tmp_path) == ["one<|end|>", "two<|end|>"]


def test_a_compressed_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.txt.gz"
    path.write_bytes(gzip.compress(b"water " * 10_000)[:-20])

    with pytest.raises(SourceError, match=r"data.txt.gz: cannot be decompressed"):
        texts(path, tmp_path)


def test_zstandard_is_named_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "data.jsonl.zst").write_bytes(b"")

    with pytest.raises(SourceError, match="install zstandard: pip install zstandard"):
        texts(tmp_path / "data.jsonl.zst", tmp_path)


def test_zst_files_are_read(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    path = tmp_path / "data.jsonl.zst"
    frames = [b'{"text": "one"}\n{"te', b'xt": "two"}\n']
    path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(frame) for frame in frames))

    ((source,),) = find_sources(path)

    assert [item.record["text"] for item in items_of(source)] == ["one", "two"]
    for broken in (path.read_bytes()[:-3], b"no frame" * 9):
        path.write_bytes(broken)
        with pytest.raises(SourceError, match="cannot be decompressed"):
            texts(path, tmp_path)


# Directories.


def test_a_directory_says_what_it_does_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "more").mkdir(parents=True)
    write_lines(folder / "a.jsonl", [{"text": "first"}])
    (folder / "b.csv").write_text("text\nsecond\n")
    (folder / "c.txt.gz").write_bytes(gzip.compress(b"third"))
    (folder / "d.xlsx").write_bytes(b"")
    (folder / ".hidden").write_bytes(b"")
    notes: list[str] = []

    found = texts(folder, tmp_path, on_progress=lambda done, total, what: notes.append(what))

    assert found == ["first<|end|>", "second<|end|>", "third<|end|>"]
    assert any("not read: d.xlsx, more/. Penstock reads JSON" in note for note in notes)
    assert any("read as plain text: c.txt.gz" in note for note in notes)


@pytest.mark.parametrize("named", ["", ["texts.jsonl", ""]])
def test_a_source_without_a_name_is_not_the_current_directory(named: str | list[str]) -> None:
    with pytest.raises(SourceError, match=r'^data: got "" as a name; pass a file'):
        find_sources(named)


def test_a_directory_without_data_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "data.xlsx").write_bytes(b"")

    with pytest.raises(SourceError, match=r"contains no data files; it has data.xlsx. Penstock"):
        find_sources(tmp_path)
