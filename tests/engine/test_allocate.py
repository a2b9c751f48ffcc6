"""The engine allocates what the plan says, to the byte, in every tier; a step allocates nothing."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.tier_memory import StoreSettings
from penstock.memory.arena import Arena
from penstock.memory.placement import Node
from penstock.plan.budget import PathBudget
from penstock.plan.placement import Home, Share
from penstock.storage.store import Store
from penstock.tiers import Tier
from penstock.units import GiB, KiB, MiB
from tests.equivalence.runs import ATTENDED, DISK, DRAM, FEW, HYBRID, RESIDENT, WAYS, Setup, Way
from tests.support import engines


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class AllocationCounter:
    """Counts the bytes allocated from host memory and from disks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated: Counter[str] = Counter()
        make_arena, make_store = Arena.__init__, Store.create

        def arena(this: Arena, nbytes: int, *args: Any, **kwargs: Any) -> None:
            make_arena(this, nbytes, *args, **kwargs)
            self.allocated["host"] += nbytes

        def store(paths: Any, capacity: int, **kwargs: Any) -> Store:
            self.allocated["disk"] += capacity
            return make_store(paths, capacity, **kwargs)

        monkeypatch.setattr(Arena, "__init__", arena)
        monkeypatch.setattr(Store, "create", store)


def test_the_store_is_on_the_drives_of_the_placement_with_their_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on those of the budget: the plan may leave a drive out, and stripes follow speed."""
    names = ("slow", "unused", "fast")
    paths = [str(tmp_path / name) for name in names]
    for path in paths:
        Path(path).mkdir()
    setup = Setup.of("llama")
    plan = setup.plan(DISK, tmp_path)

    def over_two_drives(home: Home) -> Home:
        part = home.nbytes // 4
        sizes = {paths[0]: part, paths[2]: home.nbytes - part}
        return replace(home, shares=tuple(
            Share(tier=Tier.NVME, nbytes=nbytes, path=path) for path, nbytes in sizes.items()
        ))  # fmt: skip

    blocks = tuple(
        replace(block, homes=tuple(map(over_two_drives, block.homes)))
        for block in plan.placement.blocks
    )
    limits = tuple(PathBudget(path=path, nbytes=GiB) for path in paths)
    plan = replace(
        plan,
        placement=replace(plan.placement, blocks=blocks),
        budget=replace(plan.budget, nvme=limits),
    )
    created: list[tuple[list[str], Any]] = []
    make_store = Store.create

    def create(where: Any, capacity: int, **kwargs: Any) -> Store:
        created.append((list(where), kwargs["options"].weights))
        return make_store(where, capacity, **kwargs)

    monkeypatch.setattr(Store, "create", create)

    with engines.make_engine(setup.config, plan, setup.model, setup.source):
        pass

    ((used, weights),) = created
    assert used == [paths[0], paths[2]]
    assert weights[1] / weights[0] == pytest.approx(3, rel=0.01)


def test_staging_is_on_the_node_that_the_plan_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that stores nothing in DRAM names a node too: the OS decides nothing."""
    places: list[object] = []
    make_arena = Arena.__init__

    def arena(this: Arena, nbytes: int, place: Any = None, *args: Any, **kwargs: Any) -> None:
        places.append(place)
        make_arena(this, nbytes, place, *args, **kwargs)

    monkeypatch.setattr(Arena, "__init__", arena)
    setup = Setup.of("llama")
    node = setup.plan(DISK, tmp_path).placement.staging_node
    with setup.engine(DISK, tmp_path):
        pass

    assert node is not None
    assert places == [Node(node)]


GRID = [
    *((way, {}) for way in WAYS),
    (WAYS[3], {"moments": "int8"}),
    (DISK, {"moments": "bf16", "dtype": "fp16"}),
    (WAYS[8], {"dtype": "fp32", "accumulate": True}),
    (HYBRID[2], {"moments": "int8"}),
    *((way, {"attention": "varlen"}) for way in (*ATTENDED[:3], ATTENDED[4])),
]
MANY = [
    (DISK, {"moments": "int8"}),
    (WAYS[8], {"accumulate": True}),
    *((way, {"dtype": "fp32"}) for way in (*FEW, DISK)),
    (DISK, {"dtype": "fp32", "moments": "int8"}),
]


@pytest.mark.parametrize(
    ("way", "work"),
    [*GRID, *(pytest.param(way, work, marks=pytest.mark.long) for way, work in MANY)],
    ids=[f"{way.name} {' '.join(map(str, work.values()))}" for way, work in (*GRID, *MANY)],
)
def test_the_engine_allocates_what_was_planned(
    way: Way, work: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup.of("llama", **work)
    plan = setup.plan(way, tmp_path)
    counter = AllocationCounter(monkeypatch)
    with setup.engine(way, tmp_path) as engine:
        host, disk = counter.allocated["host"], counter.allocated["disk"]
        device = engine.device.memory().allocated
        engine.step(setup.batches(1)[0])
        engine.step(setup.batches(1)[0])
        engine.evaluate(setup.batches(1))
        engine.finish()

        assert host == plan.peak(Tier.DRAM) + plan.peak(Tier.CXL)
        assert disk == plan.peak(Tier.NVME)
        # The plan also counts what torch allocates while it computes; that comes later.
        pools = {pool.what: pool.nbytes for pool in plan.pools}
        later = ("batch and layer arguments", "working memory")
        assert device == plan.peak(Tier.HBM) - sum(pools[name] for name in later)
        assert counter.allocated == Counter(host=host, disk=disk), "a step allocated memory"
        assert engine.device.memory().allocated == device, "a step allocated memory"


WARM, STEPS = 4, 20
GROWTH = 128 * KiB
"""Allowed growth of malloc's memory in use over 20 steps.

Dictionaries that reach their final size account for about 48 KiB, and then for 2 KiB per 20 steps.
The smallest role of a layer of this model is 400 KiB."""
PEAK_GROWTH = 2 * MiB
"""Allowed growth of the peak of physical memory over 20 steps.

Gaps between torch's temporary tensors have caused up to 0.5 MiB. The whole state of this model is
14 MiB, that of one layer 3 MiB."""


@pytest.mark.parametrize("way", [RESIDENT, DRAM, DISK], ids=lambda way: way.name)
def test_later_steps_allocate_no_host_memory(way: Way, tmp_path: Path) -> None:
    """Neither the peak nor the memory in use between steps grows."""
    config = {"hidden_size": 128, "intermediate_size": 320, "vocab_size": 1000, "head_dim": 32}
    setup = Setup.of("llama", config=config, batch=2, micro_batch=1)
    batches = setup.batches(4)
    with setup.engine(way, tmp_path) as engine:
        for number in range(WARM):
            engine.step(batches[number % 4])
        peak, used = peak_nbytes(), in_use_nbytes()
        for number in range(STEPS):
            engine.step(batches[number % 4])

        assert in_use_nbytes() - used <= GROWTH
        assert peak_nbytes() - peak <= PEAK_GROWTH


def peak_nbytes() -> int:
    """Return the peak of this process's physical memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KiB
    pytest.skip("needs VmHWM in /proc/self/status")


class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
                 "fordblks", "keepcost")]  # fmt: skip


def in_use_nbytes() -> int:
    """Return the memory in use from malloc, torch's tensors included."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("needs mallinfo2 (glibc 2.33)")
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def test_a_device_that_holds_data_is_not_erased_by_default() -> None:
    assert StoreSettings().erase is False
