"""The cache on a GPU: memory is allocated and released, and tokens are those of DynamicCache.

The tests of spaces and of the cache that use the fixture `space` run on a GPU, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache

from penstock.kv import VirtualCache
from penstock.kv.address_space import CudaSpace
from penstock.units import MiB
from tests.kv.small_models import KINDS, model, prompts
from tests.support.gpu_memory import counted_pages, driver_bytes

pytestmark = pytest.mark.gpu


def test_close_returns_all_memory_to_the_driver() -> None:
    some_model = model("Llama").to("cuda", torch.bfloat16)
    ids = torch.randint(3, 128, (4, 200), device="cuda")
    make = {"max_batch": 4, "max_context": 1 << 20, "budget": "256MiB"}
    with VirtualCache(some_model.config, **make, dtype=torch.bfloat16) as warm:  # type: ignore[arg-type]
        some_model.generate(ids, past_key_values=warm, max_new_tokens=8)
    with counted_pages() as pages:
        before = pages.measure()

        for _ in range(5):
            cache = VirtualCache(some_model.config, **make, dtype=torch.bfloat16)  # type: ignore[arg-type]
            some_model.generate(ids, past_key_values=cache, max_new_tokens=8)
            used = pages.measure().allocated - before.allocated
            assert 0 < cache.stats.mapped_bytes <= used <= 256 * MiB
            cache.close()

        assert pages.measure() == before


def test_a_range_larger_than_the_gpu_costs_no_memory() -> None:
    space = CudaSpace(torch.device("cuda"))
    before = driver_bytes()
    count = (1 << 42) // space.page_nbytes  # 4 TiB, more than any GPU has
    at = space.reserve(count)
    if before is not None:
        assert (driver_bytes() or 0) - before < 64 * MiB

    page = space.create()
    far = at + (count - 1) * space.page_nbytes
    space.map(far, [page])
    whole = space.bytes_at(at, count * space.page_nbytes)
    whole[-space.page_nbytes :].fill_(9)

    assert int(whole[-1]) == 9
    space.synchronize()
    space.unmap(far, 1)
    space.destroy(page)
    space.release(at, count)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_of_a_dynamic_cache(kind: str) -> None:
    """In float32, where views and copies differ only in the order of summation."""
    some_model = model(kind).to("cuda")
    ids, mask = (part.to("cuda") for part in prompts())
    how = {"attention_mask": mask, "max_new_tokens": 32, "do_sample": False}
    want = some_model.generate(ids, past_key_values=DynamicCache(config=some_model.config), **how)
    with VirtualCache(
        some_model.config, max_batch=9, max_context=512, budget="256MiB", dtype=torch.float32
    ) as cache:
        got = some_model.generate(ids, past_key_values=cache, **how)
        beams = some_model.generate(ids, num_beams=3, **how)
        cache.reset()
        shared = some_model.generate(ids, past_key_values=cache, num_beams=3, **how)

    assert torch.equal(got, want)
    assert torch.equal(shared, beams)


def test_page_operations_report_their_time(record_property: Callable[[str, object], None]) -> None:
    """Report times without checking them: `-s` prints them, `--junitxml` stores them."""
    space, count = CudaSpace(torch.device("cuda")), 256
    at = space.reserve(count)
    costs: dict[str, float] = {}

    def timed(name: str, work: Callable[[int], object]) -> list[object]:
        start = time.perf_counter()
        results = [work(i) for i in range(count)]
        costs[name] = (time.perf_counter() - start) / count * 1e6
        return results

    def address(i: int) -> int:
        return at + i * space.page_nbytes

    pages = [int(str(page)) for page in timed("create", lambda _: space.create())]
    timed("map and set access", lambda i: space.map(address(i), [pages[i]]))
    view = space.bytes_at(at, count * space.page_nbytes)
    timed("zero on a stream of its own", lambda i: space.zero(view[i : i + 1]))
    space.synchronize()
    timed("unmap", lambda i: space.unmap(address(i), 1))
    start = time.perf_counter()
    space.map(at, pages)
    costs["map and set access, all in one call"] = (time.perf_counter() - start) / count * 1e6
    space.unmap(at, count)
    timed("release", lambda i: space.destroy(pages[i]))
    space.release(at, count)
    for name, microseconds in costs.items():
        record_property(name, microseconds)
        print(f"{name}: {microseconds:.1f} us per page of {space.page_nbytes >> 20} MiB")
    assert len(costs) == 6
