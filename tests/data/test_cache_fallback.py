"""A home directory that cannot be written does not prevent tokenizing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.data.dataset import open_dataset
from penstock.data.errors import CacheError
from tests.support.small_tokenizers import MARKED, small_tokenizer
from tests.train.runs import make_texts


def test_without_a_home_the_tokens_are_kept_for_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("a file: nothing can be created below it")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    data, notes = make_texts(tmp_path / "texts.jsonl", 5), []

    def report(done: int, total: int, text: str) -> None:
        if not total:
            notes.append(text)

    tokenizer = small_tokenizer(MARKED)
    dataset = open_dataset(data, tokenizer, on_progress=report)
    assert len(dataset) == 5
    assert len(notes) == 1
    assert f"{tmp_path / 'home/penstock/tokens'} cannot be written (Not a directory)" in notes[0]
    assert "--cache DIR" in notes[0]
    assert os.listdir(tmp_path / "tmp") == []

    cached = open_dataset(data, tokenizer, cache_dir=tmp_path / "cache")
    assert [d.ids.tolist() for d in map(dataset.__getitem__, range(5))] == [
        d.ids.tolist() for d in map(cached.__getitem__, range(5))
    ]


def test_a_cache_that_the_user_chose_must_be_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    data = make_texts(tmp_path / "texts.jsonl", 5)
    with pytest.raises(CacheError, match="file/cache: the token cache cannot be written"):
        open_dataset(data, small_tokenizer(MARKED), cache_dir=tmp_path / "file" / "cache")
