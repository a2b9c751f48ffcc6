"""Residency: both ways to ask the kernel agree, and refusals are explained."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import _native
from penstock.errors import PlacementPermissionError
from penstock.machine.sysfs import System
from penstock.memory import residency as module
from penstock.memory.placement import Node
from penstock.memory.region import RegionOptions, allocate_region
from penstock.memory.residency import Residency, residency
from tests.faults.refuse import SYSCALLS

NODE = System().allowed_nodes()[0]
PAGE = _native.page_nbytes()
BASE = 0x7F0000000000
PER_UNIT = _native.UNIT_NBYTES // PAGE

needs_4k = pytest.mark.skipif(PAGE != 4096, reason="the listings are of 4 KiB pages")


def allocate(nbytes: int, **options: object) -> _native.Region:
    return allocate_region(nbytes, Node(NODE), RegionOptions(huge=None, **options))  # type: ignore[arg-type]


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use numa_maps whenever it has the answer."""
    monkeypatch.setattr(module, "_walk_is_cheaper", lambda *_: True)


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the queries to `move_pages`."""
    recorded: list[tuple[int, int]] = []
    real = _native.count_pages

    def count(address: int, nbytes: int, threads: int) -> dict[int, int]:
        recorded.append((address, nbytes))
        return real(address, nbytes, threads)

    monkeypatch.setattr(_native, "count_pages", count)
    return recorded


def write_proc_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mappings: list[str], numa: list[str]
) -> None:
    (tmp_path / "maps").write_text("".join(f"{line} rw-p 0 00:00 0\n" for line in mappings))
    (tmp_path / "numa_maps").write_text("".join(f"{line}\n" for line in numa))
    monkeypatch.setattr(module, "_MAPS", str(tmp_path / "maps"))
    monkeypatch.setattr(module, "_NUMA_MAPS", str(tmp_path / "numa_maps"))


def test_a_residency_is_shown_in_bytes() -> None:
    counted = Residency(pages={0: 3, 2: 512}, unmapped=1, page_nbytes=4096)

    assert counted.nbytes == {0: 3 * 4096, 2: 512 * 4096}
    assert str(counted) == "node 0: 12.0 KiB, node 2: 2.00 MiB, not in memory: 4.00 KiB"
    assert str(Residency(pages={1: 1}, unmapped=0, page_nbytes=4096)) == "node 1: 4.00 KiB"


def test_every_page_that_the_range_touches_counts() -> None:
    region = allocate(8 * PAGE)

    assert residency(region.address, 1).pages == {NODE: 1}
    assert residency(region.address + PAGE - 1, 2).pages == {NODE: 2}
    assert residency(region.address + 1, 8 * PAGE - 1).pages == {NODE: 8}


def test_pages_that_were_never_touched_are_unmapped() -> None:
    region = allocate(8 * PAGE, prefault=False)
    memoryview(_native.Block(region))[3 * PAGE] = 1

    assert residency(region.address, 8 * PAGE) == Residency(pages={NODE: 1}, unmapped=7)


def test_both_ways_agree(monkeypatch: pytest.MonkeyPatch, queries: list[tuple[int, int]]) -> None:
    region = allocate(64 * PAGE, prefault=False)
    memoryview(_native.Block(region))[PAGE : 30 * PAGE] = bytes(29 * PAGE)
    answers = []
    for walking in (True, False):
        monkeypatch.setattr(module, "_walk_is_cheaper", lambda *_, way=walking: way)
        answers.append(residency(region.address, 64 * PAGE))

    assert answers == [Residency(pages={NODE: 29}, unmapped=35)] * 2
    assert queries == [(region.address, 64 * PAGE)]


@needs_4k
@pytest.mark.usefixtures("walk")
def test_huge_pages_are_counted_as_small_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_proc_files(
        monkeypatch,
        tmp_path,
        [f"{BASE:x}-{BASE + 0x600000:x}", f"{BASE + 0x600000:x}-{BASE + 0x605000:x}"],
        [
            f"{BASE:x} bind:1-2 file=/anon_hugepage huge dirty=3 N1=2 N2=1 kernelpagesize_kB=2048",
            f"{BASE + 0x600000:x} bind:1 anon=4 dirty=4 N1=4 kernelpagesize_kB=4",
            f"{BASE + 0x900000:x} default anon=9 N0=9 kernelpagesize_kB=4",
        ],
    )

    found = residency(BASE, 0x605000)

    assert found == Residency(pages={1: 2 * PER_UNIT + 4, 2: PER_UNIT}, unmapped=1)


@needs_4k
@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("reach", [(-0x1000, 0), (0, 0x1000)], ids=["before", "after"])
def test_a_mapping_that_extends_beyond_the_range_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reach: tuple[int, int]
) -> None:
    low, high = BASE + reach[0], BASE + 0x4000 + reach[1]
    write_proc_files(monkeypatch, tmp_path, [f"{low:x}-{high:x}"], [f"{low:x} default N0=5"])
    monkeypatch.setattr(_native, "count_pages", lambda *_: {3: 4})

    assert residency(BASE, 0x4000).pages == {3: 4}


@needs_4k
@pytest.mark.usefixtures("walk")
def test_without_numa_maps_the_pages_are_queried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_proc_files(monkeypatch, tmp_path, [f"{BASE:x}-{BASE + 0x4000:x}"], [])
    (tmp_path / "numa_maps").unlink()
    monkeypatch.setattr(_native, "count_pages", lambda *_: {0: 1, -1: 3})

    assert residency(BASE, 0x4000) == Residency(pages={0: 1}, unmapped=3)


def test_small_ranges_are_queried_and_large_ones_read_from_numa_maps(
    queries: list[tuple[int, int]],
) -> None:
    region = allocate(4 * PAGE)
    residency(region.address, PAGE)
    assert queries == [(region.address, PAGE)]
    queries.clear()

    resident = int(Path("/proc/self/statm").read_text().split()[1])
    large = allocate(max(resident, 1) * PAGE, prefault=False)
    assert residency(large.address, large.nbytes).unmapped == resident

    assert queries == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES])
def test_a_refusal_names_the_system_call_and_gives_advice(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> dict[int, int]:
        raise OSError(code, f"move_pages: {os.strerror(code)}")

    monkeypatch.setattr(_native, "count_pages", refuse)
    region = allocate(4 * PAGE)

    with pytest.raises(PlacementPermissionError, match="move_pages is not permitted") as caught:
        residency(region.address, PAGE)

    assert caught.value.errno == code
    assert "SYS_NICE" in str(caught.value)


@pytest.mark.skipif(not SYSCALLS, reason="no system call numbers for this processor")
def test_a_system_call_refused_by_seccomp_is_named() -> None:
    code = """if True:
        from penstock.errors import PlacementPermissionError
        from penstock.memory.arena import Arena
        from penstock.memory.residency import residency
        from tests.faults.refuse import refuse
        arena = Arena(1 << 16)
        refuse("move_pages")
        try:
            residency(arena.address, 4096)
        except PlacementPermissionError as error:
            assert error.call == "move_pages", error.call
            raise SystemExit(42)
    """
    repo = Path(__file__).parents[2]

    run = subprocess.run(
        [sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=False
    )

    assert run.returncode == 42, run.stderr
