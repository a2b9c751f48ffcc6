"""Measure pages, for bench_kv: the driver's time per page, and how much of it delays tokens."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import certificate
from bench.kv_arms import Virtual, token_nbytes
from penstock.kv.address_space import Space, open_space

ALONE = 128
"""Number of pages that are created, mapped and released one by one."""

PAGES = 24
"""Number of pages that each row grows by while it decodes."""

ROWS, CONTEXT = 8, 1024


def pages(bench: Any, found: list[dict[str, Any]]) -> None:
    row: dict[str, Any] = {"alone": alone(torch.device(bench.device))}
    found.append(row)
    row["decoding"] = bench.cell(
        CONTEXT, ROWS, lambda: decoding(bench, row["alone"]["page_nbytes"])
    )
    print("pages", row, flush=True)
    bench.save()


def alone(device: torch.device) -> dict[str, Any]:
    """Return the seconds of each driver call for one page, with nothing else running."""
    space = open_space(device)
    address = space.reserve(ALONE)
    seconds_of: dict[str, list[float]] = {}
    for at in (address + i * space.page_nbytes for i in range(ALONE)):
        _one_page(space, at, seconds_of)
    space.release(address, ALONE)
    spread = {name: certificate.percentiles(seconds) for name, seconds in seconds_of.items()}
    found = {"page_nbytes": space.page_nbytes, **spread}
    space.close()
    return found


def _one_page(space: Space, at: int, seconds_of: dict[str, list[float]]) -> None:
    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        answer = call()
        seconds_of.setdefault(name, []).append(time.perf_counter() - began)
        return answer

    page = timed("create", space.create)
    timed("map", lambda: space.map(at, [page]))
    timed("clear", lambda: space.zero(space.bytes_at(at, space.page_nbytes)))
    timed("unmap", lambda: space.unmap(at, 1))
    timed("destroy", lambda: space.destroy(page))


def decoding(bench: Any, nbytes: int) -> dict[str, Any]:
    """Measure decoding while rows grow.

    Rows of equal length all grow by a page in the same step, which is the worst case. Returns the
    seconds of these steps and of the others, and how many pages were mapped before they were
    needed.
    """
    each = token_nbytes(bench.model.config, bench.dtype)
    tokens = min(4096, PAGES * nbytes // each)
    arm = Virtual(bench.model, CONTEXT, ROWS, graphs=True, ahead=tokens + 8)
    try:
        for _ in range(4):
            arm.step()
        before, length = arm.cache.stats, arm.rows[0].length
        crossing, others = [], []
        gc.collect()
        for step in range(length, length + tokens):
            began = time.perf_counter()
            arm.step()
            grew = step * each // nbytes != (step + 1) * each // nbytes
            (crossing if grew else others).append(time.perf_counter() - began)
        after = arm.cache.stats
    finally:
        arm.close()
    ahead, inline = (getattr(after, name) - getattr(before, name)
                     for name in ("grown_ahead", "grown_inline"))  # fmt: skip
    return {
        "rows": ROWS, "context": CONTEXT, "pages_ahead": ahead, "pages_waited_for": inline,
        "hidden": ahead / max(1, ahead + inline),
        "seconds_of_steps_with_new_pages": certificate.percentiles(crossing),
        "seconds_of_the_others": certificate.percentiles(others),
    }  # fmt: skip
