"""What the engine takes is what the plan says, to the byte, tier by tier; and a step takes none."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.memory_usage import MemoryUsage, memory_usages
from penstock.memory.arena import Arena
from penstock.plan.buffers import hidden_nbytes, micro_nbytes, round_micro_batches
from penstock.storage.store import Store
from penstock.tiers import Tier
from penstock.units import KiB, MiB
from tests.equivalence.runs import DISK, DRAM, RESIDENT, WAYS, Setup, Way


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Counting:
    """Everything that is taken from the host and its disks, as it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: Counter[str] = Counter()
        make_arena, make_store = Arena.__init__, Store.create

        def arena(this: Arena, nbytes: int, *args: Any, **kwargs: Any) -> None:
            make_arena(this, nbytes, *args, **kwargs)
            self.taken["host"] += nbytes

        def store(paths: Any, capacity: int, **kwargs: Any) -> Store:
            self.taken["disk"] += capacity
            return make_store(paths, capacity, **kwargs)

        monkeypatch.setattr(Arena, "__init__", arena)
        monkeypatch.setattr(Store, "create", store)


GRID = [
    *((way, {}) for way in WAYS),
    (DISK, {"moments": "int8"}),
    (DISK, {"moments": "bf16", "dtype": "fp16"}),
    (WAYS[3], {"moments": "int8"}),
    (WAYS[8], {"accumulate": True}),
]


@pytest.mark.parametrize(
    ("way", "work"), GRID, ids=[f"{way.name} {' '.join(map(str, w.values()))}" for way, w in GRID]
)
def test_what_is_taken_is_what_was_planned(
    way: Way, work: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup.of("llama", **work)
    plan = setup.plan(way, tmp_path)
    counting = Counting(monkeypatch)
    with setup.engine(way, tmp_path) as engine:
        host, disk = counting.taken["host"], counting.taken["disk"]
        device = engine.device.peak_nbytes()
        engine.step(setup.batches(1)[0])
        engine.step(setup.batches(1)[0])
        engine.evaluate(setup.batches(1))
        engine.finish()

        assert host == plan.peak(Tier.DRAM) + plan.peak(Tier.CXL)
        assert disk == plan.peak(Tier.NVME)
        # What torch takes for itself while it computes is planned too, but not taken beforehand.
        pools = {pool.what: pool.nbytes for pool in plan.pools}
        later = pools["working memory"] + pools["allocator slack"] + token_nbytes(setup, plan)
        assert device == plan.peak(Tier.HBM) - later
        assert counting.taken == Counter(host=host, disk=disk), "a step took more"
        assert engine.device.peak_nbytes() == device, "a step took more"


@pytest.mark.parametrize("way", [RESIDENT, DRAM, DISK, WAYS[3]], ids=lambda way: way.name)
def test_an_engine_says_what_it_really_holds_as_long_as_it_does(way: Way, tmp_path: Path) -> None:
    setup = Setup.of("llama")
    with setup.engine(way, tmp_path) as engine:
        (held,) = (own for own in memory_usages() if own is engine._memory.tiers.usage)
        outside = {tier: engine.plan.peak(tier) for tier in Tier if tier is not Tier.HBM}

        assert dict(held.tiers) == {tier: nbytes for tier, nbytes in outside.items() if nbytes}
        assert (held.pinned, held.gpu) == (0, None)  # no GPU, nothing registered
    assert not held.tiers
    gone = weakref.ref(held)
    del held, engine
    gc.collect()
    assert gone() is None


def test_a_striped_arena_is_dealt_over_its_tiers() -> None:
    held = MemoryUsage(torch.device("cpu"))
    held.add_arena(Arena(4 * MiB), {Tier.DRAM: 3, Tier.CXL: 1})
    held.add_arena(Arena(1 * MiB), {Tier.DRAM: 1 * MiB})

    assert held.tiers == {Tier.DRAM: 4 * MiB, Tier.CXL: 1 * MiB}


def token_nbytes(setup: Setup, plan: Any) -> int:
    """Ids and labels, which come with the batch."""
    rounds = plan.placement.rounds
    ring = (round_micro_batches(setup.work, rounds) + 2) * micro_nbytes(setup.model, setup.work)
    return hidden_nbytes(setup.model, setup.work, rounds) - ring


def test_the_store_holds_what_the_plan_says_and_is_full(tmp_path: Path) -> None:
    setup = Setup.of("llama")
    with setup.engine(DISK, tmp_path) as engine:
        (data,) = (path for path in tmp_path.rglob("*") if path.is_file())
        stats = engine._memory.store.stats
        planned = engine.plan.peak(Tier.NVME)

        assert stats.capacity == stats.used == planned
        assert planned <= os.stat(data).st_blocks * 512 <= planned + 2 * MiB  # and its header


WARM, STEPS = 4, 20
GROWTH = 128 * KiB
"""What malloc may have handed out more after 20 steps: dictionaries that find their size, some
48 KiB and then 2 KiB for every 20 steps more. The smallest role of a layer here is 400 KiB."""
PEAK_GROWTH = 2 * MiB
"""What the most ever held may rise by: gaps between torch's temporaries, seen up to 0.5 MiB. All
that rests for this model is 14 MiB, and a layer of it 3 MiB."""


@pytest.mark.parametrize("way", [RESIDENT, DRAM, DISK], ids=lambda way: way.name)
def test_steps_after_the_first_take_no_host_memory(way: Way, tmp_path: Path) -> None:
    """The most that was ever in use does not rise, nor what is in use between steps."""
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
    """The most physical memory this process has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KiB
    pytest.skip("needs VmHWM in /proc/self/status")


class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
                 "fordblks", "keepcost")]  # fmt: skip


def in_use_nbytes() -> int:
    """What malloc has handed out, torch's tensors included."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("needs mallinfo2, of glibc 2.33")
    ask.restype = MallInfo
    found = ask()
    return int(found.uordblks + found.hblkhd)
