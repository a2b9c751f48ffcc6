"""Let the caller of a layer handle its attention calls: record what they return, or repeat it.

The attention operation asks the calling thread's handler, if there is one. Compilers treat the
operation as opaque, so a compiled layer runs the same code with and without a handler.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

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


@contextlib.contextmanager
def handling_attention(handler: Handler) -> Iterator[None]:
    """Let `handler` answer the attention calls that this thread makes inside the block."""
    before = _current.handler
    _current.handler = handler
    try:
        yield
    finally:
        _current.handler = before


def compute_or_replay(query: torch.Tensor, compute: Callable[[], Results]) -> Results:
    """Return what the thread's handler returns, or compute."""
    handler = _current.handler
    return compute() if handler is None else handler(query, compute)
