"""`penstock data show`, the tokenizer it loads, and the data of the demo."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.data import load_tokenizer, open_dataset
from penstock.data.dataset import TokenDataset
from penstock.data.errors import TokenizerError
from tests.data.helpers import chat, write_lines
from tests.support.small_tokenizers import small_tokenizer

DEMO = Path(__file__).parents[2] / "examples" / "make_demo_data.py"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    small_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    long = chat("What is two?", "It is " + "very " * 60 + "much.")
    return write_lines(tmp_path / "chats.jsonl", [chat("What is two?", "It is [two]."), long])


def test_trained_text_is_marked_without_colors(
    file: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["data", "show", str(file), "--model", str(model), "--context", "64"]) == 0

    printed = capsys.readouterr().out
    assert "[+trained+]" in printed
    assert "What is two?<|im_end|>" in printed
    assert "[+It is [two].<|im_end|>+]" in printed
    assert "2 documents" in printed
    assert "1 truncated, 0 dropped, 0 split" in printed


def test_trained_text_is_marked_by_color(
    file: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main.run(["data", "show", str(file), "--model", str(model), "--count", "1"]) == 0

    printed = capsys.readouterr().out
    assert "\x1b[1;32mIt is [two].<|im_end|>\x1b[0m" in printed
    assert "[+" not in printed


def test_json_contains_the_examples_and_the_counts(
    file: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(model), "--context", "64", "--overlong", "drop", "--count", "1"]
    assert main.run(["data", "show", str(file), *arguments, "--json"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["documents"] == 2
    assert shown["packing"]["dropped"] == 1
    assert shown["packing"]["documents"] == 2
    parts = shown["examples"][0]["parts"]
    assert [part["text"] for part in parts if part["trained"]] == ["It is [two].<|im_end|>"]
    assert sum(part["tokens"] for part in parts) == shown["examples"][0]["tokens"]


@pytest.mark.parametrize("option", [[], ["--skip-bad-lines"]])
def test_an_invalid_line_exits_with_1_unless_it_is_skipped(
    option: list[str], file: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with file.open("a") as lines:
        lines.write("{broken\n")

    code = main.run(["data", "show", str(file), "--model", str(model), *option])

    printed = capsys.readouterr()
    if option:
        assert code == 0
        assert "1 bad line skipped" in printed.out
    else:
        assert code == 1
        assert f"{file}:3: is not JSON" in printed.err
        assert printed.err.startswith("error: 1 line is not usable")


def test_a_model_without_a_tokenizer_exits_with_1(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "llama"}')

    assert main.run(["data", "show", str(file), "--model", str(tmp_path / "bare")]) == 1
    assert "bare has no tokenizer (none of tokenizer.json" in capsys.readouterr().err


def test_a_broken_tokenizer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    with pytest.raises(TokenizerError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="neither a directory nor a Hugging Face id"):
        load_tokenizer(tmp_path / "gone")


def test_the_demo_data_is_reproducible_and_can_be_tokenized(tmp_path: Path) -> None:
    make = runpy.run_path(str(DEMO))["make"]
    here, there = make(tmp_path / "a", chats=300), make(tmp_path / "b", chats=300)
    for name in ("chats.jsonl", "model/config.json", "model/tokenizer.json"):
        assert (here / name).read_bytes() == (there / name).read_bytes()

    tokenizer = load_tokenizer(here / "model")
    dataset = open_dataset(here / "chats.jsonl", tokenizer, cache_dir=tmp_path / "cache")

    config = json.loads((here / "model" / "config.json").read_text())
    assert len(dataset) == 300
    assert dataset.notes == ()
    assert len(tokenizer) <= config["vocab_size"]
    first = json.loads((here / "chats.jsonl").read_text().splitlines()[0])["messages"]
    document = dataset[0]
    trained = dataset.decode(document.ids[document.trained])
    answers = [turn["content"] for turn in first if turn["role"] == "assistant"]
    assert trained == "".join(f"{words}<|end|>" for words in answers)


def test_terminal_escapes_in_the_data_are_spelled_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(TokenDataset, "decode", lambda *_: "a\x1b]0;owned\x07\x9b31m\u202eb\tc\nd")
    small_tokenizer().save_pretrained(tmp_path / "model")
    file = write_lines(tmp_path / "chats.jsonl", [chat("What is two?", "It is two.")])

    assert main.run(["data", "show", str(file), "--model", str(tmp_path / "model")]) == 0

    printed = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(printed)
    assert r"a\x1b]0;owned\x07\x9b31m\u202eb" in printed


def test_a_model_of_the_hub_is_loaded_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    tokenizer = small_tokenizer()
    monkeypatch.setattr("penstock.data.tokenizer.hub_is_reachable", lambda: True)
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained",
        lambda name, **options: asked.append((name, options)) or tokenizer,
    )
    assert load_tokenizer("owner/model") is tokenizer
    assert load_tokenizer("owner/model", revision="v2", trust_remote_code=True) is tokenizer
    assert asked == [
        (
            "owner/model",
            {"revision": "main", "trust_remote_code": False, "local_files_only": False},
        ),
        ("owner/model", {"revision": "v2", "trust_remote_code": True, "local_files_only": False}),
    ]
    for name in ("a/b/c", __file__):
        with pytest.raises(TokenizerError, match="neither a directory nor"):
            load_tokenizer(name)


def test_without_the_hub_a_tokenizer_is_looked_for_on_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("penstock.data.tokenizer.hub_is_reachable", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenizerError, match="there is no directory demo/modle here, and the Hub"):
        load_tokenizer("demo/modle")
