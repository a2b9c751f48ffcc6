"""Tables: datasets on the Hub, datasets that were saved to disk, and Arrow files.

Stand-ins for `datasets` and `pyarrow` test Penstock's side. Where the libraries are installed, they
are tested, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock.data import hub, open_dataset
from penstock.data.errors import SourceError
from penstock.data.hub import HubId
from penstock.data.items import SourceOffset
from penstock.data.sources import find_sources
from tests.data.helpers import whole_text
from tests.support.small_tokenizers import small_tokenizer


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("openai/gsm8k", ("openai/gsm8k", "", "train")),
        ("openai/gsm8k:test", ("openai/gsm8k", "", "test")),
        ("openai/gsm8k:main:test", ("openai/gsm8k", "main", "test")),
        ("openai/gsm8k:main:", ("openai/gsm8k", "main", "train")),
        ("a/b:train[:10%]", ("a/b", "", "train[:10%]")),
        ("a/b:en-us:train[:10%]+test[10:]", ("a/b", "en-us", "train[:10%]+test[10:]")),
        ("no-owner", None),
        ("a/b/c", None),
    ],
)
def test_an_id_has_a_configuration_and_a_split(name: str, parts: tuple[str, ...] | None) -> None:
    found = HubId.parse(name)

    assert (None if found is None else (found.owner, found.config, found.split)) == parts


class Stream:
    """The used part of datasets.IterableDataset."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.rows = rows
        self.info = SimpleNamespace(splits={"train": SimpleNamespace(num_examples=len(rows))})

    def skip(self, count: int) -> Stream:
        return Stream(self.rows[count:])

    def take(self, count: int) -> Stream:
        return Stream(self.rows[:count])

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(self.rows)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace `datasets` by a stand-in, and record its calls."""
    found: list[tuple[Any, ...]] = []

    def load_dataset(*names: str, split: str, streaming: bool = False) -> Any:
        found.append((*names, split, streaming))
        rows = [{"text": f"row {n}"} for n in range(6)]
        return Stream(rows) if streaming else rows

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(hub, "_revision", lambda owner: "abc")
    return found


@pytest.mark.parametrize(
    ("name", "call", "rows"),
    [
        ("a/b", ("a/b", "train", True), range(6)),
        ("a/b:main:test", ("a/b", "main", "test", True), range(6)),
        ("a/b:test[:2]", ("a/b", "test", True), range(2)),
        ("a/b:test[1:4]", ("a/b", "test", True), range(1, 4)),
        ("a/b:test[4:]", ("a/b", "test", True), range(4, 6)),
    ],
)
def test_a_stream_is_read_from_any_row(
    name: str, call: tuple[Any, ...], rows: range, calls: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    ((source,),) = find_sources(name, streaming=True)
    items = list(source.read(SourceOffset()))

    assert calls == [call]
    assert [item.record["text"] for item in items] == [f"row {n}" for n in rows]
    for number, item in enumerate(items):
        assert list(source.read(item.after)) == items[number + 1 :]
    dataset = open_dataset(name, small_tokenizer(), streaming=True, cache_dir=tmp_path)
    assert len(dataset) == len(rows)


def test_a_configuration_is_passed_without_a_stream(calls: list[tuple[Any, ...]]) -> None:
    find_sources("a/b:main:test[:10%]")

    assert calls == [("a/b", "main", "test[:10%]", False)]


def test_a_name_without_an_owner_says_what_a_dataset_is_named() -> None:
    with pytest.raises(SourceError, match="gsm8k: no such file or directory; a dataset on the Hub"):
        find_sources("gsm8k")


def test_a_stream_of_percents_is_refused(calls: list[tuple[Any, ...]]) -> None:
    with pytest.raises(SourceError, match=r"cannot stream 'train\[:10%\]'.*train\[:1000\]"):
        find_sources("a/b:train[:10%]", streaming=True)


# Saved datasets.


class Batch:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.num_rows = rows, len(rows)

    def slice(self, at: int, length: int) -> Batch:
        return Batch(self.rows[at : at + length])

    def to_pylist(self) -> list[dict[str, Any]]:
        return self.rows


@pytest.fixture
def arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `pyarrow` by a stand-in, whose Arrow files are lines of JSON."""
    ipc, module = ModuleType("pyarrow.ipc"), ModuleType("pyarrow")
    module.ArrowInvalid = type("ArrowInvalid", (ValueError,), {})  # type: ignore[attr-defined]
    module.memory_map = Path  # type: ignore[attr-defined]
    ipc.open_stream = lambda path: [  # type: ignore[attr-defined]
        Batch(json.loads(line)) for line in path.read_text().splitlines()
    ]
    monkeypatch.setitem(sys.modules, "pyarrow", module)
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", ipc)


