"""Ranks in threads."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from penstock.distributed.thread_ranks import ThreadRanks
from penstock.engine.transport import SingleRank, Transport
from penstock.errors import PeerLostError
from tests.distributed.conformance import check_transport
from tests.support.ranks import on_each_rank


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_threads_move_the_right_bytes(world: int) -> None:
    on_each_rank(ThreadRanks(world), check_transport)


def test_a_single_rank_has_everything_already() -> None:
    check_transport(SingleRank())


def test_ranks_that_make_different_calls_are_told_so() -> None:
    def work(ranks: Transport) -> None:
        call = (
            partial(ranks.meet, b"message") if ranks.rank else partial(ranks.gather, torch.ones(2))
        )
        with pytest.raises(PeerLostError, match="ranks make different calls"):
            call()

    on_each_rank(ThreadRanks(2), work)


def test_a_rank_that_does_not_arrive_is_not_waited_for_forever() -> None:
    group = ThreadRanks(2, wait_seconds=0.05)

    with pytest.raises(PeerLostError, match="a rank did not arrive within"):
        group.transports[0].meet(b"")
