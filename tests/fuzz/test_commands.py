"""Fuzzed files and command lines that once failed. `make campaign` draws new ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.edits import Edit
from tests.fuzz.kept import read_corpus

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def problems() -> dict[str, str]:
    """What is wrong with each kept input. They run in forks of a process without threads."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.kept"], cwd=REPO, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return {line["name"]: line["problem"] for line in lines}


@pytest.mark.parametrize("name", read_corpus())
def test_an_input_that_once_failed_ends_with_a_message(name: str, problems: dict[str, str]) -> None:
    assert problems[name] == ""


def test_edits_change_values_and_bytes() -> None:
    raw = b'{"a": {"b": [1, 2]}}'
    assert Edit("x.json", "set", ("a", "b", 1), "y").apply(raw) == b'{"a": {"b": [1, "y"]}}'
    assert Edit("x.json", "remove", ("a", "b")).apply(raw) == b'{"a": {}}'
    assert Edit("x.json", "rename", ("a",), text="c").apply(raw) == b'{"c": {"b": [1, 2]}}'
    assert Edit("x.txt", "splice", at=1, length=2, text="\udcff").apply(b"abcd") == b"a\xffd"
    assert Edit("x.txt", "whole", text="[", length=3).apply(b"abcd") == b"[[["
