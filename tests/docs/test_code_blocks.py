"""Code in the documentation: Python runs, and commands have the flags that they use.

A Python block runs with the tiny model below in place of the named one, unless the line before it
is `<!-- test: skip, because REASON -->`. Blocks of a page share their variables.
"""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

from penstock.cli.main import app
from penstock.settings import merge_layers, read_yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
BLOCK = re.compile(r"(<!-- test: skip, because [^\n]+ -->\n)?^```(\w*)\n(.*?)^```", re.M | re.S)

SMALLER = {
    r'"(Qwen/Qwen[\w.-]+|path/to/model|demo/model)"': 'str(folder / "model")',
    r'"(chats|demo/chats|held-out)\.jsonl"': 'str(folder / "chats.jsonl")',
    r'"(out|checkpoint|adapter|run)/?"': r'str(folder / "\1")',
    r'"/mnt/nvme:\d+GiB"': 'f"{folder}:64MiB"',
    r'"/mnt/nvme"': "str(folder)",
    r'"\d+GiB"': '"64MiB"',
    r"\b4096\b": "64",
    r"\b8192\b": "128",
    r"\b32768\b": "512",
    r"max_new(_tokens)?=\d+": r"max_new\1=8",
    r"\bbatch=\d+": "batch=2",
    r"\.batches\(\s*(8|32)": ".batches(2",
    r"(batch=\d+), lr=1e-5": r'\1, lr=1e-5, dtype="fp32"',
    r"(?m)^(\s+)lr=1e-5,\n(?=\s+budget)": r'\1lr=1e-5,\n\1dtype="fp32",\n',
}
"""What makes a block small enough for a test."""


def blocks(page: Path) -> Iterator[tuple[bool, str, str]]:
    """Yield whether a block is skipped, its language, and its text."""
    for skip, language, text in BLOCK.findall(page.read_text()):
        yield bool(skip), language, text


def test_blocks_of_python_can_be_parsed() -> None:
    for page in PAGES:
        for _, language, text in blocks(page):
            if language == "python":
                ast.parse(text, filename=page.name)


def smaller(text: str) -> str:
    for pattern, replacement in SMALLER.items():
        text = re.sub(pattern, replacement, text)
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with chats, a tokenizer and a model of two layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from make_demo_data import make
    finally:
        sys.path.remove(str(ROOT / "examples"))
    found: Path = make(tmp_path_factory.mktemp("docs"), chats=40, hidden=32, layers=2)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(found / "model", dtype="float32")
    AutoModelForCausalLM.from_config(config).save_pretrained(found / "model")
    return found


@pytest.fixture
def variables(folder: Path) -> dict[str, Any]:
    """Return what the pages leave to the reader."""
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import penstock

    rows = torch.arange(128).reshape(2, 64)
    batch = {"input_ids": rows, "labels": rows, "position_ids": torch.arange(64).expand(2, 64)}
    batch["attention_mask"] = torch.ones_like(rows)
    plain = {name: value for name, value in batch.items() if name != "attention_mask"}
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    return {
        "folder": folder, "ps": penstock, "penstock": penstock, "torch": torch, "model": model,
        "AutoModelForCausalLM": AutoModelForCausalLM, "batches": [plain], "batch": batch,
        "tokenizer": AutoTokenizer.from_pretrained(folder / "model"),
        "inputs": {"input_ids": rows[:, :8], "attention_mask": batch["attention_mask"][:, :8]},
        "texts": ["Capital of Sweden?"], "pairs_of_batches": [(plain, plain)],
        "eval_batches": [plain], "train": lambda: None,
        "my_loss": lambda logits, _: cross_entropy(logits.flatten(0, 1), rows.flatten()),
    }  # fmt: skip


RUN = [
    "README.md", "quickstart.md", "train.md", "own-loss.md", "observe.md", "cxl.md", "memory.md",
    "generate.md", "kv.md", "lora.md", "data.md",
]  # fmt: skip


def test_every_page_with_python_runs_it_or_says_why_not() -> None:
    listed = [p.name for p in PAGES if any(k == "python" and not s for s, k, _ in blocks(p))]

    assert sorted(listed) == sorted(RUN)


LONG = {"train.md", "lora.md", "generate.md"}
"""Pages whose code takes longest; `make test-long` runs it."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in RUN]
)
def test_python_of_a_page_runs(
    name: str, variables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / "README.md" if name == "README.md" else ROOT / "docs" / name
    monkeypatch.chdir(tmp_path)
    for directory in ("out", "checkpoint", "adapter", "run"):  # of another page
        shutil.rmtree(variables["folder"] / directory, ignore_errors=True)
    if name == "train.md":  # it evaluates a model that was trained before
        shutil.copytree(variables["folder"] / "model", variables["folder"] / "out")
    if name == "own-loss.md":
        variables["batches"] = [variables["batch"]]
    if name == "lora.md":
        peft = pytest.importorskip("peft")
        variables |= {"get_peft_model": peft.get_peft_model, "LoraConfig": peft.LoraConfig}
    with closing_streamed_models(monkeypatch):
        for skipped, language, text in blocks(page):
            if language == "python" and not skipped:
                exec(compile(smaller(text), page.name, "exec"), variables)


@contextlib.contextmanager
def closing_streamed_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the models that a page streams and leaves open, as the end of its process would.

    Their engines would count as memory of this process in tests that follow.
    """
    import penstock

    streamed: list[Any] = []
    original = penstock.stream

    def stream(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        model, optimizer = original(*args, **kwargs)
        streamed.append(model)
        return model, optimizer

    with monkeypatch.context() as patch:
        patch.setattr(penstock, "stream", stream)
        try:
            yield
        finally:
            for model in streamed:
                if hasattr(model, "close"):  # not closed by the page itself
                    model.close()


@pytest.mark.parametrize(("name", "at"), [("train.md", 0), ("from-axolotl.md", 1)])
def test_yaml_of_a_page_is_a_configuration(name: str, at: int, tmp_path: Path) -> None:
    text = [t for _, language, t in blocks(ROOT / "docs" / name) if language == "yaml"][at]
    (tmp_path / "run.yaml").write_text(text)
    settings = merge_layers([("run.yaml", read_yaml(tmp_path / "run.yaml"))])

    assert (settings.data.context, settings.schedule.batch) == (4096, 32)
    assert settings.schedule.lr == 1e-5


# Commands.


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield every penstock command in a block of the documentation."""
    for page in PAGES:
        for _, language, text in blocks(page):
            if language in ("", "bash"):
                for line in text.replace("\\\n", " ").splitlines():
                    line = line.removeprefix("$ ").strip()
                    if re.match(r"penstock \w", line):
                        words = shlex.split(line, comments=True)[1:]
                        yield page.name, words[: words.index("--")] if "--" in words else words


def test_commands_in_the_documentation_have_the_flags_they_use() -> None:
    root: Any = typer.main.get_command(app)
    found = 0
    for page, words in commands():
        command, rest = root, words
        while hasattr(command, "commands"):
            assert rest[0] in command.commands, f"{page}: penstock {' '.join(words)}"
            command, rest = command.commands[rest[0]], rest[1:]
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        used = {w.partition("=")[0] for w in rest if re.match(r"--?[a-z]", w)}
        assert used <= known | {"--help"}, f"{page}: penstock {' '.join(words)}: {used - known}"
        found += 1
    assert found > 50
