"""Moving pages between the guest's nodes: Penstock's and other memory, huge and small pages."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import _native
from penstock.errors import HugePagesError, NodeFullError
from penstock.machine.sysfs import System
from penstock.memory.placement import Interleave, Node, Place, Stripe
from penstock.memory.region import move_region
from penstock.memory.residency import Residency, residency
from penstock.units import MiB
from tests.vm.guest import FAR, NODES, PAGE, UNIT, allocate, where

pytestmark = pytest.mark.vm

POOL = "/sys/devices/system/node/node{}/hugepages/hugepages-2048kB/nr_hugepages"
ROOM = 16 * MiB  # free memory of a nearly full node, without the reserve of the kernel


@pytest.fixture
def pools() -> Iterator[None]:
    """Reserve huge pages on nodes 0 and 1, but none on the far node."""
    paths = {node: path for node in NODES if (path := Path(POOL.format(node))).exists()}
    before = {node: path.read_text() for node, path in paths.items()}
    for node, path in paths.items():
        path.write_text("0" if node == FAR else "8")
    yield
    for node, path in paths.items():
        path.write_text(before[node])


def fill_node_1() -> _native.Region:
    """Fill node 1 except for ROOM and the reserve of the kernel."""
    gc.collect()  # memory of earlier tests must not become free during this one
    return allocate(System().node_bytes(1).available - 64 * MiB - ROOM, Node(1))


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(NODES, 2)))
def test_moving_migrates_every_page_and_keeps_every_byte(source: int, target: int) -> None:
    region = allocate(UNIT + PAGE, Node(source))
    view = memoryview(_native.Block(region))
    view[:] = bytes(i % 251 for i in range(PAGE)) * (len(view) // PAGE)
    address = region.address

    move_region(region, 0, region.nbytes, Node(target))

    assert region.address == address
    assert where(region) == Residency(pages={target: UNIT // PAGE + 1}, unmapped=0)
    assert bytes(view[-PAGE:]) == bytes(i % 251 for i in range(PAGE))


def test_a_part_of_a_range_can_be_moved() -> None:
    region = allocate(4 * UNIT, Node(0))

    move_region(region, UNIT, 2 * UNIT, Stripe({1: 1, FAR: 1}))

    assert where(region).nbytes == {0: 2 * UNIT, 1: UNIT, FAR: UNIT}


def test_a_locked_range_can_be_moved() -> None:
    region = allocate(UNIT, Node(0), pinned=True)
    assert region.pin is _native.Pin.locked

    move_region(region, 0, UNIT, Node(1))

    assert where(region).nbytes == {1: UNIT}


@pytest.mark.usefixtures("pools")
@pytest.mark.parametrize(("huge", "grain"), [(None, PAGE), ("thp", UNIT), ("2M", UNIT)])
@pytest.mark.parametrize("source", [0, 1])
def test_moving_to_an_interleave_redistributes_pages_of_its_own_nodes(
    source: int, huge: str | None, grain: int
) -> None:
    region = allocate(4 * UNIT, Node(source), huge=huge)

    move_region(region, 0, 4 * UNIT, Interleave([0, 1]))

    assert where(region).nbytes == {0: 2 * UNIT, 1: 2 * UNIT}
    first = [residency(region.address + i * grain, grain).pages for i in range(4)]
    assert [set(pages) for pages in first] in ([{0}, {1}] * 2, [{1}, {0}] * 2)


def test_moving_to_an_interleave_of_other_nodes_distributes_pages() -> None:
    region = allocate(UNIT, Node(0), huge=None)

    move_region(region, 0, UNIT, Interleave([1, FAR]))

    assert where(region).nbytes == {1: UNIT // 2, FAR: UNIT // 2}


@pytest.mark.parametrize("huge", [None, "thp"])
def test_an_untouched_range_moved_to_a_stripe_is_placed_unit_by_unit(huge: str | None) -> None:
    region = allocate(4 * UNIT, Node(1), prefault=False, huge=huge)

    move_region(region, 0, 4 * UNIT, Stripe([1, FAR]))
    assert where(region).unmapped == 4 * UNIT // PAGE
    memoryview(_native.Block(region))[:] = bytes(4 * UNIT)

    units = [residency(region.address + i * UNIT, UNIT).pages for i in range(4)]
    assert units == [{1: UNIT // PAGE}, {FAR: UNIT // PAGE}] * 2


class Foreign:
    """Anonymous memory mapped by Python on node 0, starting in the middle of a huge page."""

    def __init__(self, nbytes: int, advice: int) -> None:
        self._map = mmap.mmap(-1, nbytes + UNIT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(advice)
        self._map[:] = b"\x07" * len(self._map)
        self._whole = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address, self.nbytes = self._whole + 3 * PAGE, nbytes

    def huge_bytes(self) -> int:
        smaps = Path("/proc/self/smaps").read_text()
        entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.M)[1:]
        for entry in entries:
            low, high = (int(text, 16) for text in entry.split(maxsplit=1)[0].split("-"))
            if low <= self.address < high:
                return int(re.search(r"AnonHugePages:\s+(\d+)", entry)[1]) * 1024  # type: ignore[index]
        return 0

    def units(self) -> Iterator[tuple[int, Residency]]:
        """Return the number and the residency of each 2 MiB unit that the range overlaps."""
        end = self.address + self.nbytes
        for unit in range(self.address // UNIT, -(-end // UNIT)):
            low, high = max(unit * UNIT, self.address), min((unit + 1) * UNIT, end)
            yield unit, residency(low, high - low)


@pytest.mark.parametrize("advice", [mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE], ids=["thp", "4k"])
@pytest.mark.parametrize(
    "place",
    [Node(1), Stripe([1, FAR]), Stripe({0: 1, 1: 2}), Interleave([0, 1]), Interleave([1, FAR])],
    ids=repr,
)
def test_memory_of_another_allocator_moves_to_the_requested_place(
    place: Place, advice: int
) -> None:
    memory = Foreign(16 * MiB, advice)
    assert (memory.huge_bytes() > 0) is (advice == mmap.MADV_HUGEPAGE)

    stuck = _native.migrate_pages(memory.address, memory.nbytes, place.native(), 2)

    order = place.pattern if isinstance(place, Stripe) else place.nodes
    assert stuck == 0
    for unit, found in memory.units():
        assert set(found.pages) == {order[unit % len(order)]}, f"unit {unit}"
        assert found.unmapped == 0
    assert ctypes.string_at(memory.address, memory.nbytes) == b"\x07" * memory.nbytes


def test_moving_to_a_full_node_raises_an_error() -> None:
    region = allocate(4 * ROOM, Node(0))
    filler = fill_node_1()

    with pytest.raises(NodeFullError) as caught:
        move_region(region, 0, 4 * ROOM, Node(1))
    assert (caught.value.node, caught.value.wanted) == (1, 4 * ROOM)
    assert caught.value.free < 4 * ROOM
    assert where(region).nbytes == {0: 4 * ROOM}
    del filler

    move_region(region, 0, 4 * ROOM, Node(1))
    assert where(region).nbytes == {1: 4 * ROOM}


def test_moving_to_a_nearly_full_node_needs_memory_only_for_pages_not_on_it() -> None:
    region = allocate(3 * ROOM, Node(0))
    move_region(region, 0, 3 * ROOM - 2 * UNIT, Node(1))
    filler = fill_node_1()

    move_region(filler, 0, filler.nbytes, Node(1))
    move_region(region, 0, 3 * ROOM, Node(1))

    assert set(where(filler).pages) == {1}
    assert where(region).nbytes == {1: 3 * ROOM}


@pytest.mark.usefixtures("pools")
def test_reserved_huge_pages_come_from_the_requested_node() -> None:
    assert where(allocate(2 * UNIT, Node(1), huge="2M")).nbytes == {1: 2 * UNIT}
    assert where(allocate(4 * UNIT, Stripe([0, 1]), huge="2M")).nbytes == {0: 2 * UNIT, 1: 2 * UNIT}

    for place in (Node(FAR), Stripe([0, FAR]), Interleave([1, FAR])):
        with pytest.raises(HugePagesError, match=f"on node {FAR}, 0 free") as caught:
            allocate(4 * UNIT, place, huge="2M")
        wanted = place.shares(4 * UNIT)[FAR] // UNIT
        assert (caught.value.node, caught.value.wanted, caught.value.free) == (FAR, wanted, 0)
