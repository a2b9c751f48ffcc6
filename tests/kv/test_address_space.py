"""Address ranges and pages of every kind of space, and their errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.kv.address_space import HostSpace, Space, find_driver
from penstock.kv.errors import SpaceError
from tests.kv.caches import open_page_files
from tests.kv.fake_cuda_driver import PAGE, Driver, DriverSpace
from tests.support.gpu_memory import counted_pages


def test_a_page_can_be_mapped_at_two_addresses(space: Space) -> None:
    unit = space.page_nbytes
    at = space.reserve(4)
    page = space.create()
    both = space.bytes_at(at, 4 * unit)
    space.map(at, [page])
    space.map(at + 2 * unit, [page])

    both[:unit].fill_(7)

    assert both[2 * unit : 3 * unit].eq(7).all()
    free(space, at, 4, [0, 2], [page])


def test_bytes_move_with_their_page(space: Space) -> None:
    unit = space.page_nbytes
    at = space.reserve(4)
    pages = [space.create(), space.create()]
    view = space.bytes_at(at, 4 * unit)
    space.map(at, pages)
    view[:unit].fill_(1)
    view[unit : 2 * unit].fill_(2)

    space.synchronize()
    space.unmap(at, 2)
    space.map(at + 2 * unit, pages[::-1])

    assert view[2 * unit : 3 * unit].eq(2).all()
    assert view[3 * unit :].eq(1).all()
    free(space, at, 4, [2, 3], pages)


def test_a_tensor_can_span_a_range_with_one_mapped_page(space: Space) -> None:
    """torch must not touch the memory: most of it is not mapped."""
    unit = space.page_nbytes
    at = space.reserve(1024)
    page = space.create()
    space.map(at + 512 * unit, [page])

    view = space.bytes_at(at, 1024 * unit).view(torch.bfloat16).view(64, -1)
    view[32, : unit // 2].fill_(3)

    assert view.device.type == space.device.type
    assert view[32, : unit // 2].eq(3).all()
    free(space, at, 1024, [512], [page])


def free(space: Space, at: int, count: int, mapped: list[int], pages: list[int]) -> None:
    space.synchronize()
    for position in mapped:
        space.unmap(at + position * space.page_nbytes, 1)
    for page in pages:
        space.destroy(page)
    space.release(at, count)


TOUCH = """
import ctypes, os, resource
from penstock import _native
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
fd = _native.open_pages("touched")
_native.extend_pages(fd, 8192)
at = _native.reserve_range(4 * 4096, 4096)
_native.map_pages(at, 4096, fd, 0, True)
_native.map_pages(at + 8192, 4096, fd, 4096, False)
byte = lambda offset: ctypes.c_ubyte.from_address(at + offset)
touches = {
    "read mapped": lambda: byte(0).value,
    "write mapped": lambda: setattr(byte(0), "value", 1),
    "read past it": lambda: byte(4096).value,
    "write past it": lambda: setattr(byte(4096), "value", 1),
    "read blank": lambda: byte(8192).value,
    "write blank": lambda: setattr(byte(8192), "value", 1),
}
for name, touch in touches.items():
    if (child := os.fork()) == 0:
        touch()
        os._exit(0)
    print(name, os.waitpid(child, 0)[1])
