"""Placement conformance: run on one node here, and on three nodes in the VM.

Parametrized over places (conftest) and backings: small, transparent huge and reserved huge pages;
pinned or not; a separate range or a block of an arena.
"""

from __future__ import annotations

import copy
import gc
import io
import mmap
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock import _native
from penstock.machine.sysfs import System
from penstock.memory.placement import Place
from penstock.memory.region import Huge
from penstock.units import MiB
from tests.support.memory_places import places_here

UNIT = _native.UNIT_NBYTES
PAGE = _native.page_nbytes()


@dataclass(frozen=True)
class Backing:
    huge: Huge
    pinned: bool
    arena: bool

    def make(self, numel: int, place: Place | None, dtype: torch.dtype) -> torch.Tensor:
        if not self.arena:
            return ps.empty(numel, dtype=dtype, place=place, pinned=self.pinned, huge=self.huge)
        arena = ps.Arena(numel * dtype.itemsize, place, self.pinned, huge=self.huge)
        return arena.tensor(numel, dtype)


ALL_BACKINGS = [
    Backing(huge, pinned, arena)
    for huge in ("auto", "thp", "2M", None)
    for pinned in (False, True)
    for arena in (False, True)
]
# A smaller set for the emulated guest: every page size, and both values of `pinned` and `arena`.
FEW_BACKINGS = [
    Backing("auto", pinned=False, arena=False),
    Backing("thp", pinned=True, arena=True),
    Backing("2M", pinned=True, arena=False),
    Backing(None, pinned=False, arena=True),
]
BACKINGS = FEW_BACKINGS if "PENSTOCK_VM_MODE" in os.environ else ALL_BACKINGS


@pytest.fixture(params=BACKINGS, ids=repr)
def backing(request: pytest.FixtureRequest) -> Backing:
    backing: Backing = request.param
    if backing.huge == "2M":
        free = System().number("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages") or 0
        if free < 8:
            pytest.skip(f"needs 8 reserved huge pages, {free} free (sysctl vm.nr_hugepages)")
    return backing


def check_shares(tensor: torch.Tensor, place: Place, grain: int) -> None:
    """Check that every page is in memory and every node has its share to within one grain."""
    found = ps.where(tensor)
    assert found.unmapped == 0
    assert set(found.pages) <= set(place.nodes)
    for node, share in place.shares(tensor.nbytes).items():
        assert abs(found.nbytes.get(node, 0) - share) <= grain, f"node {node}: {found}"


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, 3 * UNIT + PAGE + 4], ids=str)
def test_pages_are_on_the_nodes_of_the_place(place: Place, backing: Backing, nbytes: int) -> None:
    tensor = backing.make(nbytes, place, torch.uint8)

    grain = UNIT if backing.huge in ("thp", "2M") or isinstance(place, ps.Stripe) else PAGE
    check_shares(tensor, place, grain)


@pytest.mark.parametrize("stripe", [p for p in places_here() if isinstance(p, ps.Stripe)], ids=repr)
def test_every_unit_of_a_stripe_is_on_its_node(stripe: ps.Stripe, backing: Backing) -> None:
    tensor = backing.make(5 * UNIT, stripe, torch.uint8)

    for unit in range(5):
        piece = tensor[unit * UNIT : (unit + 1) * UNIT]
        node = stripe.pattern[unit % len(stripe.pattern)]
        assert dict(ps.where(piece).pages) == {node: UNIT // PAGE}


def test_a_tensor_wastes_less_than_one_page(place: Place, backing: Backing) -> None:
    tensor = backing.make(MiB + 1, place, torch.uint8)
    region = _native.Region.at(tensor.data_ptr())

    assert region is not None
    grain = UNIT if backing.huge == "2M" else PAGE
    assert region.mapped_nbytes - tensor.nbytes < grain


def test_new_memory_is_zero_and_writable(place: Place, backing: Backing) -> None:
    tensor = backing.make(MiB + 3, place, torch.float32)
    assert torch.count_nonzero(tensor) == 0

    tensor.copy_(torch.arange(tensor.numel()) % 251)

    assert torch.equal(tensor, (torch.arange(tensor.numel()) % 251).float())


def test_memory_is_released_with_the_last_view(place: Place, backing: Backing) -> None:
    tensor = backing.make(4 * MiB, place, torch.uint8)
    address = tensor.data_ptr()
    view = tensor[MiB:].view(-1, 1024)[::3]
    del tensor
    gc.collect()
    assert _native.Region.at(address) is not None

    assert int(view.sum()) == 0
    del view
    gc.collect()

    assert _native.Region.at(address) is None


def test_a_view_may_be_released_in_another_thread(place: Place, backing: Backing) -> None:
    tensors = [backing.make(MiB, place, torch.uint8)]
    address = tensors[0].data_ptr()
    tensors[0].fill_(7)
    seen: list[int] = []

    def use_and_drop() -> None:
        view = tensors.pop()[5:].view(-1)
        seen.append(int(view[0]))

    thread = threading.Thread(target=use_and_drop)
    thread.start()
    thread.join()
    gc.collect()

    assert seen == [7]
    assert _native.Region.at(address) is None


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    loaded: torch.Tensor = torch.load(buffer, weights_only=True)
    return loaded


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),  # type: ignore[no-any-return]
    "torch.save": _saved,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_a_plain_tensor(place: Place, how: str) -> None:
    tensor = ps.full((64, 1024), 3.0, place=place)

    copied = COPIES[how](tensor)

    assert torch.equal(copied, tensor)
    assert _native.Region.at(copied.data_ptr()) is None


