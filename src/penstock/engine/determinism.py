"""Compute with kernels whose results do not differ from run to run.

Most of Penstock's kernels are deterministic by themselves (docs/reproducibility.md lists them). For
everything else that a model may call, torch has a switch: with it, an operation uses a
deterministic algorithm, or raises an error if it has none. The switch is global, so the engine sets
it only while it computes, and restores it afterwards: other code of the process keeps its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from penstock.errors import NotReproducibleError

_REFUSAL = "does not have a deterministic implementation"
"""Part of the message with which torch refuses an operation."""


class _Switch:
    """Torch's global switch, on while at least one engine of the process computes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[object] = set()
        self._before: tuple[bool, bool, bool, Any] = (False, False, True, None)
        self._refuses_products: bool | None = None  # None before it was tried

    def acquire(self, user: object) -> None:
        """Turn the switch on for a user.

        Ctrl-C may end this or `release` anywhere. So a user is noted before and forgotten after
        anything changes, and both may be repeated.
        """
        with self._lock:
            if not self._users:
                self._before = _settings()
            if not self._users or user in self._users:
                self._users.add(user)
                # cuBLAS is deterministic if every stream has a workspace of fixed size. Torch
                # allocates one for each, and this variable fixes the size.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                # Filling new memory would cost a pass over every tensor. No kernel of a step reads
                # memory that it has not written.
                _apply(True, False, False, True)
                cuda: Any = torch.cuda
                if self._refuses_products is None and cuda.is_initialized():
                    self._refuses_products = refuses_products()
                if self._refuses_products:
                    _apply(True, True, False, True)
            self._users.add(user)

    def release(self, user: object) -> None:
        """Restore the switch if a user is the last one; do nothing if it is none."""
        with self._lock:
            if self._users == {user}:
                _apply(*self._before)
            self._users.discard(user)


_switch = _Switch()


def refuses_products() -> bool:
    """Return whether torch refuses matrix products on the GPU of this process.

    Some versions of torch read `CUBLAS_WORKSPACE_CONFIG` at the first matrix product of the
    process. If it was not set by then, they refuse every product from then on, although it is
    deterministic. All they can still be asked for is to warn instead.
    """
    one = torch.ones((1, 1), device="cuda")
    try:
        torch.mm(one, one)
    except RuntimeError as error:
        if "CUBLAS_WORKSPACE_CONFIG" not in str(error):
            raise
        warnings.filterwarnings("ignore", message="Deterministic behavior was enabled")
        return True
    return False


@contextlib.contextmanager
def deterministic_kernels(enabled: bool, user: object = None) -> Iterator[None]:
    """Make torch use only deterministic kernels inside the block; do nothing unless `enabled`.

    A `user` may call `leave_deterministic_kernels` later, in case that Ctrl-C came at the end of
    the block.
    """
    if not enabled:
        yield
        return
    user = object() if user is None else user
    try:
        _switch.acquire(user)
        yield
    except RuntimeError as error:
        if _REFUSAL in str(error):
            raise NotReproducibleError(str(error).split(_REFUSAL)[0].strip()) from error
        raise
    finally:
        _switch.release(user)


def leave_deterministic_kernels(user: object) -> None:
    """Restore torch's switch if `deterministic_kernels` has not done so for this user."""
    _switch.release(user)


def _settings() -> tuple[bool, bool, bool, Any]:
    fills: Any = torch.utils.deterministic
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        fills.fill_uninitialized_memory,
        getattr(_inductor_config(), "deterministic", None),
    )


def _apply(enabled: bool, warn_only: bool, fill: bool, inductor: bool | None) -> None:
    fills: Any = torch.utils.deterministic
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    fills.fill_uninitialized_memory = fill
    # `use_deterministic_algorithms` also sets this option, in versions of torch that have it.
    if inductor is not None and hasattr(_inductor_config(), "deterministic"):
        _inductor_config().deterministic = inductor


def _inductor_config() -> Any:
    import torch._inductor.config as config

    return config
