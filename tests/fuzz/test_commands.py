"""Fuzzed files and command lines that once failed. `make campaign` draws new ones."""

from __future__ import annotations

import json

import pytest

from tests.fuzz.edits import Edit
from tests.fuzz.kept import read_corpus
from tests.support import fork_server
from tests.support.samples import sample

CORPUS = read_corpus()

EVERY = 3
"""One of so many inputs runs in `make test`, and all in `make test-long`."""


def kept_names() -> list[str]:
    """Return the first input of each command, and some of the others."""
    first = {one["arguments"][0]: name for name, one in reversed(CORPUS.items())}
    return [name for number, name in enumerate(CORPUS)
            if number % EVERY == 0 or name in first.values()]  # fmt: skip


@pytest.fixture(scope="module")
def problems(request: pytest.FixtureRequest) -> dict[str, str]:
    """What is wrong with each input. They run in forks of a process without threads."""
    here = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in here if hasattr(item, "callspec")]
    ran = fork_server.run(["-m", "tests.fuzz.kept", *names])
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return {line["name"]: line["problem"] for line in lines}


@pytest.mark.parametrize("name", sample(CORPUS, kept_names()))
def test_an_input_that_once_failed_ends_with_a_message(name: str, problems: dict[str, str]) -> None:
    assert problems[name] == ""


def test_edits_change_values_and_bytes() -> None:
    raw = b'{"a": {"b": [1, 2]}}'
    assert Edit("x.json", "set", ("a", "b", 1), "y").apply(raw) == b'{"a": {"b": [1, "y"]}}'
    assert Edit("x.json", "remove", ("a", "b")).apply(raw) == b'{"a": {}}'
    assert Edit("x.json", "rename", ("a",), text="c").apply(raw) == b'{"c": {"b": [1, 2]}}'
    assert Edit("x.txt", "splice", at=1, length=2, text="\udcff").apply(b"abcd") == b"a\xffd"
    assert Edit("x.txt", "whole", text="[", length=3).apply(b"abcd") == b"[[["
