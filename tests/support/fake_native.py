"""A simulated machine with three nodes, and a stub of the native core that allocates nothing."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from penstock import _native
from penstock.machine.sysfs import System
from penstock.units import MiB
from tests.support.fake_sysfs import fake_root

NODE_DIR = "sys/devices/system/node"
POOL = "hugepages/hugepages-2048kB/free_hugepages"


class FakeRegion:
    """Records calls of the native core, and raises the failure that a test sets."""

    calls: ClassVar[list[dict[str, object]]]
    failure: ClassVar[Exception | None]
    address = 0x7F0000000000

    def __init__(self, **arguments: object) -> None:
        self.calls.append(arguments)
        self.mapped_nbytes = self.nbytes = arguments["nbytes"]
        if isinstance(self.failure, OSError):
            raise self.failure

    def move(self, offset: int, nbytes: int, to: _native.Placement) -> None:
        self.calls.append({"offset": offset, "nbytes": nbytes, "to": to})
        self._fail()

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure

    lock = register = _fail


def three_nodes(
    root: Path, changes: dict[str, str] | None = None, *, free: dict[int, int] | None = None
) -> System:
    """Return a machine with nodes 0, 1 and 2, and `free` bytes on some of them."""
    files = dict(changes or {})
    for node, nbytes in (free or {}).items():
        text = f"Node {node} MemTotal: 4194304 kB\nNode {node} MemFree: {nbytes // 1024} kB"
        files[f"{NODE_DIR}/node{node}/meminfo"] = text
    return fake_root(root, "numa", changes=files)


def control_group(left: int) -> dict[str, str]:
    """Return the files of a control group of 512 MiB with `left` bytes left."""
    return {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": str(512 * MiB),
        "sys/fs/cgroup/memory.current": str(512 * MiB - left),
    }


def free_huge_pages(free: dict[int, int]) -> dict[str, str]:
    """Return the files for free reserved huge pages on each node."""
    files = {f"{NODE_DIR}/node{node}/{POOL}": str(pages) for node, pages in free.items()}
    return {**files, f"sys/kernel/mm/{POOL}": str(sum(free.values()))}
