"""The documentation: pages are in the navigation, links lead somewhere, figures are up to date."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")
GENERATED = {
    "reference/commands.md",
    "reference/settings.md",
    "reference/errors.md",
    "decisions/all.md",
}
"""Pages that `make docs` makes from the code."""

PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def pages_in(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_in(each)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs both make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()).strip() for title in titles)
    return {re.sub(r"\s", "-", title) for title in plain}


def test_the_navigation_lists_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = list(pages_in(nav))

    assert len(listed) == len(set(listed))
    assert set(listed) - GENERATED == {page.name for page in DOCS.glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        if target.startswith(("http:", "https:")) or anchor.startswith("only-"):
            continue
        if page.parent == DOCS and target in GENERATED:  # `make docs` checks these
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), link


def test_figures_are_what_the_script_draws() -> None:
    figures = load("figures")
    for name, (title, width, height, draw) in figures.FIGURES.items():
        for theme in figures.THEMES:
            drawing = figures.Drawing(width, height, theme)
            draw(drawing)
            found = (DOCS / "img" / f"{name}-{theme}.svg").read_text()
            assert drawing.svg(title) == found, f"{name}: run docs/site/figures.py"


def test_reference_pages_cover_every_command_setting_and_error() -> None:
    import dataclasses

    from penstock import errors
    from penstock.settings import GROUPS

    pages = load("reference_pages")
    commands = "\n".join(pages.commands_page())
    for name in ("plan", "train", "generate", "store rm", "data show"):
        assert f"## `penstock {name}`" in commands
    assert "--save-every" in commands
    settings = "\n".join(pages.settings_page())
    names = {each.name for group in GROUPS.values() for each in dataclasses.fields(group)}
    assert all(f"| `{name}` |" in settings for name in names)
    assert set(pages.OTHER_DEFAULTS) <= names
    assert f"| `{errors.InfeasibleError.__name__}` |" in "\n".join(pages.errors_page())


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
