"""Migrating part of a range: the free memory it needs, and its errors."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from penstock import _native
from penstock.errors import (
    ForbiddenNodeError,
    MoveError,
    NodeFullError,
    PenstockError,
    PinError,
    PlacementPermissionError,
    UnknownNodeError,
)
from penstock.memory import region as module
from penstock.memory.placement import Interleave, Node, Place, Stripe
from penstock.memory.region import move_region
from penstock.memory.residency import Residency
from penstock.units import MiB
from tests.support.fake_native import FakeRegion, control_group, three_nodes

PAGE = _native.page_nbytes()


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> FakeRegion:
    """A range of 64 MiB whose pages are all on node 0."""

    def on_node_0(address: int, nbytes: int) -> Residency:
        return Residency(pages={0: nbytes // PAGE}, unmapped=0)

    monkeypatch.setattr(module, "residency", on_node_0)
    FakeRegion.calls, FakeRegion.failure = [], None
    return FakeRegion(nbytes=64 * MiB)


def test_only_the_given_part_is_moved(tmp_path: Path, region: FakeRegion) -> None:
    move_region(region, 3 * PAGE, 5 * PAGE, Stripe([1, 2]), three_nodes(tmp_path))

    call = region.calls[-1]
    assert (call["offset"], call["nbytes"]) == (3 * PAGE, 5 * PAGE)
    assert isinstance(call["to"], _native.Placement)


def test_moving_ignores_the_limit_of_the_control_group(tmp_path: Path, region: FakeRegion) -> None:
    move_region(region, 0, 64 * MiB, Node(1), three_nodes(tmp_path, control_group(MiB)))

    assert len(region.calls) == 2


def test_pages_that_are_not_in_memory_need_no_room(
    tmp_path: Path, region: FakeRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    untouched = Residency(pages={}, unmapped=64 * MiB // PAGE)
    monkeypatch.setattr(module, "residency", lambda address, nbytes: untouched)

    move_region(region, 0, 64 * MiB, Node(1), three_nodes(tmp_path, free={0: 0, 1: 0}))

    assert region.calls[-1]["nbytes"] == 64 * MiB


def test_pages_on_the_target_node_need_no_room(tmp_path: Path, region: FakeRegion) -> None:
    system = three_nodes(tmp_path, free={0: 10 * MiB, 1: (64 + 32) * MiB})

    move_region(region, 0, 64 * MiB, Node(0), system)
    move_region(region, 0, 64 * MiB, Interleave([0, 1]), system)

    assert len(region.calls) == 3


@pytest.mark.parametrize(
    ("place", "wanted"),
    [(Node(1), 64 * MiB), (Interleave([0, 1]), 32 * MiB), (Stripe({0: 3, 1: 1}), 16 * MiB)],
    ids=repr,
)
def test_a_full_target_reports_how_much_was_needed_and_free(
    tmp_path: Path, region: FakeRegion, place: Place, wanted: int
) -> None:
    with pytest.raises(NodeFullError) as caught:
        move_region(region, 0, 64 * MiB, place, three_nodes(tmp_path, free={1: (64 + 8) * MiB}))

    assert (caught.value.node, caught.value.wanted, caught.value.free) == (1, wanted, 8 * MiB)
    assert len(region.calls) == 1, "the pages were moved all the same"


def test_an_unusable_target_is_named(tmp_path: Path, region: FakeRegion) -> None:
    system = three_nodes(tmp_path, {"proc/self/status": "Mems_allowed_list:\t0"})

    with pytest.raises(ForbiddenNodeError, match="node 1"):
        move_region(region, 0, PAGE, Interleave([0, 1]), system)
    with pytest.raises(UnknownNodeError, match="node 7"):
        move_region(region, 0, PAGE, Node(7), system)
    assert len(region.calls) == 1


@pytest.mark.parametrize(
    ("failure", "error", "text"),
    [
        (OSError(errno.EPERM, "mbind: no"), PlacementPermissionError, "mbind is not permitted"),
        (OSError(errno.EACCES, "mbind: no"), PlacementPermissionError, "SYS_NICE"),
        (OSError(errno.EIO, "mbind: no"), MoveError, "1.00 MiB: some pages cannot move"),
        (OSError(errno.ENOMEM, "mbind: no"), MoveError, "1.00 MiB: .*out of memory"),
        (OSError(errno.EINVAL, "mbind: odd"), MoveError, "1.00 MiB: mbind: odd"),
    ],
    ids=lambda value: errno.errorcode[value.errno] if isinstance(value, OSError) else "",
)
def test_errors_of_the_kernel_are_explained(
    tmp_path: Path, region: FakeRegion, failure: OSError, error: type[PenstockError], text: str
) -> None:
    FakeRegion.failure = failure

    with pytest.raises(error, match=text):
        move_region(region, 0, MiB, Node(1), three_nodes(tmp_path))


def test_a_failed_registration_after_a_move_raises_a_pin_error(
    tmp_path: Path, region: FakeRegion
) -> None:
    FakeRegion.failure = _native.CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY")

    with pytest.raises(PinError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
        move_region(region, 0, MiB, Node(1), three_nodes(tmp_path))

    assert (caught.value.wanted, caught.value.code) == (64 * MiB, 2)
