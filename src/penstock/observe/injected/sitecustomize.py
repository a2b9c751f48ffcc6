"""Run by every Python that `penstock profile` starts, before its program. Room: show.

It stands in front of a sitecustomize that the program may have of its own, runs that one, and waits
for torch to be imported: what has no torch is not observed, and notices nothing. It knows nothing
but the standard library, for the program may run in an environment without Penstock.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from typing import Any

SETTINGS = "PENSTOCK_OBSERVE"


class _WaitingForTorch:
    """A finder that finds nothing, but learns when torch is asked for."""

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
    except Exception as failed:  # the program comes first
        print(f"penstock profile: {os.getpid()} is not recorded: {failed}", file=sys.stderr)


def _run_the_other() -> None:
    """The sitecustomize that would have run without this one."""
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
    sys.meta_path.insert(0, _WaitingForTorch())
_run_the_other()
