"""Ranks notice when another one ends, fails or stalls, and name it."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from penstock.distributed import peer_sockets
from penstock.distributed.peer_sockets import PeerSockets, connect_ranks
from penstock.distributed.peer_watch import PeerWatch, WatchSettings
from penstock.errors import PeerLostError
from tests.support import fork_server
from tests.support.ranks import connect

FAST: dict[str, float] = {"heartbeat_seconds": 0.05, "name_after_seconds": 0.2}
PATIENCE = 60.0
"""Seconds after which a test gives up."""


@contextmanager
def watches(
    world: int, notify: Callable[[str], None] | None = None, **settings: float
) -> Iterator[list[PeerWatch]]:
    limits = WatchSettings(**FAST | {"exit_seconds": 1e9} | settings)
    made = [PeerWatch(peers, limits, notify=notify) for peers in connect(world)]
    try:
        yield made
    finally:
        for watch in made:
            watch.close()


def loss(watch: PeerWatch) -> PeerLostError:
    """Wait until a rank is lost, and return the error that a call raises then."""
    assert select.select([watch.lost_fd], [], [], PATIENCE)[0]
    with pytest.raises(PeerLostError) as caught, watch.call("gather"):
        pass
    return caught.value


def end(watch: PeerWatch) -> None:
    """Close the sockets of a rank without a word, as the operating system does after kill -9."""
    watch._closed = True
    watch._thread.join()
    for peer in watch._peers.values():
        peer.socket.close()


def test_ranks_on_one_machine_use_unix_sockets() -> None:
    for peers in connect(4):
        assert peers.one_machine
        assert set(peers.sockets) == set(range(4)) - {peers.rank}
        assert all(each.family == socket.AF_UNIX for each in peers.sockets.values())
        peers.close()


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every rank run on a machine of its own."""
    monkeypatch.setattr(peer_sockets, "machine_identity", lambda: str(threading.get_ident()))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.mark.usefixtures("machines")
def test_ranks_on_several_machines_use_tcp_and_name_the_machine() -> None:
    with watches(3) as (first, second, third):
        assert all(p.socket.family == socket.AF_INET for p in first._peers.values())
        third.fail(MemoryError("no room"))

        for watch in (first, second):
            error = loss(watch)
            assert (error.rank, error.host) == (2, socket.gethostname())
            assert f"rank 2 on {socket.gethostname()}: MemoryError: no room" in str(error)


def test_a_rank_that_ends_is_named_by_all_others() -> None:
    with watches(4) as made:
        end(made[2])

        for rank in (0, 1, 3):
            error = loss(made[rank])
            assert error.rank == 2
            assert "its process ended without a message (killed, or crashed)" in str(error)
            assert error.host is None


def test_a_rank_that_fails_sends_its_message_before_it_ends() -> None:
    with watches(3) as made:
        made[1].fail(OSError(28, "No space left on device"))
        end(made[1])

        for rank in (0, 2):
            error = loss(made[rank])
            assert error.rank == 1
            assert "OSError: [Errno 28] No space left on device" in str(error)
        assert loss(made[1]).rank == 1  # its own calls fail too


def test_the_rank_that_was_lost_first_is_named_also_after_others_failed() -> None:
    with watches(3) as made:
        # Rank 1 learns of the loss of rank 2 from rank 0 only.
        made[0].fail(PeerLostError(2, "it was killed"))
        end(made[0])

        error = loss(made[1])
        assert (error.rank, error.problem) == (2, "it was killed")


def test_a_rank_may_leave_while_others_finish_the_last_call() -> None:
    with watches(2) as (first, second):
        with first.call("meet"):
            with second.call("meet"):
                pass
            second.close()
            first._thread.join(0.3)
            first.check()  # rank 1 made this call too, and what it sent may still arrive

        with pytest.raises(PeerLostError, match="lost rank 1: has ended before this rank did"):
            wait_for_call_to_fail(first)


