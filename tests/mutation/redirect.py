"""Import Penstock from a copy of its sources, although an editable install names others.

The finder of an editable install comes before `sys.path`, so a copy on the path is not enough. The
copy has this file as its `sitecustomize.py`, which Python imports in processes that tests start.
"""

from __future__ import annotations

import sys
from pathlib import Path


def redirect(source: str) -> None:
    """Let the finder of an editable install find the modules in `source`."""
    for finder in sys.meta_path:
        files: dict[str, str] = getattr(finder, "known_source_files", {})
        if "penstock" not in files:
            continue
        before = str(Path(files["penstock"]).parents[1])
        for name, path in files.items():
            files[name] = path.replace(before, source, 1)
        folders: dict[str, list[str]] = finder.submodule_search_locations  # type: ignore[union-attr]
        for name, paths in folders.items():
            folders[name] = [path.replace(before, source, 1) for path in paths]


if __name__ == "sitecustomize":
    redirect(str(Path(__file__).parent))
