"""Where memory and time go, second by second, in any PyTorch program. Room: show.

    with penstock.observe("run/") as obs:
        train()

The package is the function: `penstock.observe(...)` is `penstock.observe.observer.observe(...)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Function(ModuleType):
    """A package that can be called, for the name that users know is also the package's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from penstock.observe.observer import observe

        return observe(*args, **kwargs)


sys.modules[__name__].__class__ = _Function
