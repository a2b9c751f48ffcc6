"""Ranks that share bytes and tensors, and that fail together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from penstock.checkpoint.errors import (
    CheckpointWriteError,
    DamagedCheckpointError,
    DamagedOnRankError,
    SaveOnRankError,
)
from penstock.checkpoint.writer import PartsError
from penstock.distributed.thread_ranks import ThreadRanks
from penstock.engine.rank_agreement import (
    all_or_none,
    gather_tensors,
    share_bytes,
    take_weights_of_rank_0,
)
from penstock.engine.transport import SingleRank, Transport
from penstock.errors import RankFailedError
from tests.support.ranks import on_each_rank


def raise_if(error: Exception, fails: bool) -> None:
    if fails:
        raise error


def test_every_rank_gets_the_bytes_of_the_source() -> None:
    def work(ranks: Transport) -> None:
        for source in range(ranks.world):
            sent = bytes([ranks.rank]) * (ranks.rank + 1)
            assert share_bytes(ranks, sent, source) == bytes([source]) * (source + 1)
            assert share_bytes(ranks, b"", source) == b""
        assert share_bytes(ranks, b"first" if ranks.rank == 0 else b"") == b"first"

    on_each_rank(ThreadRanks(3), work)
    assert share_bytes(SingleRank(), b"own") == b"own"


def test_tensors_of_all_ranks_are_gathered_by_name() -> None:
    def work(ranks: Transport) -> None:
        own = {f"of {ranks.rank}": torch.full((2, 3), ranks.rank).t()}
        found = gather_tensors(ranks, own)
        assert sorted(found) == ["of 0", "of 1", "of 2"]
        assert all(found[f"of {n}"].tolist() == [[n] * 2] * 3 for n in range(3))
        assert found[f"of {ranks.rank}"] is own[f"of {ranks.rank}"]

    on_each_rank(ThreadRanks(3), work)
    alone = {"x": torch.ones(1)}
    assert gather_tensors(SingleRank(), alone) is alone


def test_weights_that_differ_are_those_of_rank_0_and_others_stay_where_they_are() -> None:
    def work(ranks: Transport) -> None:
        own = {
            "same": torch.arange(4.0),
            "drawn": torch.full((2, 2), float(ranks.rank)).t(),
            "last": torch.tensor([1.0, 2.0 if ranks.rank == 2 else 3.0]),
        }
        found = take_weights_of_rank_0(ranks, own)
        assert list(found) == list(own)
        assert found["same"] is own["same"]
        assert found["drawn"].tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert found["last"].tolist() == [1.0, 3.0]
        assert own["drawn"].tolist() == [[ranks.rank] * 2] * 2, "the caller's are not changed"

    on_each_rank(ThreadRanks(3), work)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: ValueError("no"), RankFailedError, "rank 1: no"),
        (ValueError, RankFailedError, "ValueError"),
        (lambda: DamagedCheckpointError("c", "bad"), DamagedOnRankError, "rank 1: c: bad"),
        (lambda: CheckpointWriteError("c", 5), SaveOnRankError, "rank 1: c: cannot be written"),
        (lambda: ValueError("é" * 3000), RankFailedError, "é" * 1000),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(
    make: Callable[[], Exception], kind: type[Exception], text: str
) -> None:
    def work(ranks: Transport) -> None:
        own = make()
        with pytest.raises(type(own) if ranks.rank == 1 else kind) as caught, all_or_none(ranks):
            raise_if(own, ranks.rank == 1)
        if ranks.rank == 1:
            assert caught.value is own, "a rank raises its own error"
        else:
            assert text in str(caught.value)
        with all_or_none(ranks):  # they still meet in the same calls
            pass

    on_each_rank(ThreadRanks(3), work)


def test_the_first_rank_that_failed_is_named() -> None:
    def work(ranks: Transport) -> None:
        with pytest.raises((RankFailedError, ValueError)) as caught, all_or_none(ranks):
            raise_if(ValueError(f"of {ranks.rank}"), ranks.rank > 0)
        if not ranks.rank:
            assert str(caught.value) == "rank 1: of 1"

    on_each_rank(ThreadRanks(3), work)


def test_an_error_that_all_ranks_raise_is_not_exchanged() -> None:
    def work(ranks: Transport) -> None:
        with pytest.raises(PartsError), all_or_none(ranks):
            raise PartsError(ValueError("on all of them"))

    on_each_rank(ThreadRanks(2), work)
