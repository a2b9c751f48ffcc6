"""Ranks in processes: any number of them, over any transport, gives the result of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock.engine.transport import SingleRank
from tests.distributed.rank_worker import CHOICES, digests
from tests.equivalence.runs import DRAM, WAYS
from tests.support import fork_server


@pytest.mark.parametrize(
    ("transport", "world", "choice"),
    [
        ("shared", 2, "some"),
        # The tests of several ranks in tests/train use gloo.
        pytest.param("gloo", 2, DRAM.name, marks=pytest.mark.long),
        pytest.param("calls of NCCL", 2, DRAM.name, marks=pytest.mark.long),
        pytest.param("gloo", 4, "few", marks=pytest.mark.long),
        *(pytest.param("shared", 4, way.name, marks=pytest.mark.long) for way in WAYS),
    ],
)
def test_processes_give_the_result_of_one_rank(
    transport: str, world: int, choice: str, tmp_path: Path
) -> None:
    check_processes(transport, world, choice, tmp_path)


def check_processes(transport: str, world: int, choice: str, tmp_path: Path) -> None:
    command = ["-m", "tests.distributed.rank_worker"]
    processes = [
        fork_server.start([*command, str(rank), str(world), str(tmp_path), transport, choice])
        for rank in range(world)
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = digests(tmp_path, SingleRank(), CHOICES[choice])
    finally:
        torch.set_num_threads(threads)
    errors = [process.communicate(timeout=300)[1] for process in processes]

    assert [process.returncode for process in processes] == [0] * world, errors
    for size in range(2, world + 1):
        for rank in range(size):
            found = json.loads((tmp_path / f"{size}.{rank}.json").read_text())
            assert found == json.loads(json.dumps(one)), (size, rank)
    for rank in range(world - 1):
        assert (
            (tmp_path / f"lost.{rank}")
            .read_text()
            .startswith(f"lost rank {world - 1}: its process ended")
        )
