"""Generate the reference pages of the site from the code: commands, settings and errors.

mkdocs calls `on_files` and `on_page_markdown` (see `hooks` in mkdocs.yml). The pages are made at
every build and are not in the repository, so they cannot be out of date. Files of the repository
that a page links, such as results of benchmarks, become files of the site.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
LINK = re.compile(r"\]\(\.\./([^)#\s]+)\)")
"""A link to something in the repository outside of docs/."""

PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img alt="([^"]+)" src="([^"]+)">\s*</picture>'
)
"""A figure for light and dark pages, in the form that GitHub shows."""

OTHER_DEFAULTS = {
    "lr": "5e-5. Full fine-tuning of pretrained models mostly uses 1e-5 to 2e-5",
    "schedule": "linear. Cosine is what published recipes for fine-tuning use",
    "warmup": "0 steps. Without warmup, AdamW's first updates are as large as any later one",
    "betas": "0.9,0.999. With 0.95, second moments follow a short run",
    "weight_decay": "0",
    "batch": "8 per device. A small data set would get two or three steps",
    "context": "the tokenizer's limit. Memory and time grow with it, so the data decides",
    "deterministic": "off. Results that repeat are what Penstock promises",
    "epochs": "3. One epoch is less likely to overfit a small data set",
    "dtype": "fp32 unless `bf16=True`",
    "save_every": "500 steps. A time suits steps of any length",
    "keep": "no limit",
}
"""Defaults of transformers' Trainer that differ from Penstock's, and why Penstock's do."""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the pages of the site."""
    from mkdocs.structure.files import File

    pages = {
        "reference/commands": commands_page,
        "reference/settings": settings_page,
        "reference/errors": errors_page,
        "decisions/all": decisions_page,
    }
    for name, make in pages.items():
        content = "\n".join(make()) + "\n"
        files.append(File.generated(config, f"{name}.md", content=content))
    linked = {target for page in DOCS.glob("*.md") for target in LINK.findall(page.read_text())}
    for target in sorted(linked):
        path = DOCS.parent / target
        if path.is_file():
            added = File.generated(config, f"files/{target}", abs_src_path=str(path))
            files.append(added)
        elif not path.is_dir():  # with --strict, this ends the build
            logging.getLogger("mkdocs.hooks").warning("a page links %s, which is missing", target)
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Link the files of the repository that are part of the site; name its directories.

    Figures get the form that follows the site's switch between light and dark.
    """

    def replaced(match: re.Match[str]) -> str:
        target = match[1]
        return f"](files/{target})" if (DOCS.parent / target).is_file() else f"](#) (`{target}`)"

    figures = PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", markdown)
    return LINK.sub(replaced, figures)


def decisions_page() -> Iterator[str]:
    """List the records of design decisions."""
    yield "# Decisions\n"
    yield "Each page says what was decided, why, and what was rejected.\n"
    for path in sorted((DOCS / "decisions").glob("*.md")):
        title = path.read_text().partition("\n")[0].lstrip("# ").strip()
        yield f"- [{title}]({path.name})"


def commands_page() -> Iterator[str]:
    """List every command with its arguments and options."""
    import typer.main

    from penstock.cli.main import app

    yield "# Commands\n"
    yield "Every command has `--help`. `--json` prints JSON for programs, and nothing else.\n"
    yield "Exit codes: 0 for success, 1 for an error that the message explains, 2 for wrong usage, "
    yield "130 and 143 after Ctrl-C and SIGTERM, 70 for a bug in Penstock.\n"
    yield from _describe(typer.main.get_command(app), "penstock")


def _describe(command: Any, name: str) -> Iterator[str]:
    if hasattr(command, "commands"):  # a group: typer may bring its own copy of click's class
        for each, found in command.commands.items():
            if not found.hidden:
                yield from _describe(found, f"{name} {each}")
        return
    yield f"## `{name}`\n"
    yield inspect.cleandoc(command.help or "").replace("\f", "") + "\n"
    rows = [param for param in command.params if not getattr(param, "hidden", False)]
    if rows:
        yield "| option | default | meaning |\n|---|---|---|"
        yield from map(_parameter_row, rows)
    yield ""


def _parameter_row(param: Any) -> str:
    names = ", ".join(f"`{each}`" for each in [*param.opts, *param.secondary_opts])
    if getattr(param, "param_type_name", "") == "argument":
        names = f"`{(param.metavar or param.name or '').upper()}`"
    default = param.default
    shown = "" if default in (None, False, (), [], "") or callable(default) else f"`{default}`"
    return f"| {names} | {_cell(shown)} | {_cell(getattr(param, 'help', None) or '')} |"


def settings_page() -> Iterator[str]:
    """List every setting with its default, and why it differs from that of transformers."""
    from penstock.settings import Settings

    yield "# Settings\n"
    yield "The flags of `penstock train` and `penstock plan`, the keys of `--config` and"
    yield "`run.yaml`, and the arguments of `penstock.prepare` are the same settings, with one"
    yield "default each. On the command line, `_` is `-`.\n"
    yield "The last column has the default of transformers' `Trainer` where it is another one, and"
    yield "the reason.\n"
    for group in dataclasses.fields(Settings):
        section = _type_of(Settings, group.name)
        if not dataclasses.is_dataclass(section):
            continue
        yield f"## `{group.name}`\n"
        yield inspect.cleandoc(section.__doc__ or "") + "\n"
        yield "| setting | default | meaning | Trainer |\n|---|---|---|---|"
        for each in dataclasses.fields(section):
            yield _setting_row(each)
        yield ""


def _type_of(owner: Any, name: str) -> Any:
    from typing import get_type_hints

    return get_type_hints(owner)[name]


def _setting_row(each: dataclasses.Field[Any]) -> str:
    factory = each.default_factory
    default = each.default if factory is dataclasses.MISSING else factory()
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    shown = "" if default in (None, "", {}, dataclasses.MISSING) else f"`{default}`"
    meaning = each.metadata.get("help", "")
    other = OTHER_DEFAULTS.get(each.name, "")
    return f"| `{each.name}` | {_cell(shown)} | {_cell(meaning)} | {_cell(other)} |"


def errors_page() -> Iterator[str]:
    """List every exception with its meaning, most general first."""
    from penstock import errors
    from penstock.storage import errors as storage_errors

    yield "# Errors\n"
    yield "Every error is a `penstock.PenstockError`. Its message says what failed, how much it"
    yield "needed, how much there was, and what to do next. The numbers are attributes of the"
    yield "exception as well.\n"
    for title, module in (("Penstock", errors), ("The store", storage_errors)):
        yield f"## {title}\n"
        yield "| exception | is a | raised if |\n|---|---|---|"
        for name, found in vars(module).items():
            if not (inspect.isclass(found) and issubclass(found, Exception)):
                continue
            if found.__module__ != module.__name__:
                continue
            bases = ", ".join(f"`{base.__name__}`" for base in found.__bases__)
            first = inspect.cleandoc(found.__doc__ or "").split("\n\n")[0]
            yield f"| `{name}` | {bases} | {_cell(first)} |"
        yield ""


def _cell(text: str) -> str:
    """Return a text that fits into one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
