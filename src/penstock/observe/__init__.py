"""Record where memory and time go in any PyTorch program, and report it.

    with penstock.observe("run/") as obs:
        train()

The package object is callable: `penstock.observe(...)` is `penstock.observe.observer.observe(...)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """The type of this package, so that `penstock.observe` is a function and a package.

    Importing any submodule binds `penstock.observe` to the package, which would otherwise shadow
    the function of the same name in the public API.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from penstock.observe.observer import observe

        return observe(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
