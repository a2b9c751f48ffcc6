"""What a rank checks before it follows rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.distributed.thread_ranks import ThreadRanks
from penstock.engine.transport import Transport
from penstock.errors import SettingsError
from penstock.records import to_json
from penstock.settings import Settings
from penstock.train.errors import OutNotSharedError, RanksLostError
from penstock.train.follower import check_settings, check_shared
from penstock.train.rank_commands import Command, RankFollower, RankLeader, read_batch, read_fields
from penstock.train.signals import StopRequest
from tests.support.ranks import on_each_rank


def test_an_output_directory_that_is_not_shared_is_named(tmp_path: Path) -> None:
    token = tmp_path / "out/.ranks-1"
    with pytest.raises(OutNotSharedError, match=r"out on rank 3 is not the directory of rank 0"):
        check_shared(token, 3, seconds=0.0)

    token.parent.mkdir()
    token.touch()
    check_shared(token, 3, seconds=0.0)


def test_ranks_with_other_settings_are_refused() -> None:
    first = {name: to_json(value) for name, value in Settings.of({"lr": 1e-3}).flat().items()}
    check_settings(Settings.of({"lr": 1e-3}), first, 2)

    with pytest.raises(SettingsError, match=r"lr: is 0\.002 on rank 2 and 0\.001 on rank 0"):
        check_settings(Settings.of({"lr": 2e-3}), first, 2)


def test_commands_carry_batches_and_signals() -> None:
    batch = {"input_ids": torch.arange(6).view(2, 3), "labels": torch.full((2, 3), -100)}

    def work(ranks: Transport) -> object:
        stop = StopRequest(quiet=True)
        if ranks.rank == 0:
            leader = RankLeader(ranks, stop)
            assert not leader.stop_requested
            leader.step(batch, [0.1, 1 / 3])
            before = stop.signal
            leader.write("out/draft", optimizer=False)
            return before, stop.signal
        follower = RankFollower(ranks, stop)
        received = [follower.receive()]
        received.append(follower.receive())
        if ranks.rank == 2:
            stop.request(15)
        received.append(follower.receive())
        return received

    (before, after), *others = on_each_rank(ThreadRanks(3), work)  # type: ignore[misc]

    assert (before, after) == (None, 15)
    for received in others:
        assert [command for command, _ in received] == [Command.LISTEN, Command.STEP, Command.WRITE]
        found, fields = read_batch(received[1][1])
        assert fields == {"rates": [0.1, 1 / 3]}
        assert found.keys() == batch.keys()
        assert all(torch.equal(found[name], batch[name]) for name in batch)
        assert read_fields(received[2][1]) == {"folder": "out/draft", "optimizer": False}


def test_one_message_says_which_ranks_were_lost() -> None:
    assert str(RanksLostError({1: 1}, "lost rank 2: it stalls")) == "lost rank 2: it stalls"
    assert "rank 2 was killed by SIGKILL" in str(RanksLostError({0: 1, 2: -9}, "lost rank 2"))
    assert "lower --dram" in str(RanksLostError({0: 1, 2: -9}, "lost rank 2"))
    aborted = str(RanksLostError({0: -6, 1: -15}, ""))
    assert "rank 0 was killed by SIGABRT, rank 1 was killed by SIGTERM" in aborted
    assert "--dram" not in aborted
    assert "rank 1 ended with exit code 3 without a message" in str(RanksLostError({1: 3}, ""))
