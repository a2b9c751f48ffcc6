"""Tiny runs of `penstock train`, in this process and in child processes."""

from __future__ import annotations

import io
import json
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from penstock.cli import main
from tests.support import fork_server
from tests.support.engines import plain_model, tiny_config
from tests.support.small_tokenizers import MARKED, WORDS, small_tokenizer

SETTINGS = ("--context", "32", "--batch", "4", "--micro-batch", "2", "--lr", "1e-2",
            "--eval-split", "0.2", "--json")  # fmt: skip

RESIDENT = ("--hbm", "64MiB", "--dram", "64MiB")
TIGHT = ("--hbm", "900KiB", "--dram", "500KiB")
"""Budgets so small that some optimizer states must be stored on a disk."""


def make_model(directory: Path, *, weights: bool = True, **changes: Any) -> Path:
    """Save a Llama of some ten thousand parameters with a tokenizer."""
    tokenizer = small_tokenizer(MARKED)
    values = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, **changes}
    config = tiny_config("llama", **values)
    if weights:
        plain_model(config).save_pretrained(directory)
    else:
        config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_texts(path: Path, count: int = 60) -> Path:
    """Write distinct texts as JSON Lines."""
    words = WORDS.split()
    lines = []
    for number in range(count):
        start = number * 7 % len(words)
        text = " ".join([str(number), *(words + words)[start : start + 12]])
        lines.append(json.dumps({"text": text}))
    path.write_text("\n".join(lines) + "\n")
    return path


class RunResult:
    """Exit code, standard output and standard error of a command."""

    def __init__(self, code: int, output: str, errors: str) -> None:
        self.code, self.output, self.errors = code, output, errors

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.splitlines()]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def losses(self) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.of("step")}


class Runs:
    """Runs the command with one model and one file of data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_model(folder / "model")
        self.data = make_texts(folder / "texts.jsonl")
        self.disk = folder / "disk"
        self.disk.mkdir()

    def flags(self, out: Path, *more: str) -> list[str]:
        inputs = [str(self.model), "--data", str(self.data), "--out", str(out)]
        return ["train", *inputs, *SETTINGS, "--cache", str(self.folder / "cache"), *more]

    def tight(self) -> list[str]:
        return [*TIGHT, "--nvme", f"{self.disk}:64MiB"]

    def run(self, out: Path, *more: str) -> RunResult:
        """Train in this process."""
        return run_command(self.flags(out, *more))

    def start(self, out: Path, *more: str) -> fork_server.Child | subprocess.Popen[str]:
        """Start training in a child process."""
        return fork_server.start(["-m", "penstock", *self.flags(out, *more)])


def run_command(arguments: list[str]) -> RunResult:
    """Run a command line in this process and capture its output."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = main.run(arguments)
    return RunResult(code, output.getvalue(), errors.getvalue())


def wait_for_exit(child: subprocess.Popen[str] | fork_server.Child) -> RunResult:
    output, errors = child.communicate()
    assert child.returncode is not None
    return RunResult(child.returncode, output, errors)


def wait_for_line(child: subprocess.Popen[str] | fork_server.Child, *parts: str) -> str:
    """Read events until a line contains all parts, and return everything that was read."""
    assert child.stdout is not None
    read = ""
    for line in child.stdout:
        read += line
        if all(part in line for part in parts):
            return read
    raise AssertionError(f"no line with {parts} in:\n{read}")


def contents(out: Path) -> dict[str, bytes]:
    """Return the parts of a run's last checkpoint that must be equal to the bit in equal runs."""
    last = max(out.glob("checkpoint-*"))
    tensors = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    state = json.loads((last / "training_state.json").read_text())
    return {**tensors, "engine": json.dumps(state["engine"]).encode()}
