"""What a process reads about itself from its launcher, and how it leaves the group of ranks."""

from __future__ import annotations

import os
import socket

import pytest

from penstock.distributed.rank_group import single_rank
from penstock.errors import EngineError
from penstock.rank_place import NAMES, RankPlace
from tests.support import fork_server

SECOND_MACHINE = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "first", "MASTER_PORT": "29500",
}  # fmt: skip


def test_a_rank_knows_its_machine_and_its_gpu() -> None:
    place = RankPlace.of(SECOND_MACHINE)

    assert place == RankPlace(rank=5, world=8, local_rank=1, local_world=4, machine=1)
    assert place.machines == 2


@pytest.mark.parametrize("missing", NAMES)
def test_a_process_without_a_launcher_is_no_rank(missing: str) -> None:
    without = {name: value for name, value in SECOND_MACHINE.items() if name != missing}

    assert RankPlace.of(without) is None


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(EngineError, match="LOCAL_RANK must be a number, got 'one'"):
        RankPlace.of({**SECOND_MACHINE, "LOCAL_RANK": "one"})


def test_machines_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(EngineError, match="has 3 of 8 ranks, but all machines must have equally"):
        RankPlace.of({**SECOND_MACHINE, "LOCAL_WORLD_SIZE": "3"})


def test_a_single_process_talks_and_prints_its_own_errors() -> None:
    with single_rank() as group:
        assert (group.rank, group.world, group.talks) == (0, 1, True)
        assert group.claim_report(ValueError())


@pytest.mark.parametrize("more", [(), ("added",)])
def test_no_thread_of_gloo_outlives_a_closed_group(more: tuple[str, ...]) -> None:
    """A thread that releases a tensor while Python shuts down would abort the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
              "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    ranks = [
        fork_server.start(
            ["-m", "tests.distributed.group_worker", *more],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=60) for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], ended
    assert [output for output, _ in ended] == ["rank 0 has left\n", "rank 1 has left\n"]
