"""Record files are strict JSON and written atomically; pipes and devices are not replaced."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import records
from penstock.errors import MachineError, RecordError
from penstock.records import from_json, layout, parse
from tests.support.character_devices import make_device


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    value: float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "^c: is given twice$"),
        ('{"a": NaN}', "^NaN is not a valid JSON number"),
        ('{"a": -Infinity}', "^-Infinity is not a valid JSON number"),
        ('{"a": 1e400}', "^1e400 is not a valid JSON number"),
        ('{"a": 1,}', "^line 1, column 9: is not JSON"),
        ("[" * 200_000, "^is nested too deeply"),
        (b'{"a": "\xff"}', "^is not JSON: .*utf-8"),
        ("1" * 5000, "^is not JSON: "),
    ],
)
def test_text_that_is_not_strict_json_is_rejected(text: str | bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        parse(text)


def test_layout_keeps_short_values_on_one_line() -> None:
    document = {"cpus": list(range(100)), "rates": [{"threads": 1}, {"threads": 2, "x": "y" * 90}]}
    text = layout(document)
    assert json.loads(text) == document
    assert f'  "cpus": {json.dumps(document["cpus"])},' in text.splitlines()
    assert '    {"threads": 1},' in text.splitlines()


def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "leaf.json"
    records.save(Leaf(value=1.0), path)

    def power_cut(_: int) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", power_cut)
    with pytest.raises(RecordError, match=re.escape(f"{path}: cannot be written: power cut")):
        records.save(Leaf(value=2.0), path)
    assert records.load(Leaf, path) == Leaf(value=1.0)
    assert list(tmp_path.iterdir()) == [path]


def test_saving_through_a_link_replaces_its_target(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("real.json")
    records.save(Leaf(value=1.0), tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert records.load(Leaf, tmp_path / "real.json") == Leaf(value=1.0)


def test_load_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "leaf.json"
    path.write_text("{")
    with pytest.raises(RecordError, match=re.escape(f"{path}: line 1, column 2: is not JSON")):
        records.load(Leaf, path)


def test_saving_to_a_pipe_writes_into_it(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    records.save(Leaf(value=1.0), path)
    assert from_json(Leaf, parse(os.read(reader, 1000))) == Leaf(value=1.0)
    os.close(reader)
    assert path.is_fifo()


def test_saving_to_a_device_does_not_replace_it(tmp_path: Path) -> None:
    null, full = make_device(tmp_path, "null"), make_device(tmp_path, "full")
    records.save(Leaf(value=1.0), null)
    assert null.is_char_device()
    with pytest.raises(RecordError, match=r"full: cannot be written: No space left on device$"):
        records.save(Leaf(value=1.0), full)
    assert full.is_char_device()
    assert sorted(tmp_path.iterdir()) == [full, null]


def test_saving_to_standard_output_appends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    code = (
        "from penstock import records; from penstock.units import GiB;"
        "from penstock.machine.machine import Machine, MemoryNode;"
        "records.save(MemoryNode(id=0, kind='dram', capacity=GiB), '/dev/stdout');"
        "print('after')"
    )
    with log.open("a") as stdout:
        subprocess.run([sys.executable, "-c", code], stdout=stdout, check=True)
    before, record, after = log.read_text().splitlines()
    assert (before, after) == ("before", "after")
    assert json.loads(record)["kind"] == "dram"
    assert list(tmp_path.iterdir()) == [log]


def test_saving_to_a_disk_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_text("precious")
    monkeypatch.setattr(stat, "S_ISBLK", lambda mode: True)
    with pytest.raises(RecordError, match="cannot be written: it is a disk"):
        records.save(Leaf(value=1.0), path)
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gone/leaf.json", "No such file or directory"), ("", "Is a directory")],
)
def test_an_unreadable_or_unwritable_path_is_named_with_the_reason(
    tmp_path: Path, name: str, reason: str
) -> None:
    path = tmp_path / name
    with pytest.raises(RecordError, match=re.escape(f"{path}: cannot be written: {reason}")):
        records.save(Leaf(value=1.0), path)
    with pytest.raises(
        MachineError, match=re.escape(f"{path}: cannot be read: {reason}")
    ) as caught:
        records.load(Leaf, path, error=MachineError)
    assert isinstance(caught.value.__cause__, OSError)
    assert list(tmp_path.iterdir()) == []
