"""Let the caller of a layer handle its attention calls: record what they return, or repeat it.

The attention operation asks the calling thread's handler, if there is one. Compilers treat the
operation as opaque, so a compiled layer runs the same code with and without a handler.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch

Results = tuple[torch.Tensor, torch.Tensor]
"""Attention's output, `[tokens, heads, head size]`, and the log-sum-exp of each query's scores,
`[heads, padded tokens]` in fp32. Backward needs both."""

Handler = Callable[[torch.Tensor, Callable[[], Results]], Results]
"""Returns the results of one attention call, given its queries and a function that computes
them. What it returns must not share memory with anything that is written later."""


class _Current(threading.local):
    """The handler of one thread."""

    def __init__(self) -> None:
        self.handler: Handler | None = None


_current = _Current()


class _Handling:
    # Not a generator, for the reason given in `penstock.model.unneeded_outputs`.
    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        _current.handler = self._handler

    def __exit__(self, *_: object) -> None:
        if _current.handler is self._handler:  # not that of a later step
            handle_no_attention()


def handling_attention(handler: Handler) -> contextlib.AbstractContextManager[None]:
    """Let `handler` answer the attention calls that this thread makes inside the block."""
    return _Handling(handler)


def handle_no_attention() -> None:
    """Let this thread compute attention itself. A step calls this like `skip_nothing`."""
    _current.handler = None


def compute_or_replay(query: torch.Tensor, compute: Callable[[], Results]) -> Results:
    """Return what the thread's handler returns, or compute."""
    handler = _current.handler
    return compute() if handler is None else handler(query, compute)
