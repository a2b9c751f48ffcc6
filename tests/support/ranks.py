"""Run the same work on several ranks in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from penstock.distributed.peer_sockets import PeerSockets, connect_ranks
from penstock.distributed.peer_watch import PeerWatch, WatchSettings
from penstock.distributed.shared_ranks import SharedTransport
from penstock.engine.device import CpuDevice
from penstock.engine.transport import Transport

T = TypeVar("T")


class RankThreads(Protocol):
    """Ranks in threads of this process."""

    @property
    def transports(self) -> Sequence[Transport]:
        """The transport of each rank."""


def on_each_rank(group: RankThreads, work: Callable[[Any], T]) -> list[T]:
    """Call `work` in one thread for each rank; return the results, or raise the first error."""

    def run(transport: Transport) -> T:
        try:
            return work(transport)
        except BaseException as error:
            transport.abort(error)
            raise

    return in_threads([lambda each=each: run(each) for each in group.transports])  # type: ignore[misc]


def in_threads(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make calls concurrently; return the results, or raise the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(calls))]


def connect(world: int, seconds: float = 60.0) -> list[PeerSockets]:
    """Connect ranks in threads of this process."""
    store = dist.HashStore()
    return in_threads(
        [lambda rank=rank: connect_ranks(store, rank, world, seconds=seconds)  # type: ignore[misc]
         for rank in range(world)]
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SharedThreads:
    """Ranks in threads that use the transport of processes with shared memory."""

    transports: list[SharedTransport]


@contextmanager
def shared_threads(world: int, mailbox_nbytes: int) -> Iterator[SharedThreads]:
    settings = WatchSettings(heartbeat_seconds=0.1, exit_seconds=1e9)
    watches = [PeerWatch(peers, settings) for peers in connect(world)]

    def make(peers: PeerSockets, watch: PeerWatch) -> SharedTransport:
        return SharedTransport(peers, watch, CpuDevice(), mailbox_nbytes=mailbox_nbytes)

    pairs = zip(connect(world), watches, strict=True)
    made = in_threads([lambda p=p, w=w: make(p, w) for p, w in pairs])  # type: ignore[misc]
    try:
        yield SharedThreads(made)
    finally:
        for transport in made:
            transport.close()
            transport.watch.close()
