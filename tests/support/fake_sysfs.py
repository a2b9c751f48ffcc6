"""Synthetic machines: listings of kernel files, written below a directory.

Each line of a listing has a path, a tab and the file's text. `\\n` is a line break, and `-> x` is a
symbolic link.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.machine.sysfs import System

FIXTURES = Path(__file__).parents[1] / "fixtures"


def fake_root(
    root: Path, *listings: str, changes: Mapping[str, str | None] | None = None
) -> System:
    """Write the listings, later ones over earlier ones, then `changes`; None removes a file."""
    files: dict[str, str | None] = {}
    for listing in listings:
        for line in (FIXTURES / f"{listing}.txt").read_text().splitlines():
            if not line.startswith("#"):
                path, _, text = line.partition("\t")
                files[path] = text.replace("\\n", "\n")
    files.update(changes or {})
    # Write links first: on the kernel's buses, files are reached through them.
    for path, text in sorted(files.items(), key=lambda item: not (item[1] or "").startswith("-> ")):
        if text is not None:
            _write(root / path, text)
    return System(root)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not text.startswith("-> "):
        path.write_text(text + "\n")
        return
    target = text.removeprefix("-> ")
    if path.parent.name == "devices" or path.parent.parent.name == "dev":
        (path.parent / target).mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
