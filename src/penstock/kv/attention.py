"""Attention over rows of a cache that are not equally long. Room: hold.

Keys and values are the cache's own views, [rows, heads, tokens, head size], never copied and never
repeated for grouped queries. No mask comes from transformers: the rows' lengths say what each query
sees. It is registered with transformers under the name `penstock-kv`.

Four ways, all of the same result:
- each row on its own (everywhere, and what the CPU does);
- one new token a row: Penstock's own kernel, where Triton is there; see `decode`;
- rows of one length, or one row: the flash kernel over the batch;
- rows of many lengths: the flash kernel for variable lengths, over all slots as one run of tokens,
  told where each row begins and how much of it to read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from penstock.kv import decode, rowwise
from penstock.kv.rowwise import Attention, Rows

NAME = "penstock-kv"

_current = threading.local()


def rows(lengths: Sequence[int], new: int) -> contextlib.AbstractContextManager[None]:
    """Attention of this thread is over such rows."""
    return _over(Rows(tuple(lengths), new))


def spots(where: decode.Spots) -> contextlib.AbstractContextManager[None]:
    """Attention of this thread is over rows that lie there, and of one new token each."""
    return _over(where)


@contextlib.contextmanager
def _over(now: Rows | decode.Spots) -> Iterator[None]:
    before = getattr(_current, "rows", None)
    _current.rows = now
    try:
        yield
    finally:
        _current.rows = before


def register(name: str = NAME, function: Callable[..., Any] | None = None) -> None:
    """Make a name known to transformers: ours, or another way to attend."""
    from transformers import AttentionInterface

    interface: Any = AttentionInterface
    interface.register(name, function or attend)


def configs_of(model: Any) -> list[Any]:
    """Each config that some part of the model asks how to attend."""
    found = {id(held): held for part in model.modules() if (held := getattr(part, "config", None))}
    return list(found.values())


@contextlib.contextmanager
def chosen(configs: Sequence[Any]) -> Iterator[None]:
    """Models of these configs attend this way inside, and as before outside."""
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls."""
    assert attention_mask is None, "transformers made a mask that is not needed"
    assert s_aux is None, "attention sinks are refused when the generator is made"
    return over_rows(query, key, value, scaling, sliding_window, softcap), None


def over_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    scaling: float | None, window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Over the rows that this thread is about: [rows, tokens, heads, head size]."""
    now: Rows | decode.Spots | None = getattr(_current, "rows", None)
    assert now is not None, "attention over a cache outside of rows()"
    how = (scaling, window, softcap)
    if query.shape[2] == 1 and decode.fits(query.device, query.dtype, query.shape[-1]):
        if isinstance(now, Rows):
            now = now.spots(query.device, key.stride(0) // key.stride(2))
        return decode.attend(query, key, value, now, *how)
    if isinstance(now, decode.Spots):
        return _each_spot(query, key, value, now, *how)
    one = Attention(now, *how)
    if not rowwise.flash_fits(query, softcap):
        return one.by_rows(query, key, value)
    return one.flash(query, key, value)


def _each_spot(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, where: decode.Spots,
    scaling: float | None, window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Without the kernel, where reading lengths stops nothing: on the CPU."""
    count, heads, _, head = query.shape
    found = query.new_zeros(count, 1, heads, head)
    per_slot = key.stride(0) // key.stride(2)
    for at, (start, end) in enumerate(zip(where.starts.tolist(), where.ends.tolist(), strict=True)):
        row = start // per_slot
        if end > 0:
            one = Attention(Rows((end - 1,), 1), scaling, window, softcap)
            found[at] = one.by_rows(query[at : at + 1], key[row : row + 1], value[row : row + 1])[0]
    return found
