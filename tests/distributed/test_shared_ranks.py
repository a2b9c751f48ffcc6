"""Ranks on one machine, over shared memory."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from penstock.distributed.peer_sockets import PeerSockets
from penstock.distributed.shared_ranks import SharedTransport
from penstock.engine.device import CpuDevice
from penstock.engine.transport import SingleRank, Transport
from penstock.errors import EngineError, PeerLostError
from penstock.memory.arena import Arena
from tests.distributed import memory_worker
from tests.distributed.conformance import check_transport
from tests.support import fork_server
from tests.support.ranks import connect, on_each_rank, shared_threads

SMALL = 64 * 1024
"""A mailbox in which large messages need many pieces."""


@pytest.mark.parametrize("world", [2, 3, 4])
def test_shared_memory_moves_the_right_bytes(world: int) -> None:
    with shared_threads(world, SMALL) as group:
        on_each_rank(group, check_transport)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("elements", [1, 4095, 4096, 100_001])
def test_messages_larger_than_the_mailbox_pass_in_pieces(world: int, elements: int) -> None:
    all_parts = torch.randn(world, world, elements)  # of each sender, for each owner

    def work(ranks: Transport) -> None:
        for senders in range(1, world + 1):
            into = torch.full((world * elements,), -1.0)
            ranks.exchange(all_parts[ranks.rank].clone().view(-1), into, senders)
            wanted = all_parts[:senders, ranks.rank]
            assert torch.equal(into.view(world, -1)[:senders], wanted)
            assert (into.view(world, -1)[senders:] == -1).all()
        shards = torch.zeros(world, elements)
        shards[ranks.rank] = all_parts[0, ranks.rank]
        ranks.gather(shards.view(-1))
        assert torch.equal(shards, all_parts[0])
        for source in range(world):
            values = torch.full((elements,), float(ranks.rank))
            ranks.broadcast(values, source)
            assert (values == source).all()

    with shared_threads(world, SMALL) as group:
        on_each_rank(group, work)


def test_a_rank_that_is_early_does_not_overwrite_what_a_late_one_reads() -> None:
    waits = threading.Event()

    def work(ranks: Transport) -> None:
        for number in range(6):
            if ranks.rank == 1:
                waits.wait(0.2)  # rank 0 fills all slots meanwhile, and could begin the next call
            values = torch.full((9_000,), number if ranks.rank == 0 else -1)
            ranks.broadcast(values, 0)
            assert (values == number).all()
            values = torch.full((2 * 9_000,), number)
            received = torch.empty_like(values)
            ranks.exchange(values, received, 1)
            assert (received[:9_000] == number).all()

    with shared_threads(2, SMALL) as group:
        on_each_rank(group, work)


def test_ranks_map_the_memory_of_all() -> None:
    def work(ranks: SharedTransport) -> None:
        own = [Arena.shared(8192), Arena.shared(3 << 20)]
        data = own[1].tensor(3 << 20, torch.uint8)
        data.fill_(ranks.rank + 1)
        by_rank = ranks.open_arenas(own)
        theirs = [arenas[1] for arenas in by_rank]
        assert theirs[ranks.rank] is own[1]
        ranks.arrive()
        seen = [
            data if rank == ranks.rank else each.tensor(3 << 20, torch.uint8)
            for rank, each in enumerate(theirs)
        ]
        assert [int(each[-1]) for each in seen] == [1, 2, 3]
        ranks.arrive()
        seen[(ranks.rank + 1) % 3][0] = 10 + ranks.rank  # it is the memory, and not a copy
        ranks.arrive()
        assert data[0] == 10 + (ranks.rank - 1) % 3

    with shared_threads(3, SMALL) as group:
        on_each_rank(group, work)


def test_ranks_with_other_amounts_of_memory_are_refused() -> None:
    def work(ranks: SharedTransport) -> None:
        with pytest.raises(EngineError, match="the ranks store different amounts of weights"):
            ranks.open_arenas([Arena.shared(4096 * (1 + ranks.rank))])

    with shared_threads(2, SMALL) as group:
        on_each_rank(group, work)


@pytest.mark.parametrize("call", ["arrive", "meet", "exchange", "gather", "open_arenas"])
def test_a_rank_that_fails_ends_the_calls_of_the_others(call: str) -> None:
    def work(ranks: SharedTransport) -> None:
        if ranks.rank == 1:
            ranks.abort(OSError("the rank broke"))
            return
        calls = {
            "arrive": ranks.arrive,
            "meet": lambda: ranks.meet(b"message"),
            "exchange": lambda: ranks.exchange(torch.zeros(90_000), torch.zeros(90_000), 3),
            "gather": lambda: ranks.gather(torch.zeros(90_000)),
            "open_arenas": lambda: ranks.open_arenas([]),
        }
        with pytest.raises(PeerLostError, match="lost rank 1: OSError: the rank broke"):
            calls[call]()

    with shared_threads(3, SMALL) as group:
        on_each_rank(group, work)


def test_a_mailbox_that_is_too_small_is_refused() -> None:
    first, second = connect(2)
    with pytest.raises(EngineError, match=r"is too small for 2 ranks, which need 16384 bytes"):
        SharedTransport(first, None, CpuDevice(), mailbox_nbytes=8192)  # type: ignore[arg-type]
    for peers in (first, second):
        peers.close()


def test_ranks_on_several_machines_are_refused() -> None:
    apart = PeerSockets(0, 2, False, ("a", "b"), {})
    with pytest.raises(EngineError, match="ranks on several machines have no memory in common"):
        SharedTransport(apart, None, CpuDevice())  # type: ignore[arg-type]


def test_closed_transports_leave_no_file_descriptors() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with shared_threads(2, SMALL):
        pass
    before = count()
    for _ in range(3):
        with shared_threads(3, SMALL) as group:
            on_each_rank(group, check_transport)
        del group
    assert count() <= before


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_of_ranks_are_in_host_memory_once(device: str, tmp_path: Path) -> None:
    """Every process maps the weights of all ranks, and no page of them exists twice."""
    assert device == "cpu" or torch.cuda.is_available()
    command = ["-m", "tests.distributed.memory_worker", str(tmp_path / "store")]
    processes = [fork_server.start([*command, str(rank), "2"]) for rank in range(2)]
    first, second = (json.loads(each.communicate(timeout=200)[0]) for each in processes)
    one = memory_worker.measure(SingleRank())
    mailboxes, parameters = 2 * memory_worker.MAILBOX_NBYTES, one["parameters"]

    # Exact training takes 14 bytes per parameter, and activations. Shards are padded.
    assert one["arenas"] > 14 * parameters
    assert first["arenas"] + second["arenas"] - mailboxes < 1.05 * one["arenas"]
    assert first["gathers"] == second["gathers"] == 0  # weights are read where they are stored
    for each in (first, second):  # both shards of the weights, although each stores only one
        assert 2 * parameters < each["size"] - mailboxes < 2.1 * parameters
    assert first["pss"] + second["pss"] <= first["size"]
