"""What a page shows below `$ penstock plan` is what the command prints.

Predictions change with the planner and the cost model, and the pages would not.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs/planner.md"]
SHOWN = re.compile(r"^```\n\$ penstock (plan (?:[^\n]*\\\n)*[^\n]*)\n(.*?)^```", re.M | re.S)
"""A command of a page, and what the page shows below it. `...` stands for lines that are left
out."""

NAMED, MODEL = "llama-3.1-8b/", "tests/configs/llama-3.1-8b"
"""A model directory of a page, and where its config is."""

EXAMPLES = [
    pytest.param(
        page, *found, id=page.name, marks=[] if page.name == "README.md" else [pytest.mark.long]
    )
    for page in PAGES
    for found in SHOWN.findall(page.read_text())
]


def test_all_pages_with_plans_are_listed() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

    assert [page for page in pages if SHOWN.search(page.read_text())] == PAGES


@pytest.mark.parametrize(("page", "command", "shown"), EXAMPLES)
def test_pages_show_what_the_command_prints(
    page: Path, command: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    words = shlex.split(command.replace("\\\n", " "))

    result = CliRunner().invoke(app, [MODEL if word == NAMED else word for word in words])

    assert result.exit_code == 0, result.output
    printed = [line.rstrip() for line in result.output.splitlines()]
    lines = [line for line in shown.splitlines() if line.strip() != "..."]
    if NAMED in words:
        lines = [line.replace(NAMED, MODEL) for line in lines]
    assert len(lines) > 5
    assert [line for line in lines if line not in printed] == []
