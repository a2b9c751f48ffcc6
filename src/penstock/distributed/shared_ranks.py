"""Ranks on one machine that reach each other through shared host memory.

For GPUs without a link to each other: everything passes through the host's memory anyway, and this
transport lets it pass once. It also works with CPUs.

- **Weights in host memory** are allocated in files in memory (memfd), which every rank maps, and
  pins if it has a GPU. Each rank then copies the shards of all ranks from where they are stored:
  GATHER needs no copy of its own. There is one copy of the weights, whatever the number of ranks.
- **Everything else** passes through mailboxes: each rank has one region of shared memory that it
  writes, cut into small rings of slots. One ring is read by all others (gather, broadcast, meet),
  and one by each of them (exchange).

Ranks wait for each other with eventfds, in a `poll` that also ends when a rank is lost. File
descriptors travel over Unix sockets. Nothing has a name in a file system, so nothing is left behind
when a process is killed: the memory is freed with the last process that maps it.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from penstock.distributed.peer_sockets import PeerSockets
from penstock.distributed.peer_watch import SLICE_SECONDS, PeerWatch
from penstock.engine.device import Device
from penstock.errors import EngineError, PeerLostError
from penstock.memory.arena import Arena
from penstock.memory.placement import Place
from penstock.plan.placement import TransportName
from penstock.ticket import Ticket
from penstock.units import MiB

MAILBOX_NBYTES = 64 * MiB
"""Size of each rank's mailbox."""

DEPTH = 2
"""Number of slots in a ring: one is filled while the other is emptied."""

_ALIGNMENT = 4096
_MOST_FDS = 64
"""File descriptors in one message; the kernel allows 253."""

_COUNT = struct.Struct("<I")


@dataclass(slots=True)
class _Outbox:
    """A ring that this rank fills."""

    slots: list[torch.Tensor]
    filled: list[int]
    """For each reader, the eventfd that counts filled slots."""
    freed: list[int]
    """For each reader, the eventfd that counts slots that it has emptied."""
    used: int = 0
    """Number of slots filled so far."""
    emptied: list[int] = field(default_factory=list)
    """Number of slots that each reader has emptied so far."""

    def __post_init__(self) -> None:
        self.emptied = [0] * len(self.freed)

    def free_slot(self) -> torch.Tensor | None:
        """Return the next slot if all readers have emptied it."""
        for reader, fd in enumerate(self.freed):
            while self.used - self.emptied[reader] >= len(self.slots):
                if not _take(fd):
                    return None
                self.emptied[reader] += 1
        return self.slots[self.used % len(self.slots)]

    def post(self) -> None:
        for fd in self.filled:
            os.eventfd_write(fd, 1)


@dataclass(slots=True)
class _Inbox:
    """A ring that another rank fills."""

    slots: list[torch.Tensor]
    filled: int
    freed: int
    used: int = 0

    def filled_slot(self) -> torch.Tensor | None:
        """Return the next slot if it has been filled."""
        if not _take(self.filled):
            return None
        self.used += 1
        return self.slots[(self.used - 1) % len(self.slots)]

    def release(self) -> None:
        os.eventfd_write(self.freed, 1)


@dataclass(slots=True)
class _Send:
    """Bytes on their way into a ring."""

    box: _Outbox
    data: torch.Tensor
    done: int = 0


@dataclass(slots=True)
class _Receive:
    """Bytes on their way out of a ring."""

    box: _Inbox
    data: torch.Tensor
    done: int = 0


@dataclass(slots=True)
class _Peer:
    """The rings between this rank and another one."""

    mailbox: Arena
    common: _Inbox
    """Filled by the other rank for all ranks."""
    inbox: _Inbox
    outbox: _Outbox
    arrive: int
    """Eventfd that tells the other rank that this one has arrived."""
    arrived: int
    """Eventfd that tells this rank that the other one has arrived."""


