"""Run by every Python process that `penstock profile` starts, before the program itself.

It shadows a `sitecustomize` that the program may have, so it runs that one too. It then waits for
torch to be imported: a process without torch is not recorded. It uses the standard library only,
because the program may run in an environment without Penstock.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from typing import Any

SETTINGS = "PENSTOCK_OBSERVE"


class _TorchImportWatcher:
    """A meta path finder that finds nothing, but notices the import of torch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        load = getattr(spec and spec.loader, "exec_module", None)
        if spec is None or load is None:
            return spec

        def load_and_begin(module: Any) -> None:
            load(module)
            _begin()

        spec.loader.exec_module = load_and_begin  # type: ignore[union-attr, method-assign]
        return spec


def _begin() -> None:
    settings = json.loads(os.environ[SETTINGS])
    try:
        if importlib.util.find_spec("penstock") is None:
            sys.path.append(settings["home"])
        from penstock.observe.launch import begin

        begin(settings)
    except Exception as failed:  # recording must never stop the program
        print(f"penstock profile: process {os.getpid()} is not recorded: {failed}", file=sys.stderr)


def _run_shadowed_sitecustomize() -> None:
    """Import the `sitecustomize` that would have run without this one, if there is any."""
    here = os.path.dirname(os.path.abspath(__file__))
    ours = sys.modules.pop("sitecustomize", None)
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as missing:
        if missing.name != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


if SETTINGS in os.environ and sys.version_info >= (3, 11):
    sys.meta_path.insert(0, _TorchImportWatcher())
_run_shadowed_sitecustomize()