def test_moving_keeps_address_contents_and_views(place: Place, backing: Backing) -> None:
    tensor = backing.make(3 * UNIT, ps.Node(System().allowed_nodes()[0]), torch.uint8)
    tensor.copy_(torch.arange(3 * UNIT) % 251)
    view, address = tensor[UNIT:], tensor.data_ptr()

    ps.move(tensor, place)

    assert tensor.data_ptr() == address
    assert torch.equal(view, (torch.arange(UNIT, 3 * UNIT) % 251).to(torch.uint8))
    grain = PAGE if backing.huge is None and not isinstance(place, ps.Stripe) else UNIT
    check_shares(tensor, place, grain)


def other_memory(nbytes: int, advice: int) -> torch.Tensor:
    """Return memory that Penstock did not map, starting in the middle of a huge page."""
    mapped = mmap.mmap(-1, nbytes + UNIT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(advice)
    return torch.frombuffer(mapped, dtype=torch.uint8)[3 * PAGE :][:nbytes]


@pytest.mark.parametrize("advice", [mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE], ids=["thp", "4k"])
def test_memory_of_another_allocator_is_moved(place: Place, advice: int) -> None:
    tensor = other_memory(6 * UNIT, advice).copy_(torch.arange(6 * UNIT) % 251)

    ps.move(tensor, place)

    assert torch.equal(tensor, (torch.arange(6 * UNIT) % 251).to(torch.uint8))
    order = place.pattern if isinstance(place, ps.Stripe) else place.nodes
    for unit in range(tensor.data_ptr() // UNIT + 1, tensor.data_ptr() // UNIT + 6):
        start = unit * UNIT - tensor.data_ptr()
        found = ps.where(tensor[start : start + UNIT])
        assert dict(found.pages) == {order[unit % len(order)]: UNIT // PAGE}


def policy_of(tensor: torch.Tensor) -> str:
    """Return the kernel's memory policy at this address: `default`, `bind:1`, `interleave:0-2`."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        address, policy = line.split()[:2]
        if int(address, 16) == tensor.data_ptr():
            return policy
    raise AssertionError("the tensor has no mapping of its own")


@pytest.mark.skipif(not os.path.exists("/proc/self/numa_maps"), reason="needs numa_maps")
def test_placing_applies_inside_its_block_only(place: Place) -> None:
    def make() -> torch.Tensor:
        return ps.empty(2 * UNIT, dtype=torch.uint8)

    before = make()
    with ps.placing(place):
        inside = make()
        with ps.placing(None):
            without_place = make()
        again = make()
    after = make()

    for tensor in (inside, again):
        assert set(ps.where(tensor).pages) <= set(place.nodes)
        assert policy_of(tensor) == policy_of(ps.empty(2 * UNIT, dtype=torch.uint8, place=place))
        assert policy_of(tensor) != policy_of(before)
    assert policy_of(without_place) == policy_of(after) == policy_of(before)


def test_memory_that_is_not_prefaulted_is_placed_when_it_is_touched(place: Place) -> None:
    tensor = ps.empty(3 * UNIT, dtype=torch.uint8, place=place, prefault=False, huge=None)
    assert ps.where(tensor).unmapped == 3 * UNIT // PAGE

    tensor.fill_(1)

    found = ps.where(tensor)
    assert found.unmapped == 0
    assert set(found.pages) <= set(place.nodes)