"""


def test_touching_an_unmapped_address_faults() -> None:
    ended = subprocess.run([sys.executable, "-c", TOUCH], capture_output=True, check=True)

    fault = signal.SIGSEGV.value
    assert ended.stdout.decode().splitlines() == [
        "read mapped 0",
        "write mapped 0",
        f"read past it {fault}",
        f"write past it {fault}",
        "read blank 0",
        f"write blank {fault}",
    ]


def test_a_destroyed_page_costs_no_memory() -> None:
    space = HostSpace(64 * 1024)
    pages = [space.create() for _ in range(8)]
    assert _file_bytes() == 8 * 64 * 1024

    for page in pages[:5]:
        space.destroy(page)

    assert _file_bytes() == 3 * 64 * 1024
    assert [space.create() for _ in range(5)] == pages[4::-1]
    space.close()


def test_a_closed_space_leaves_no_mapping_and_no_file() -> None:
    space = HostSpace(PAGE)
    at = space.reserve(8)
    space.map(at, [space.create(), space.create()])
    assert "penstock-kv" in Path("/proc/self/maps").read_text()

    space.unmap(at, 2)
    space.release(at, 8)
    space.close()

    assert "penstock-kv" not in Path("/proc/self/maps").read_text()
    assert open_page_files() == []
    with pytest.raises(SpaceError, match="it is closed; create a new cache"):
        space.create()


def _file_bytes() -> int:
    return sum(os.stat(path).st_blocks * 512 for path in open_page_files())


def fail_at(call: str, time: int) -> Callable[[str], bool]:
    seen: list[str] = []

    def fails(name: str) -> bool:
        seen.append(name)
        return name == call and seen.count(call) == time

    return fails


@pytest.mark.parametrize(
    ("call", "time"), [("cuMemMap", 1), ("cuMemMap", 3), ("cuMemSetAccess", 1)]
)
def test_a_failed_map_leaves_nothing_mapped(call: str, time: int) -> None:
    space = DriverSpace()
    at = space.reserve(4)
    pages = [space.create() for _ in range(4)]
    space.driver.fail = fail_at(call, time)

    with pytest.raises(SpaceError, match=f"^{call}: error 1; ") as caught:
        space.map(at, pages)

    assert caught.value.call == call
    assert space.driver.mapped == {}
    space.map(at, pages)  # works afterwards
    space.close()


def test_creating_a_page_empties_torchs_cache_before_it_fails() -> None:
    space = DriverSpace(Driver(pages=1))
    space.create()

    with pytest.raises(SpaceError, match="cuMemCreate: error 2; the GPU has no memory left"):
        space.create()
    assert space.emptied == 1
    space.close()


def test_adjacent_pages_get_access_in_one_call() -> None:
    space = DriverSpace()
    at = space.reserve(16)
    space.map(at, [space.create() for _ in range(16)])

    assert space.driver.calls.count("cuMemMap") == 16
    assert space.driver.calls.count("cuMemSetAccess") == 1
    space.close()


def test_a_gpu_without_virtual_memory_is_refused() -> None:
    with pytest.raises(
        SpaceError, match="GPU 0 does not support virtual memory management; use one"
    ):
        DriverSpace(Driver(supported=0))


def test_a_missing_driver_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)

    with pytest.raises(SpaceError, match=r"pip install 'penstock\[cuda\]'"):
        find_driver()


@pytest.mark.parametrize("make", [HostSpace, lambda n: DriverSpace(page_nbytes=n)])
def test_a_page_size_that_cannot_be_mapped_is_refused(make: Callable[[int], Space]) -> None:
    with pytest.raises(SpaceError, match=r"6000 is not a multiple of the .* 4096"):
        make(6000)


def test_a_counted_page_exists_until_it_is_released_and_unmapped() -> None:
    """The measure that the GPU tests of leaks use."""
    with counted_pages() as pages:
        space = DriverSpace()
        at = space.reserve(4)
        first, second = space.create(), space.create()
        assert pages.nbytes == 2 * space.page_nbytes
        space.map(at, [first, second])
        space.map(at + 2 * space.page_nbytes, [first])
        space.unmap(at, 2)
        space.destroy(second)
        assert pages.nbytes == space.page_nbytes
        pages.count("cuMemRelease", (first,), None)  # the stand-in refuses it while it is mapped
        assert pages.nbytes == space.page_nbytes
        space.unmap(at + 2 * space.page_nbytes, 1)
        assert pages.nbytes == 0
        space.destroy(first)
        space.close()
