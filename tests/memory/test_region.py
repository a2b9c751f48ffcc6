"""Checks before an allocation (free memory, huge pages, limits, CPUs), and their errors.

The machine is a synthetic /sys (`tests.support.fake_sysfs`) and the native core is a stand-in, so
that the tests can use several nodes on any machine.
"""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path

import pytest

from penstock import _native
from penstock.errors import (
    ForbiddenNodeError,
    HugePagesError,
    MapError,
    MemoryLimitError,
    NodeFullError,
    OfflineNodeError,
    PinError,
    SizeError,
    UnknownNodeError,
)
from penstock.machine.sysfs import System
from penstock.memory import region as module
from penstock.memory.arena import Arena
from penstock.memory.placement import Interleave, Node, Place, Stripe, placing
from penstock.memory.region import KEEP_FREE, RegionOptions, allocate_region
from penstock.units import MiB
from tests.support.fake_native import (
    NODE_DIR,
    FakeRegion,
    control_group,
    free_huge_pages,
    three_nodes,
)

PAGE = _native.page_nbytes()
UNIT = _native.UNIT_NBYTES
CUDA_REFUSES = (2, "CUDA_ERROR_OUT_OF_MEMORY")


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> type[FakeRegion]:
    monkeypatch.setattr(_native, "Region", FakeRegion)
    FakeRegion.calls, FakeRegion.failure = [], None
    return FakeRegion


def allocate(nbytes: int, place: Place | None, system: System, **options: object) -> _native.Region:
    return allocate_region(nbytes, place, RegionOptions(**options), system)  # type: ignore[arg-type]


def test_64_mib_of_every_node_are_left_to_the_kernel(
    tmp_path: Path, native: type[FakeRegion]
) -> None:
    system = three_nodes(tmp_path, free={1: 74 * MiB, 2: 96 * MiB})
    allocate(10 * MiB, Node(1), system)

    with pytest.raises(NodeFullError) as caught:
        allocate(10 * MiB + 1, Node(1), system)

    assert 64 * MiB == KEEP_FREE
    assert (caught.value.node, caught.value.wanted) == (1, 10 * MiB + PAGE)
    assert caught.value.free == 10 * MiB
    assert caught.value.roomier[2] == 32 * MiB
    assert len(native.calls) == 1


@pytest.mark.parametrize("place", [Stripe({0: 1, 1: 1}), Interleave([0, 1])], ids=repr)
@pytest.mark.usefixtures("native")
def test_each_node_needs_room_for_its_share_only(tmp_path: Path, place: Place) -> None:
    system = three_nodes(tmp_path, free={1: 72 * MiB})
    allocate(16 * MiB, place, system)

    with pytest.raises(NodeFullError) as caught:
        allocate(20 * MiB, place, system)

    assert (caught.value.node, caught.value.wanted, caught.value.free) == (1, 10 * MiB, 8 * MiB)


@pytest.mark.parametrize("place", [None, Node(0)], ids=repr)
@pytest.mark.usefixtures("native")
def test_the_limit_of_a_control_group_is_respected(tmp_path: Path, place: Place | None) -> None:
    system = three_nodes(tmp_path, control_group(100 * MiB))
    allocate(100 * MiB, place, system)

    with pytest.raises(MemoryLimitError) as caught:
        allocate(100 * MiB + 1, place, system)

    error = caught.value
    assert (error.wanted, error.free, error.limit) == (100 * MiB + PAGE, 100 * MiB, 512 * MiB)


@pytest.mark.usefixtures("native")
def test_memory_that_is_not_prefaulted_is_not_checked(tmp_path: Path) -> None:
    system = three_nodes(tmp_path, control_group(MiB), free={1: 65 * MiB})

    assert allocate(300 * MiB, Node(1), system, prefault=False).nbytes == 300 * MiB


def test_a_node_is_unknown_offline_or_forbidden(tmp_path: Path, native: type[FakeRegion]) -> None:
    status = {"proc/self/status": "Mems_allowed_list:\t0,2", f"{NODE_DIR}/possible": "0-3"}
    system = three_nodes(tmp_path, status)
    for node, error in {1: ForbiddenNodeError, 3: OfflineNodeError, 4: UnknownNodeError}.items():
        with pytest.raises(error, match=f"node {node}") as caught:
            allocate(1, Stripe([0, node]), system, prefault=False)
        assert caught.value.node == node  # type: ignore[attr-defined]
    assert native.calls == []


@pytest.mark.usefixtures("native")
def test_a_stripe_that_is_not_prefaulted_uses_at_most_half_the_mappings(tmp_path: Path) -> None:
    system = three_nodes(tmp_path, {"proc/sys/vm/max_map_count": "100"})
    allocate(50 * UNIT, Stripe([0, 1]), system, prefault=False)
    allocate(51 * UNIT, Node(0), system, prefault=False)
    allocate(51 * UNIT, Stripe([0, 1]), system)

    with pytest.raises(MapError, match=r"51 mappings of the 100.*prefault=True, or raise vm.max"):
        allocate(51 * UNIT, Stripe([0, 1]), system, prefault=False)


