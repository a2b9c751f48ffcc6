"""Ranks that are killed at random moments, or stopped, while `penstock train --gpus N` runs."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.train.runs import RESIDENT, Runs, run_command, wait_for_exit, wait_for_line
from tests.train.test_several_ranks import (
    BATCH,
    checkpoints_of,
    command_of,
    errors_of,
    rank_processes,
    run_on,
    start,
)

pytestmark = pytest.mark.long

STEPS = 40
OFTEN = ("--steps", str(STEPS), "--save-every", "2")
LIMIT = 5.0
"""Seconds within which the other ranks end. The machine must be idle for that."""


@pytest.fixture(scope="module")
def alone(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The checkpoints of an uninterrupted run on one rank."""
    torch.set_num_threads(1)  # before the fixture that does this for every test
    out = tmp_path_factory.mktemp("alone") / "out"
    assert run_on(1, runs, out, *OFTEN).code == 0
    return checkpoints_of(out)


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_killed_at_any_moment_is_named_and_nothing_is_lost(
    seed: int, runs: Runs, alone: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    chance = random.Random(seed)
    world, transport = chance.choice([2, 3]), "collective" if seed < 10 else "shared"
    out = tmp_path / "out"
    more = ("--gpus", str(world), "--transport", transport, *OFTEN)
    child = start(command_of(runs, out, *more))
    step = chance.randrange(1, STEPS - 15)
    wait_for_line(child, '"step"', f'"step": {step},')
    time.sleep(chance.random() * 0.3)
    ranks = rank_processes(child.pid)
    killed = chance.choice(sorted(ranks))
    os.kill(ranks.pop(killed), signal.SIGKILL)
    began = time.monotonic()
    while others := [pid for pid in ranks.values() if is_running(pid)]:
        assert time.monotonic() - began < 60, f"still running: {others}"
        time.sleep(0.02)
    seconds = time.monotonic() - began
    ended = wait_for_exit(child)

    assert ended.code == 1
    (error,) = errors_of(ended)
    assert f"rank {killed} was killed by SIGKILL" in error
    assert "Traceback" not in ended.errors
    last = max((int(path.name[-6:]) for path in out.glob("checkpoint-*")), default=0)
    when = f"rank {killed} of {world} killed after step {step}, checkpoint {last}"
    print(f"{transport}: {when}: the others ended after {seconds:.2f} s")
    assert last >= step - 2
    resumed = run_command(runs.flags(out, *RESIDENT, *BATCH, *OFTEN, "--resume", "--gpus", "1"))
    assert resumed.code == 0, resumed.errors
    name = f"checkpoint-{STEPS:06d}"
    assert checkpoints_of(out)[name] == alone[name]
    assert seconds < LIMIT


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; one whose parent has not asked for it has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_stopped_rank_is_named_and_the_run_continues(
    runs: Runs, alone: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    child = start(command_of(runs, out, "--gpus", "2", *OFTEN))
    wait_for_line(child, '"step"', '"step": 3,')
    stopped = rank_processes(child.pid)[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert child.stderr is not None
        lines: list[str] = []
        while not any("waiting for rank 1 since" in line for line in lines):
            lines.append(child.stderr.readline())
            assert lines[-1], lines
    finally:
        os.kill(stopped, signal.SIGCONT)
    print(lines[-1])
    assert "it has not responded for" in lines[-1]

    ended = wait_for_exit(child)
    assert ended.code == 0, ended.errors
    assert checkpoints_of(out) == {name: alone[name] for name in checkpoints_of(out)}