def wait_for_call_to_fail(watch: PeerWatch) -> None:
    with watch.call("meet"):
        for _ in range(int(PATIENCE / 0.05)):
            watch.check()
            watch._thread.join(0.05)


@pytest.mark.parametrize(
    "garbage",
    [b"\0" * 64, b"\xff" * 64, os.urandom(4096), b"\x02" + b"\0" * 12 + b"\xff\xff" + b"x" * 70000],
    ids=["zeros", "ones", "random", "too long"],
)
def test_garbage_from_a_rank_counts_as_its_loss(garbage: bytes) -> None:
    with watches(2) as (first, second):
        end_quietly = second._peers[0].socket
        with second._lock:
            end_quietly.setblocking(True)
            end_quietly.sendall(garbage)

        error = loss(first)
        assert error.rank == 1


def test_messages_may_arrive_in_pieces() -> None:
    with watches(2) as (first, second):
        message = b"\x02" + b"\0" * 8 + b"\x01\0\0\0" + b"\x04\0" + b"gone"
        with second._lock:
            for byte in message:
                second._peers[0].socket.send(bytes([byte]))

        assert loss(first).problem == "gone"


class SlowCall:
    """A call of torch.distributed that ends just after a wait for it has timed out."""

    def __init__(self, failure: str = "") -> None:
        self.waits, self.failure = 0, failure

    def is_completed(self) -> bool:
        return self.waits > 0

    def wait(self, timeout: object) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.failure:
            raise RuntimeError(self.failure)


def test_a_call_that_ends_after_its_wait_has_timed_out_has_not_failed() -> None:
    with watches(2) as (first, _):
        slow, failed = SlowCall(), SlowCall("Connection reset")

        first.wait(slow)  # type: ignore[arg-type]
        with pytest.raises(PeerLostError, match="Connection reset"):
            first.wait(failed)  # type: ignore[arg-type]

        assert slow.waits == failed.waits == 2


def test_strangers_are_not_taken_for_ranks() -> None:
    """Someone who connects, and does not know the token, is dropped; the ranks still connect."""
    store = dist.HashStore()
    ranks: list[PeerSockets] = []
    first = threading.Thread(target=lambda: ranks.append(connect_ranks(store, 0, 2)))
    first.start()
    store.set("machine 1", store.get("machine 0"))
    name = "\0" + peer_sockets.json.loads(store.get("address 0"))
    hello = peer_sockets._HELLO.pack(b"penstock", 1, bytes(16))
    for said in (b"GET / HTTP/1.1\r\n\r\n" * 9, hello + bytes(32), hello[:9], b""):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(name)
            stranger.sendall(said)

    second = connect_ranks(store, 1, 2)
    first.join(PATIENCE)
    ranks[0].sockets[1].sendall(b"hello")
    assert second.sockets[0].recv(5) == b"hello"
    for peers in (ranks[0], second):
        peers.close()


def test_a_rank_that_does_not_know_the_token_does_not_connect() -> None:
    store, other = dist.HashStore(), dist.HashStore()

    def wait() -> None:
        with pytest.raises(PeerLostError, match="lost rank 1: did not connect in time"):
            connect_ranks(store, 0, 2, seconds=3)

    first = threading.Thread(target=wait)
    first.start()
    store.set("machine 1", store.get("machine 0"))
    for key in ("machine 0", "address 0"):
        other.set(key, store.get(key))
    other.set("token", "another token")

    with pytest.raises(PeerLostError, match="lost rank 0: did not answer at "):
        connect_ranks(other, 1, 2, seconds=3)
    first.join()


def test_a_rank_that_never_starts_is_named() -> None:
    with pytest.raises(PeerLostError, match="lost rank 1: did not start in time"):
        connect_ranks(dist.HashStore(), 0, 2, seconds=0.1)


