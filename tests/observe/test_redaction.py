"""Secrets on a command line do not reach the files of a report, which only their owner can read."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.observe.launch import ProfileOptions, profile
from penstock.observe.redaction import redact
from penstock.observe.run_files import read_run

SECRET = "9fJ2kQ7rT5vX1zB8nM4c"


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (["--token", SECRET], ["--token", "***"]),
        (["--hf-token", SECRET, "--steps", "3"], ["--hf-token", "***", "--steps", "3"]),
        (["-password", SECRET], ["-password", "***"]),
        (["--apiKey", f"-{SECRET}"], ["--apiKey", "***"]),
        ([f"--wandb_key={SECRET}"], ["--wandb_key=***"]),
        (["env", f"HF_TOKEN={SECRET}", "python"], ["env", "HF_TOKEN=***", "python"]),
        ([f"--password=two words {SECRET}"], ["--password=***"]),
        ([f"trainer.secret={SECRET}"], ["trainer.secret=***"]),
        (["login", "hf_abcdefghijklmnop"], ["login", "***"]),
        (["--header=sk-proj-abcdefghijkl"], ["--header=***"]),
        ([f"Authorization: Bearer {SECRET}"], ["Authorization: Bearer ***"]),
        ([f"https://me:{SECRET}@host/x"], ["https://me:***@host/x"]),
        (
            ["bash", "-c", f"cd x && HF_TOKEN={SECRET} python a.py --key '{SECRET}' -n 1"],
            ["bash", "-c", "cd x && HF_TOKEN=*** python a.py --key ***' -n 1"],
        ),
    ],
)
def test_likely_secrets_are_redacted(given: list[str], stored: list[str]) -> None:
    assert redact(given) == tuple(stored)


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py", "--tokenizer", "gpt2", "--max-tokens", "100", "--lr=1e-5"],
        ["--eos-token", "<|im_end|>", "--num_token=5", "--monkey", "x", "a key to it"],
        ["--token", "--steps", "3"],
        ["https://host:80/a@b", "C:\\x", "sk-", "hf_x", "data/hf_models/keys.json"],
    ],
)
def test_other_words_stay(command: list[str]) -> None:
    assert redact(command) == tuple(command)


def test_the_files_of_a_report_hold_no_secret_and_are_private(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-c", "import torch; torch.ones(1)", "--token", SECRET]
    assert profile(command, run, ProfileOptions(interval=0.05)) == 0
    assert main.run(["report", str(run)]) == 0

    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"observe.json", "report.html", "samples.jsonl"} <= {path.name for path in files}
    for path in files:
        assert SECRET not in path.read_text(), path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert read_run(run).observation.command[-2:] == ("--token", "***")