def test_reserved_pages_are_counted_per_node(tmp_path: Path, native: type[FakeRegion]) -> None:
    system = three_nodes(tmp_path, free_huge_pages({0: 8, 1: 0, 2: 1}))
    allocate(8 * UNIT, Node(0), system, huge="2M")
    allocate(9 * UNIT, None, system, huge="2M")
    stripe = Stripe({0: 2, 2: 1})
    refused: list[tuple[Place | None, int, tuple[int | None, int, int]]] = [
        (Node(1), UNIT + 1, (1, 2, 0)),
        (stripe, 6 * UNIT, (2, 2, 1)),
        (None, 9 * UNIT + 1, (None, 10, 9)),
    ]
    for place, nbytes, expected in refused:
        with pytest.raises(HugePagesError, match="huge='thp'") as caught:
            allocate(nbytes, place, system, huge="2M")
        assert (caught.value.node, caught.value.wanted, caught.value.free) == expected
        assert (f"on node {expected[0]}" in str(caught.value)) is (place is not None)
    assert len(native.calls) == 2


@pytest.mark.parametrize("place", [None, Node(1)], ids=repr)
def test_reserved_pages_need_no_ordinary_memory(
    tmp_path: Path, native: type[FakeRegion], place: Place | None
) -> None:
    full = dict.fromkeys(range(3), 10 * MiB)
    system = three_nodes(
        tmp_path, free_huge_pages({0: 0, 1: 64, 2: 0}) | control_group(MiB), free=full
    )

    allocate(128 * MiB, place, system, huge="2M")

    assert native.calls[0]["huge"] is _native.Huge.reserved


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
def test_a_pool_that_is_empty_by_now_is_reported(
    tmp_path: Path, native: type[FakeRegion], code: int
) -> None:
    native.failure = OSError(code, "madvise(MADV_POPULATE_WRITE): failed")

    with pytest.raises(HugePagesError) as caught:
        allocate(3 * UNIT, None, three_nodes(tmp_path, free_huge_pages({0: 4})), huge="2M")

    assert (caught.value.wanted, caught.value.free) == (3, 4)


@pytest.mark.parametrize("nbytes", [0, -1, 2**63, 2**64, 2**70])
def test_a_range_of_an_impossible_size_is_refused(
    tmp_path: Path, native: type[FakeRegion], nbytes: int
) -> None:
    with pytest.raises(SizeError, match=f"got {nbytes}"):
        allocate(nbytes, Node(0), three_nodes(tmp_path))
    assert native.calls == []


def test_pages_are_huge_except_with_interleave(tmp_path: Path, native: type[FakeRegion]) -> None:
    system = three_nodes(tmp_path)
    for place in (None, Node(0), Stripe([0, 1]), Interleave([0, 1])):
        allocate(PAGE, place, system)
    allocate(PAGE, Interleave([0, 1]), system, huge="thp")
    allocate(PAGE, Node(0), system, huge=None)

    none, transparent = _native.Huge.none, _native.Huge.transparent
    assert [call["huge"] for call in native.calls] == [
        *[transparent] * 3,
        none,
        transparent,
        none,
    ]


def test_an_unknown_page_size_is_refused() -> None:
    with pytest.raises(SizeError, match="got '1G'"):
        RegionOptions(huge="1G")  # type: ignore[arg-type]


def test_the_memory_of_a_node_is_touched_from_its_nearest_cpus(
    tmp_path: Path, native: type[FakeRegion]
) -> None:
    usable = sorted(os.sched_getaffinity(0))
    cpus = {f"{NODE_DIR}/node1/cpulist": str(usable[-1]), f"{NODE_DIR}/node0/cpulist": "9999"}
    system = three_nodes(tmp_path, cpus)
    with placing(Node(2)):  # has no CPUs; those of node 1 are the nearest that may be used
        allocate(PAGE, Stripe([1]), system)
        allocate(PAGE, None, system)
    allocate(PAGE, None, system)

    used = [call["cpus"] for call in native.calls]
    assert used == [
        {1: [usable[-1]], -1: usable},
        {2: [usable[-1]], -1: usable},
        {-1: usable},
    ]


def test_a_failed_registration_raises_a_pin_error(
    tmp_path: Path, native: type[FakeRegion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "cuda_devices", lambda: 1)
    native.failure = _native.CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY")

    with pytest.raises(PinError, match=r"8.00 KiB of host.*CUDA_ERROR_OUT_OF_MEMORY") as caught:
        allocate(2 * 4096, Node(0), three_nodes(tmp_path), pinned=True)

    assert (caught.value.wanted, caught.value.code) == (8192, 2)


def test_a_failure_to_lock_memory_is_warned_about_once_at_the_callers_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: _native.Region) -> None:
        raise OSError(errno.ENOMEM, "mlock: Cannot allocate memory")

    monkeypatch.setattr(_native.Region, "lock", refuse)
    monkeypatch.setattr(_native, "cuda_devices", lambda: 0)
    module._warn_unpinned.cache_clear()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arenas = [Arena(PAGE, pinned=True) for _ in range(3)]

    assert [(Path(w.filename).name, "ulimit -l" in str(w.message)) for w in caught] == [
        (Path(__file__).name, True)
    ]
    assert not any(arena.pinned for arena in arenas)
