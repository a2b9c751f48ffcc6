"""Kills a save with SIGKILL at every call in turn and looks at what is left.

A program of its own: it forks, which a test runner with threads should not. Prints how many kills.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from itertools import count
from pathlib import Path

import torch

from penstock.checkpoint.run_directory import latest_checkpoint, list_checkpoints, remove_leftovers
from tests.checkpoint.saves import acting_at, check_contents, save


def main() -> None:
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    before, out = root / "before", root / "out"
    for step in (1, 2):
        save(before, step)
    seen: list[int] = []
    for number in count(1):
        shutil.copytree(before, out)
        killed = dies(out, number)
        if not killed:
            break
        seen.append(examine(out))
        shutil.rmtree(out)
    assert seen == sorted(seen), f"a later kill lost more: {seen}"
    assert set(seen) == {2, 3}, f"kills left {set(seen)} as the newest"
    print(len(seen))


def dies(out: Path, number: int) -> bool:
    pid = os.fork()
    if pid == 0:
        with acting_at(number, die):
            save(out, 3)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def die(name: str, args: tuple[object, ...]) -> None:
    """A write is torn: half of it has been done."""
    if name == "pwrite":
        fd, data, offset = args
        assert isinstance(fd, int)
        assert isinstance(data, memoryview)
        assert isinstance(offset, int)
        os.pwritev(fd, [data[: len(data) // 2]], offset)
    os.kill(os.getpid(), signal.SIGKILL)


def examine(out: Path) -> int:
    """Whatever the moment: the newest whole one can be resumed from, and the next run cleans up."""
    newest = latest_checkpoint(out)
    assert newest is not None
    assert newest.resumable
    step = newest.step
    for found in list_checkpoints(out).whole:
        check_contents(found)
    remove_leftovers(out)
    assert not list_checkpoints(out).damaged
    assert {name[:10] for name in os.listdir(out)} == {"checkpoint"}
    save(out, 4)
    found = list_checkpoints(out)
    assert [(c.step, c.resumable) for c in found.whole] == [(4, True), (step, False)]
    assert not [name for name in os.listdir(found.whole[1].path) if name.startswith("optimizer")]
    return step


if __name__ == "__main__":
    main()