class SharedTransport:
    """The transport of this process (a `penstock.engine.transport.Transport`) and its memory.

    `peers` are connections to ranks on the same machine, of which this transport takes possession.
    All calls are made from one thread at a time, as on every transport.
    """

    def __init__(
        self,
        peers: PeerSockets,
        watch: PeerWatch,
        device: Device,
        *,
        mailbox_nbytes: int = MAILBOX_NBYTES,
        place: Place | None = None,
    ) -> None:
        if not peers.one_machine:
            raise EngineError("ranks on several machines have no memory in common")
        self.rank, self.world, self.watch = peers.rank, peers.world, watch
        self._device, self._sockets = device, peers.sockets
        # Receives whose copies may still run: their slots are released when they have ended.
        self._receiving: deque[tuple[Ticket[None], _Inbox]] = deque()
        self._fds: list[int] = []
        self.mailbox = Arena.shared(mailbox_nbytes, place, device.pinned)
        self._open_rings(mailbox_nbytes)

    # The calls of a transport.

    @property
    def memory(self) -> SharedTransport:
        return self

    def open(
        self, device: Device, wanted: TransportName | None, mailbox_nbytes: int, place: Place | None
    ) -> None:
        """Do nothing: the mailboxes are open."""

    def gather(self, shards: torch.Tensor) -> None:
        parts = _as_bytes(shards).view(self.world, -1)
        self._gather("gather", parts)

    def exchange(self, parts: torch.Tensor, into: torch.Tensor, senders: int) -> None:
        sent = _as_bytes(parts).view(self.world, -1)
        received = _as_bytes(into).view(self.world, -1)
        sends, receives = [], []
        if self.rank < senders:
            self._device.copy(received[self.rank], sent[self.rank])
            sends = [_Send(peer.outbox, sent[rank]) for rank, peer in self._others()]
        for rank, peer in self._others():
            if rank < senders:
                receives.append(_Receive(peer.inbox, received[rank]))
        self._move("exchange", sends, receives)

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        flat = _as_bytes(values)
        if source == self.rank:
            self._move("broadcast", [_Send(self._common, flat)], [])
        else:
            self._move("broadcast", [], [_Receive(self._peers[source].common, flat)])
            self._release_slots(wait=True)  # the caller reads `values` on the host

    def meet(self, message: bytes) -> Sequence[bytes]:
        found = torch.zeros(self.world, max(1, len(message)), dtype=torch.uint8)
        if message:
            found[self.rank] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self._gather("meet", found)
        self._release_slots(wait=True)
        return [bytes(each.numpy())[: len(message)] for each in found]

    def abort(self, error: BaseException) -> None:
        self.watch.fail(error)

    def arrive(self) -> None:
        with self.watch.call("gather"):
            for _, peer in self._others():
                os.eventfd_write(peer.arrive, 1)
            missing = [peer.arrived for _, peer in self._others()]
            while missing := [fd for fd in missing if not _take(fd)]:
                self._poll(missing)

    def open_arenas(self, own: Sequence[Arena]) -> list[list[Arena]]:
        counts = self.meet(_COUNT.pack(len(own)))
        sizes = b"".join(struct.pack("<Q", arena.stats.capacity) for arena in own)
        if len(set(counts)) > 1 or len(set(self.meet(sizes))) > 1:
            raise EngineError("the ranks store different amounts of weights; use one plan for all")
        return self._exchange_arenas(own)

    def close(self) -> None:
        """Release the mailboxes. No rank may make another call."""
        self._receiving.clear()
        self._peers.clear()
        for each in self._sockets.values():
            each.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    # Moving bytes.

    def _gather(self, what: str, parts: torch.Tensor) -> None:
        receives = [_Receive(peer.common, parts[rank]) for rank, peer in self._others()]
        self._move(what, [_Send(self._common, parts[self.rank])], receives)

    def _move(self, what: str, sends: list[_Send], receives: list[_Receive]) -> None:
        """Send and receive, in pieces of a slot, until all of it has been issued.

        Every rank sends and receives in the same loop, so that no rank waits for another one that
        waits for it. On a GPU, what is sent is copied on a lane of its own: copies in both
        directions run at the same time.
        """
        filling: deque[tuple[Ticket[None], _Outbox]] = deque()
        with self.watch.call(what):
            start = self._device.record()
            while True:
                sends = [each for each in sends if each.done < each.data.numel()]
                receives = [each for each in receives if each.done < each.data.numel()]
                if not (sends or receives or filling):
                    return
                advanced = self._send_pieces(sends, filling, start)
                advanced |= self._receive_pieces(receives)
                advanced |= self._post_slots(filling)
                advanced |= self._release_slots()
                if not advanced:
                    self._wait(sends, receives, filling)

    def _send_pieces(
        self, sends: list[_Send], filling: deque[tuple[Ticket[None], _Outbox]], start: Ticket[None]
    ) -> bool:
        advanced = False
        for send in sends:
            slot = send.box.free_slot()
            if slot is None:
                continue
            piece = send.data[send.done : send.done + slot.numel()]
            with self._device.lane("ranks send"):
                self._device.order_after(start)
                self._device.copy(slot[: piece.numel()], piece)
                filling.append((self._device.record(), send.box))
            send.box.used += 1
            send.done += piece.numel()
            advanced = True
        return advanced

    def _receive_pieces(self, receives: list[_Receive]) -> bool:
        advanced = False
        for receive in receives:
            slot = receive.box.filled_slot()
            if slot is None:
                continue
            into = receive.data[receive.done : receive.done + slot.numel()]
            self._device.copy(into, slot[: into.numel()])
            self._receiving.append((self._device.record(), receive.box))
            receive.done += into.numel()
            advanced = True
        return advanced

    def _post_slots(self, filling: deque[tuple[Ticket[None], _Outbox]]) -> bool:
        """Tell the readers about slots whose copies have ended. They end in order."""
        advanced = False
        while filling and filling[0][0].done():
            filling.popleft()[1].post()
            advanced = True
        return advanced

    def _release_slots(self, *, wait: bool = False) -> bool:
        """Release the slots that have been copied; with `wait`, wait for all copies."""
        advanced = False
        while self._receiving:
            ticket, box = self._receiving[0]
            if wait:
                ticket.wait()
            if not ticket.done():
                break
            self._receiving.popleft()
            box.release()
            advanced = True
        return advanced

    def _wait(
        self, sends: list[_Send], receives: list[_Receive],
        filling: deque[tuple[Ticket[None], _Outbox]],
    ) -> None:  # fmt: skip
        """Sleep until something can advance; raise PeerLostError if a rank is lost."""
        if filling:
            filling[0][0].wait()
        elif self._receiving:
            self._receiving[0][0].wait()
        else:
            fds = [fd for send in sends for fd in send.box.freed]
            self._poll([*fds, *(receive.box.filled for receive in receives)])

    def _poll(self, fds: Sequence[int]) -> None:
        poll = select.poll()
        for fd in (*fds, self.watch.lost_fd):
            poll.register(fd, select.POLLIN)
        poll.poll(1000 * SLICE_SECONDS)
        self.watch.check()

    def _others(self) -> list[tuple[int, _Peer]]:
        # From the next rank on: with the same order on all ranks, all would write to rank 0 first.
        return sorted(self._peers.items(), key=lambda each: (each[0] - self.rank) % self.world)

    # Opening.

    def _open_rings(self, nbytes: int) -> None:
        """Create this rank's rings, and open those of the others."""
        common_nbytes, own_nbytes = self._slot_nbytes(nbytes)
        common = self._mailbox_slots(self.mailbox, common_nbytes)
        rings = [self._mailbox_slots(self.mailbox, own_nbytes) for _ in range(self.world - 1)]
        events = {rank: [self._eventfd() for _ in range(5)] for rank in self._sockets}
        for rank, fds in events.items():
            assert self.mailbox.fd is not None
            self._send_fds(rank, [self.mailbox.fd, *fds])
        received = {rank: self._receive_fds(rank, 6) for rank in self._sockets}
        self._common = _Outbox(
            common, [fds[0] for fds in events.values()], [fds[1] for fds in events.values()]
        )
        self._peers: dict[int, _Peer] = {}
        for rank, (mailbox_fd, *theirs) in received.items():
            mailbox = Arena.open(mailbox_fd, self._device.pinned)
            os.close(mailbox_fd)
            self._fds += theirs
            if mailbox.stats.capacity != self.mailbox.stats.capacity:
                raise EngineError(f"rank {rank} has a mailbox of another size")
            their_common = self._mailbox_slots(mailbox, common_nbytes)
            their_rings = [
                self._mailbox_slots(mailbox, own_nbytes) for _ in range(self.world - 1)
            ]  # of all ranks but theirs, in the order of ranks
            mine = events[rank]
            self._peers[rank] = _Peer(
                mailbox,
                _Inbox(their_common, theirs[0], theirs[1]),
                _Inbox(their_rings[self.rank - (self.rank > rank)], theirs[2], theirs[3]),
                _Outbox(rings[rank - (rank > self.rank)], [mine[2]], [mine[3]]),
                arrive=mine[4],
                arrived=theirs[4],
            )

    def _slot_nbytes(self, nbytes: int) -> tuple[int, int]:
        """Return the size of a slot for all ranks, and of a slot for one."""
        common = nbytes // 2 // DEPTH // _ALIGNMENT * _ALIGNMENT
        own = nbytes // 2 // DEPTH // max(1, self.world - 1) // _ALIGNMENT * _ALIGNMENT
        if not own:
            needed = 2 * DEPTH * (self.world - 1) * _ALIGNMENT
            raise EngineError(
                f"a mailbox of {nbytes} bytes is too small for {self.world} ranks, which need "
                f"{needed} bytes or more"
            )
        return common, own

    def _mailbox_slots(self, mailbox: Arena, nbytes: int) -> list[torch.Tensor]:
        make = mailbox.tensor
        return [make(nbytes, torch.uint8, align=_ALIGNMENT, name="a slot") for _ in range(DEPTH)]

    def _eventfd(self) -> int:
        fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._fds.append(fd)
        return fd

    def _exchange_arenas(self, own: Sequence[Arena]) -> list[list[Arena]]:
        """Return the arenas of all ranks, by rank. All ranks pass equally many."""
        found: dict[int, list[Arena]] = {rank: [] for rank in range(self.world)}
        found[self.rank] = list(own)
        # In parts: a process may have few file descriptors open at the same time.
        for first in range(0, len(own), _MOST_FDS):
            some = own[first : first + _MOST_FDS]
            fds = [arena.fd for arena in some if arena.fd is not None]
            assert len(fds) == len(some), "an arena that is to be shared must be in a memory file"
            for rank in self._sockets:
                self._send_fds(rank, fds)
            for rank in self._sockets:
                for fd in self._receive_fds(rank, len(some)):
                    found[rank].append(Arena.open(fd, self._device.pinned))
                    os.close(fd)
        return [found[rank] for rank in range(self.world)]

    def _send_fds(self, rank: int, fds: Sequence[int]) -> None:
        try:
            socket.send_fds(self._sockets[rank], [_COUNT.pack(len(fds))], fds)
        except OSError as error:
            self.watch.explain(error)

    def _receive_fds(self, rank: int, count: int) -> list[int]:
        made = self._sockets[rank]
        with self.watch.call("share memory"):
            while not select.select([made], [], [], 0)[0]:
                self._poll([made.fileno()])
            try:
                message, fds, _, _ = socket.recv_fds(made, _COUNT.size, count)
            except OSError as error:
                self.watch.explain(error)
            if message == _COUNT.pack(count) and len(fds) == count:
                for fd in fds:
                    os.set_inheritable(fd, False)
                return list(fds)
            for fd in fds:
                os.close(fd)
            self.watch.check()
            raise PeerLostError(rank, "did not share its memory")


def _take(fd: int) -> bool:
    """Take one from the count of an eventfd, if it is not 0."""
    with suppress(BlockingIOError):
        os.eventfd_read(fd)
        return True
    return False


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
