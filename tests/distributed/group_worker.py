"""One rank that joins its group, leaves it and exits: `python -m tests.distributed.group_worker`.

With the argument `added`, the script has initialized torch.distributed before.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from penstock.distributed.rank_group import open_rank_group
from penstock.rank_place import RankPlace

SECONDS = 5.0
"""How long a thread that has been joined may still be listed by the kernel."""


def all_threads() -> set[str]:
    """Return the IDs of the threads of this process."""
    return {thread.name for thread in Path("/proc/self/task").iterdir()}


def gloo_threads(before: set[str]) -> set[str]:
    """Return the IDs of the threads that gloo has started since.

    A thread sets its own name, so that one that has just been started may not have it yet.
    """
    found = set()
    for thread in all_threads() - before:
        with contextlib.suppress(OSError):  # the thread has just ended
            if "gloo" in Path(f"/proc/self/task/{thread}/comm").read_text():
                found.add(thread)
    return found


def main(*, added: bool) -> None:
    if added:
        dist.init_process_group("gloo")
    before = all_threads()
    place = RankPlace.of()
    assert place is not None
    group = open_rank_group(place, on_cpu=True)
    group.transport.meet(b"message")
    assert gloo_threads(before), "threads of gloo have another name: change this test"
    group.close()
    deadline = time.monotonic() + SECONDS
    while (left := gloo_threads(before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"{len(left)} threads of gloo continue after the group was closed"
    assert dist.is_initialized() == added
    # `group` exists until here: a thread must end with `close`, not with the last reference.
    assert group.world == place.world


if __name__ == "__main__":
    # The process exits as Python does. os._exit would hide threads that use Python.
    main(added="added" in sys.argv)
    print(f"rank {os.environ['RANK']} has left", flush=True)