def save(folder: Path, *files: list[list[dict[str, Any]]]) -> Path:
    """Write a directory like `save_to_disk`, with batches of rows in each file."""
    folder.mkdir(parents=True)
    names = [f"data-{number}.arrow" for number in range(len(files))]
    for name, batches in zip(names, files, strict=True):
        (folder / name).write_text("\n".join(json.dumps(batch) for batch in batches))
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_is_read_from_any_row(arrow: None, tmp_path: Path) -> None:
    rows = [{"text": f"row {n}", "extra": None} for n in range(5)]
    folder = save(tmp_path / "saved", [rows[:2], rows[2:3]], [rows[3:]])

    ((source,),) = find_sources(folder)
    items = list(source.read(SourceOffset()))

    assert [item.record for item in items] == [{"text": f"row {n}"} for n in range(5)]
    assert source.size == 5
    for number, item in enumerate(items):
        assert list(source.read(item.after)) == items[number + 1 :]


def test_a_saved_dict_has_splits(arrow: None, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    for split in ("train", "test"):
        save(folder / split, [[{"text": split}]])
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')

    found = [find_sources(name)[0][0] for name in (str(folder), f"{folder}:test")]

    texts = [next(iter(source.read(SourceOffset()))).record["text"] for source in found]
    assert texts == ["train", "test"]
    with pytest.raises(SourceError, match=r"no split 'gone'.*with one of train, test"):
        find_sources(f"{folder}:gone")


def test_a_saved_dataset_without_pyarrow_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    folder = save(tmp_path / "saved", [[{"text": "row"}]])

    with pytest.raises(SourceError, match="install pyarrow: pip install pyarrow"):
        find_sources(folder)


# The libraries themselves.

ROWS = [{"messages": [{"role": "user", "content": f"{n}?"},
                      {"role": "assistant", "content": f"{n}!"}]} for n in range(700)]  # fmt: skip


def check_rows(source: Path | str, tmp_path: Path) -> None:
    dataset = open_dataset(source, small_tokenizer(), cache_dir=tmp_path / "cache")
    assert len(dataset) == len(ROWS)
    assert "699!" in whole_text(dataset, 699)


def test_what_datasets_saves_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "dict")

    check_rows(tmp_path / "one", tmp_path)
    check_rows(f"{tmp_path / 'dict'}:test", tmp_path)
    chosen = rows.select(range(699, -1, -1))  # with indices, which save_to_disk flattens
    chosen.save_to_disk(tmp_path / "reversed")
    ((source,),) = find_sources(tmp_path / "reversed")
    assert next(iter(source.read(SourceOffset()))).record == ROWS[699]


def test_what_pyarrow_writes_is_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    table = arrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "d.parquet")
    for name, writer in (
        ("file.arrow", arrow.ipc.new_file),
        ("stream.arrow", arrow.ipc.new_stream),
    ):
        with writer(str(tmp_path / name), table.schema) as out:
            out.write_table(table, max_chunksize=100)

    for name in ("d.parquet", "file.arrow", "stream.arrow"):
        check_rows(tmp_path / name, tmp_path)
    (tmp_path / "bad.arrow").write_bytes(b"no arrow")
    with pytest.raises(SourceError, match="cannot be read as Arrow"):
        find_sources(tmp_path / "bad.arrow")
