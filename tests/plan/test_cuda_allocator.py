"""The model of PyTorch's CUDA allocator: pages, gaps between tensors, and the limit."""

from __future__ import annotations

import random

import pytest

from penstock.plan.cuda_allocator import PAGE, SMALL_PAGE, ExpandableSegments
from penstock.units import KiB, MiB


def test_small_and_large_tensors_are_in_pages_of_their_own() -> None:
    memory = ExpandableSegments()
    memory.allocate("small", 1)
    assert (memory.allocated, memory.reserved) == (512, SMALL_PAGE)

    memory.allocate("still small", MiB)
    assert memory.reserved == SMALL_PAGE

    memory.allocate("large", MiB + 1)
    assert memory.reserved == SMALL_PAGE + PAGE
    assert memory.allocated == 512 + 2 * MiB + 512


def test_a_tensor_of_another_size_uses_freed_memory() -> None:
    memory = ExpandableSegments()
    for key in range(4):
        memory.allocate(key, 5 * MiB)
    for key in range(4):
        memory.free(key)

    memory.allocate("all of it", 20 * MiB)

    assert memory.reserved == PAGE


def test_the_smallest_gap_that_fits_is_used() -> None:
    memory = ExpandableSegments()
    for key, size in enumerate((8, 2, 4, 2, 3)):  # 19 of 20 MiB
        memory.allocate(key, size * MiB)
    memory.free(0)
    memory.free(2)

    memory.allocate("in the second gap", 4 * MiB)
    memory.allocate("in the first gap", 8 * MiB)

    assert memory.reserved == PAGE


def test_a_request_extends_the_free_memory_at_the_end() -> None:
    memory = ExpandableSegments()
    memory.allocate("first", 15 * MiB)
    memory.allocate("second", 22 * MiB)

    assert memory.reserved == 2 * PAGE


def test_at_the_limit_unused_pages_move_to_where_they_are_needed() -> None:
    memory = ExpandableSegments(limit=3 * PAGE)
    memory.allocate("first", PAGE)
    memory.allocate("kept", PAGE)
    memory.free("first")

    memory.allocate("larger than the gap", 2 * PAGE)

    assert memory.trims == 1
    assert memory.reserved == 3 * PAGE
    with pytest.raises(MemoryError):
        memory.allocate("more", 2 * MiB)


def test_a_page_that_is_partly_used_stays() -> None:
    memory = ExpandableSegments(limit=3 * PAGE)
    memory.allocate("first", PAGE // 2)
    memory.allocate("kept", PAGE)  # in halves of two pages
    memory.free("first")

    with pytest.raises(MemoryError):
        memory.allocate("does not fit", 2 * PAGE - 2 * MiB)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_reserved_beyond_the_tensors_are_parts_of_pages(seed: int) -> None:
    """After unused pages are unmapped, every gap between tensors wastes less than two pages."""
    draw = random.Random(seed)
    memory = ExpandableSegments()
    live: list[int] = []
    for key in range(400):
        if live and draw.random() < 0.48:
            memory.free(live.pop(draw.randrange(len(live))))
        else:
            memory.allocate(key, draw.choice((700 * KiB, 3 * MiB, 11 * MiB, 37 * MiB, 90 * MiB)))
            live.append(key)
    for part in memory._ranges.values():
        part.unmap_unused()

    assert memory.reserved >= memory.allocated
    assert memory.reserved - memory.allocated < 2 * PAGE * (len(live) + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_the_model_reserves_what_torch_reserves(seed: int) -> None:
    import torch

    from penstock.engine.device_memory import use_expandable_segments

    use_expandable_segments()
    draw = random.Random(seed)
    # Of high priority: no engine uses these, and leaves workspaces of libraries in their pages.
    stream = torch.cuda.Stream(priority=-1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    memory, live = ExpandableSegments(), {}
    with torch.cuda.stream(stream):
        for key in range(300):
            if live and draw.random() < 0.48:
                done = draw.choice(list(live))
                del live[done]
                memory.free(done)
            else:
                nbytes = draw.randrange(1, 64 * MiB) if draw.random() < 0.7 else draw.randrange(MiB)
                live[key] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
                memory.allocate(key, nbytes)
            assert torch.cuda.memory_reserved() - before == memory.reserved, key
        live.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
