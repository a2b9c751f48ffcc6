"""Arenas: alignment of blocks, errors of full and busy arenas, statistics."""

from __future__ import annotations

import gc

import pytest
import torch

from penstock import _native
from penstock.errors import ArenaBusyError, ArenaFullError, DtypeError, SizeError
from penstock.machine.sysfs import System
from penstock.memory.arena import ALIGNMENT, Arena, ArenaStats
from penstock.memory.placement import Node

NODE = System().allowed_nodes()[0]
PAGE = _native.page_nbytes()
UNIT = _native.UNIT_NBYTES


def test_blocks_are_aligned_to_256_bytes_by_default() -> None:
    arena = Arena(4096)

    blocks = [arena.take(1), arena.take(257), arena.take(1)]

    assert ALIGNMENT == 256
    assert [block.offset for block in blocks] == [0, 256, 768]
    assert all(block.address % 256 == 0 for block in blocks)


@pytest.mark.parametrize("align", [1, 2, 64, 4096, UNIT])
def test_a_block_is_aligned_as_requested(align: int) -> None:
    arena = Arena(UNIT + 4096)
    arena.take(1, align=1)

    block = arena.take(5, align=align)

    assert block.offset == align
    assert block.address % align == 0
    assert block.nbytes == 5


@pytest.mark.parametrize("align", [0, -256, 3, 384, 2 * UNIT])
def test_an_invalid_alignment_is_refused_with_the_name(align: int) -> None:
    arena = Arena(4096)

    with pytest.raises(SizeError, match=rf"wq: .*power of two up to 2.00 MiB, got {align}"):
        arena.take(16, align=align, name="wq")

    assert arena.stats.used == 0


@pytest.mark.parametrize("nbytes", [0, -1, 2**63, 2**64, 2**70])
def test_a_block_of_an_impossible_size_is_refused_with_the_name(nbytes: int) -> None:
    with pytest.raises(SizeError, match=f"wq.*got {nbytes}"):
        Arena(4096).take(nbytes, name="wq")


@pytest.mark.parametrize("nbytes", [0, -1, 2**63, 2**70])
def test_an_arena_of_an_impossible_size_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match=str(nbytes)):
        Arena(nbytes)


def test_a_size_may_have_a_unit() -> None:
    assert Arena("3KiB").stats.capacity == 3072


def test_a_full_arena_reports_how_much_was_needed_and_free() -> None:
    arena = Arena(1024)
    arena.take(600)

    with pytest.raises(ArenaFullError) as caught:
        arena.take(300, name="wo")

    error = caught.value
    assert (error.name, error.wanted, error.free, error.capacity) == ("wo", 468, 424, 1024)
    assert str(error).startswith("wo needs 468 B (468 B, padding included) in an arena of 1.00 KiB")
    assert "424 B (424 B) left" in str(error)
    assert arena.stats.used == 600
    assert arena.take(256, name="wo").offset == 768


def test_the_largest_possible_size_does_not_fit() -> None:
    with pytest.raises(ArenaFullError):
        Arena(4096).take(2**63 - 1)


def test_a_reset_arena_allocates_from_the_front() -> None:
    arena = Arena(4096)
    arena.take(4096)

    arena.reset()

    assert arena.take(4096).offset == 0


def test_resetting_an_arena_in_use_reports_the_live_blocks() -> None:
    arena = Arena(4096)
    live = [arena.take(16), arena.tensor(4)]

    with pytest.raises(ArenaBusyError, match=r"^2 tensors of this arena are still alive") as caught:
        arena.reset()
    assert caught.value.live == 2
    assert arena.stats.used == 272

    live.clear()
    gc.collect()
    arena.reset()
    assert arena.stats.used == 0


def test_stats_count_every_byte() -> None:
    arena = Arena(4096)
    first = arena.take(100)
    arena.take(50)

    assert arena.stats == ArenaStats(capacity=4096, used=306, padding=156, peak=306, live=1)
    assert repr(arena) == "Arena(306 B of 4.00 KiB used, 1 live)"

    del first
    arena.reset()
    arena.take(10)

    assert arena.stats == ArenaStats(capacity=4096, used=10, padding=0, peak=306, live=0)


def test_tensors_are_allocated_one_after_the_other() -> None:
    arena = Arena(4096)

    first = arena.tensor((2, 3), torch.float64)
    second = arena.tensor(5)
    third = arena.tensor(5, torch.uint8, align=4)

    assert (first.shape, first.dtype) == ((2, 3), torch.float64)
    assert (second.shape, second.dtype) == ((5,), torch.float32)
    offsets = [tensor.data_ptr() - arena.address for tensor in (first, second, third)]
    assert offsets == [0, 256, 276]


def test_a_tensor_too_large_for_the_arena_is_named() -> None:
    with pytest.raises(ArenaFullError, match=r"^wq needs 4.00 KiB"):
        Arena(1024).tensor(1024, name="wq")


def test_invalid_shapes_and_dtypes_are_refused_and_allocate_nothing() -> None:
    arena = Arena(1024)

    with pytest.raises(SizeError, match="every dimension must be 1 or more"):
        arena.tensor((3, 0))
    with pytest.raises(DtypeError, match="qint8"):
        arena.tensor(3, torch.qint8)

    assert arena.stats.used == 0


def test_a_tensor_keeps_the_memory_of_a_deleted_arena_alive() -> None:
    arena = Arena(4096)
    address = arena.address
    tensor = arena.tensor(1000).fill_(3)
    del arena
    gc.collect()

    assert float(tensor.sum()) == 3000
    assert _native.Region.at(address) is not None

    del tensor
    gc.collect()
    assert _native.Region.at(address) is None


def test_a_block_is_written_in_place() -> None:
    arena = Arena(4096)
    view = memoryview(arena.take(4))
    view[:] = b"wxyz"

    assert bytes(view) == b"wxyz"
    assert len(view) == 4


def test_where_counts_the_whole_range() -> None:
    assert Arena(3 * PAGE - 1, Node(NODE)).where().nbytes == {NODE: 3 * PAGE}
    assert Arena(3 * PAGE, prefault=False, huge=None).where().unmapped == 3


def test_an_arena_is_pinned_only_if_it_is_registered_with_cuda() -> None:
    arena = Arena(4096, pinned=True)

    assert arena.pinned is (_native.cuda_devices() > 0)
    assert not Arena(4096).pinned
