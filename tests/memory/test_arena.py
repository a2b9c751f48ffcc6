"""One range, many blocks: where blocks lie, what a full or busy arena says, what is counted."""

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


def test_blocks_start_on_256_bytes_unless_told() -> None:
    arena = Arena(4096)

    blocks = [arena.take(1), arena.take(257), arena.take(1)]

    assert ALIGNMENT == 256
    assert [block.offset for block in blocks] == [0, 256, 768]
    assert all(block.address % 256 == 0 for block in blocks)


@pytest.mark.parametrize("align", [1, 2, 64, 4096, UNIT])
def test_a_block_starts_where_asked(align: int) -> None:
    arena = Arena(UNIT + 4096)
    arena.take(1, align=1)

    block = arena.take(5, align=align)

    assert block.offset == align
    assert block.address % align == 0
    assert block.nbytes == 5


@pytest.mark.parametrize("align", [0, -256, 3, 384, 2 * UNIT])
def test_an_odd_alignment_is_refused_by_name(align: int) -> None:
    arena = Arena(4096)

    with pytest.raises(SizeError, match=rf"wq: .*power of two up to 2.00 MiB, got {align}"):
        arena.take(16, align=align, name="wq")

    assert arena.stats.used == 0


@pytest.mark.parametrize("nbytes", [0, -1, 2**63, 2**64, 2**70])
def test_a_block_of_no_possible_size_is_refused_by_name(nbytes: int) -> None:
    with pytest.raises(SizeError, match=f"wq.*got {nbytes}"):
        Arena(4096).take(nbytes, name="wq")


@pytest.mark.parametrize("nbytes", [0, -1, 2**63, 2**70])
def test_an_arena_of_no_possible_size_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match=str(nbytes)):
        Arena(nbytes)


def test_a_size_may_be_written_with_its_unit() -> None:
    assert Arena("3KiB").stats.capacity == 3072


def test_a_full_arena_says_who_wanted_what_and_what_was_left() -> None:
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


def test_the_largest_size_there_is_is_too_large_for_an_arena() -> None:
    with pytest.raises(ArenaFullError):
        Arena(4096).take(2**63 - 1)


def test_a_reset_arena_starts_from_the_front() -> None:
    arena = Arena(4096)
    arena.take(4096)

    arena.reset()

    assert arena.take(4096).offset == 0


def test_an_arena_in_use_says_by_how_many() -> None:
    arena = Arena(4096)
    held = [arena.take(16), arena.tensor(4)]

    with pytest.raises(ArenaBusyError, match=r"^2 tensors of this arena are still alive") as caught:
        arena.reset()
    assert caught.value.live == 2
    assert arena.stats.used == 272

    held.clear()
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


def test_tensors_lie_one_behind_the_other_in_the_arena() -> None:
    arena = Arena(4096)

    first = arena.tensor((2, 3), torch.float64)
    second = arena.tensor(5)
    third = arena.tensor(5, torch.uint8, align=4)

    assert (first.shape, first.dtype) == ((2, 3), torch.float64)
    assert (second.shape, second.dtype) == ((5,), torch.float32)
    offsets = [tensor.data_ptr() - arena.address for tensor in (first, second, third)]
    assert offsets == [0, 256, 276]


def test_a_tensor_too_large_for_its_arena_is_named() -> None:
    with pytest.raises(ArenaFullError, match=r"^wq needs 4.00 KiB"):
        Arena(1024).tensor(1024, name="wq")


def test_what_no_tensor_can_be_is_refused_and_takes_nothing() -> None:
    arena = Arena(1024)

    with pytest.raises(SizeError, match="every size is 1 or more"):
        arena.tensor((3, 0))
    with pytest.raises(DtypeError, match="qint8"):
        arena.tensor(3, torch.qint8)

    assert arena.stats.used == 0


def test_a_tensor_keeps_the_memory_of_an_arena_that_is_gone() -> None:
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


def test_where_counts_the_whole_range_used_or_not() -> None:
    assert Arena(3 * PAGE - 1, Node(NODE)).where().nbytes == {NODE: 3 * PAGE}
    assert Arena(3 * PAGE, prefault=False, huge=None).where().unmapped == 3


def test_an_arena_is_pinned_only_when_cuda_knows_it() -> None:
    arena = Arena(4096, pinned=True)

    assert arena.pinned is (_native.cuda_devices() > 0)
    assert not Arena(4096).pinned
