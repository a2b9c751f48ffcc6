"""Kill a save with SIGKILL at every call in turn, and check the files left on disk.

This is a separate program because it forks, which a test runner with threads should not do. It
prints the number of kills.
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
    newest_steps: list[int] = []
    for number in count(1):
        shutil.copytree(before, out)
        if not kill_save(out, number):
            break
        newest_steps.append(examine(out))
        shutil.rmtree(out)
    assert newest_steps == sorted(newest_steps), (
        f"a later kill left an older checkpoint: {newest_steps}"
    )
    assert set(newest_steps) == {2, 3}, f"the newest checkpoints are {set(newest_steps)}"
    print(len(newest_steps))


def kill_save(out: Path, number: int) -> bool:
    """Kill a save at its call of that number. Return False if it ends before that."""
    pid = os.fork()
    if pid == 0:
        with acting_at(number, tear_and_die):
            save(out, 3)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def tear_and_die(name: str, args: tuple[object, ...]) -> None:
    """Die. If the call is a write, do half of it first, as a torn write would."""
    if name == "pwrite":
        fd, data, offset = args
        assert isinstance(fd, int)
        assert isinstance(data, memoryview)
        assert isinstance(offset, int)
        os.pwritev(fd, [data[: len(data) // 2]], offset)
    os.kill(os.getpid(), signal.SIGKILL)


def examine(out: Path) -> int:
    """Check that the newest checkpoint can be resumed from and that the next run cleans up."""
    newest = latest_checkpoint(out)
    assert newest is not None
    assert newest.resumable
    step = newest.step
    for checkpoint in list_checkpoints(out).whole:
        check_contents(checkpoint)
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