def test_a_rank_that_has_not_made_the_call_is_named_by_the_first_that_waits() -> None:
    lines: list[str] = []
    said = threading.Event()

    def notify(line: str) -> None:
        lines.append(line)
        said.set()

    with watches(3, notify) as made, made[0].call("exchange"), made[2].call("exchange"):
        assert said.wait(PATIENCE)
        for _ in range(3):
            made[0].check()  # no error: it may still come
        with made[1].call("exchange"):
            pass

    assert all(line.startswith("waiting for rank 1 since ") for line in lines)
    assert "its process responds, but has not made this call" in lines[0]
    assert "It is an error after 21600 s" in lines[0]


def test_waiting_for_a_rank_is_an_error_in_the_end() -> None:
    with watches(3, lambda line: None, stall_seconds=0.5) as made:
        with made[0].call("exchange"):
            assert select.select([made[0].lost_fd], [], [], PATIENCE)[0]

        for watch in made:  # also rank 1, which may be able to say so, and rank 2
            assert select.select([watch.lost_fd], [], [], PATIENCE)[0]
            error = loss(watch)
            assert error.rank == 1
            assert "has not made this call (exchange, " in error.problem


def test_a_rank_that_does_not_respond_is_an_error_in_the_end() -> None:
    with watches(2, lambda line: None, silent_seconds=0.6) as (first, second):
        second._tell_all = lambda *_: None  # type: ignore[method-assign]
        with first.call("exchange"), second.call("exchange"):
            error = loss(first)

        assert error.rank == 1
        assert "it has not responded for" in error.problem


# Processes.


class Worker:
    """A rank in a process (`tests/distributed/watch_worker.py`) that can be killed and stopped."""

    def __init__(self, folder: Path, rank: int, world: int, *words: str) -> None:
        command = ["-m", "tests.distributed.watch_worker"]
        self.rank = rank
        self.process = fork_server.start(
            [*command, str(folder / "store"), str(rank), str(world), *words]
        )

    def hear(self) -> str:
        return self.process.stdout.readline().strip()

    def say(self, word: str) -> None:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


@contextmanager
def workers(folder: Path, world: int, *words: str) -> Iterator[list[Worker]]:
    made = [Worker(folder, rank, world, *words) for rank in range(world)]
    try:
        assert [each.hear() for each in made] == ["ready"] * world
        yield made
    finally:
        for each in made:
            each.process.kill()
            each.process.communicate()


def test_a_process_stuck_in_a_call_is_ended_with_its_message(tmp_path: Path) -> None:
    with workers(tmp_path, 3, "stuck") as made:
        made[1].process.kill()

        for rank in (0, 2):
            _, errors = made[rank].process.communicate(timeout=PATIENCE)
            assert made[rank].process.returncode == 1
            assert f"rank {rank}: lost rank 1: its process ended without a message" in errors
            assert "This process did not end by itself within 1 s" in errors
            assert not Path(f"{tmp_path}/store.{rank}").exists()  # a file that it would have left


def test_a_stopped_process_is_named_and_may_continue(tmp_path: Path) -> None:
    with workers(tmp_path, 3, "meet") as made:
        made[2].process.send_signal(signal.SIGSTOP)
        for each in made:
            each.say("meet")
        line = made[0].process.stderr.readline()
        assert line.startswith("penstock: waiting for rank 2 since ")
        assert "it has not responded for" in line
        assert made[0].process.poll() is None
        made[2].process.send_signal(signal.SIGCONT)

        assert [each.hear() for each in made] == ["met"] * 3
        for each in made:
            each.say("end")
            assert each.process.wait(PATIENCE) == 0


def test_a_child_of_a_killed_process_does_not_hide_its_death(tmp_path: Path) -> None:
    with workers(tmp_path, 2, "fork") as made:
        made[1].process.kill()
        made[0].say("meet")
        assert made[0].hear().startswith("lost rank 1: its process ended without a message")
