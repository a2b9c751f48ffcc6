"""Notice when another rank ends, fails or stalls, and name it.

Every rank holds a socket to each other rank (`peer_sockets`). A thread reads them:

- **A rank that ends** closes its sockets, also after `kill -9`: the operating system does it. All
  collective calls of the others then raise `PeerLostError` with the number of that rank.
- **A rank that fails** sends its message first, so that the others can show the reason.
- **A cut link** is noticed by TCP: ranks send a heartbeat every second, and a connection is closed
  when nothing was acknowledged for `link_seconds`. The operating system acknowledges also for a
  process that is stopped, so a stalled rank is never mistaken for a cut link.
- **A rank that stalls** (SIGSTOP, a hanging disk) is named by those that wait for it. Heartbeats
  carry the number of collective calls that a rank has begun, so the others know who is behind. Only
  after `silent_seconds` or `stall_seconds` is that an error.

A process may be inside a call that nothing can interrupt, such as a kernel on the GPU that waits
for a lost rank. It is ended `exit_seconds` after the loss is known, and its message is printed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from penstock.distributed.peer_sockets import PeerSockets
from penstock.errors import PeerLostError

SLICE_SECONDS = 0.2
"""How long a thread waits for torch.distributed before it checks whether a rank was lost."""

EXPLAIN_SECONDS = 2.0
"""How long a failed call waits for the name of the rank that caused it."""

CLEANUP_SECONDS = 2.0
"""How long the removal of files may take before a process is ended."""

EXIT_CODE = 1

_HEAD = struct.Struct("<BQiH")  # kind, calls begun, rank that is the cause, bytes of text
_ALIVE, _FAILED, _LEFT = 1, 2, 3
_MOST_TEXT = 4000
_ENDED = "its process ended without a message (killed, or crashed)"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """Time limits, in seconds. None of them changes a result."""

    heartbeat_seconds: float = 1.0
    """Time between two heartbeats."""
    link_seconds: float = 5.0
    """How long a machine may be unreachable before its ranks count as lost."""
    name_after_seconds: float = 30.0
    """After how long the rank that the others wait for is named."""
    silent_seconds: float = 600.0
    """After how long waiting for a rank whose process does not respond is an error."""
    stall_seconds: float = 6 * 3600.0
    """After how long waiting for a rank that has not made a call is an error. It may be at work:
    rank 0 reads and tokenizes all data while the others wait for it."""
    exit_seconds: float = 5.0
    """How long a process may continue after a rank was lost, before it is ended."""


@dataclass(slots=True)
class _Peer:
    """What is known of another rank. Only the thread of the watch changes it."""

    rank: int
    socket: socket.socket
    heard_at: float
    calls: int = 0
    left: bool = False
    """Whether it has ended in order."""
    arrived: bytearray = field(default_factory=bytearray)


class PeerWatch:
    """Watches all other ranks from a thread, until `close`."""

    def __init__(
        self,
        peers: PeerSockets,
        settings: WatchSettings | None = None,
        *,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self.settings = settings or WatchSettings()
        self.rank, self.world, self.hosts = peers.rank, peers.world, peers.hosts
        self.on_loss: list[Callable[[PeerLostError], None]] = []
        """Called once, from the thread of the watch, when a rank is lost."""
        self.before_exit: list[Callable[[], None]] = []
        """Called before the process is ended: they remove files that would stay."""
        self.idle = False
        """Whether this rank has nothing to do until another one makes a call. It then waits as long
        as that takes, and names only ranks that do not respond."""
        self._notify = notify or _print_line
        self._one_machine = peers.one_machine
        now = time.monotonic()
        self._peers = {r: _Peer(r, s, now) for r, s in sorted(peers.sockets.items())}
        # Guards everything below, and each send: messages of two threads must not mix.
        self._lock = threading.Lock()
        self._unsent: dict[int, bytearray] = {rank: bytearray() for rank in self._peers}
        self._calls = 0
        self._inside: tuple[str, float] | None = None  # the current call, and since when
        self._lost: PeerLostError | None = None
        self._lost_at = 0.0
        self._named_at = 0.0  # how long a wait was when its rank was last named
        self._known = threading.Event()
        self._closed = False
        self.lost_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """A file descriptor that is readable once a rank is lost."""
        weakref.finalize(self, os.close, self.lost_fd)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        for peer in self._peers.values():
            self._prepare(peer.socket)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        _watches.add(self)
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._run, name="penstock peer watch", daemon=True)
        self._thread.start()

    # For transports.

    @contextlib.contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Count a collective call; raise PeerLostError if a rank is lost or has left before it."""
        with self._lock:
            self._calls += 1
            self._inside, self._named_at = (what, time.monotonic()), 0.0
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._inside = None

    def check(self) -> None:
        """Raise PeerLostError if a rank was lost."""
        lost = self._lost
        if lost is not None:  # a new error: several threads may raise it
            raise PeerLostError(lost.rank, lost.problem, lost.host)
        for peer in self._peers.values():
            # A rank may leave while this one still receives what it sent in the last call.
            if peer.left and peer.calls < self._calls:
                raise self._error(peer.rank, "has ended before this rank did")

    def wait(self, work: dist.Work) -> None:
        """Wait for a call of torch.distributed that has been started.

        Raises PeerLostError once a rank is lost, although the call itself may never end.
        """
        while True:
            # Asked before the wait: a call may end between a wait that times out and the question.
            ended = work.is_completed()
            try:
                work.wait(timedelta(seconds=SLICE_SECONDS))
                return
            except RuntimeError as error:
                if ended:
                    self.explain(error)
            self.check()

    def explain(self, error: BaseException) -> NoReturn:
        """Raise PeerLostError for the failure of a collective call.

        The socket of a rank that ended is read at about the same time, so its name may be known
        only a moment later.
        """
        self._known.wait(EXPLAIN_SECONDS)
        self.check()
        raise PeerLostError(None, str(error)) from error

    def fail(self, error: BaseException) -> None:
        """Tell all others that this rank cannot continue, and why. Later calls fail here too."""
        cause = error.rank if isinstance(error, PeerLostError) else None
        problem = error.problem if isinstance(error, PeerLostError) else _describe(error)
        rank = self.rank if cause is None else cause
        with self._lock:
            if self._closed or self._lost is not None:
                return  # the others know, or will be told what this rank knows
            self._lost = self._error(rank, problem)
        self._tell_all(_FAILED, rank, problem)
        os.eventfd_write(self.lost_fd, 1)
        self._known.set()

    @property
    def lost(self) -> PeerLostError | None:
        """The first loss; None if all ranks are well."""
        return self._lost

    def close(self) -> None:
        """Leave in order. The others may continue until they make another collective call."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._tell_all(_LEFT, self.rank, "")
        os.eventfd_write(self._wake_fd, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self._close_files()
        atexit.unregister(self.close)

    # The thread.

    def _run(self) -> None:
        settings, beat_at, last = self.settings, 0.0, time.monotonic()
        pause = min(0.25, settings.heartbeat_seconds / 2, settings.exit_seconds / 4)
        while not self._closed:
            ready = self._selector.select(pause)
            now = time.monotonic()
            if now - last > pause + settings.heartbeat_seconds:
                self._forgive(now - last)  # this process was stopped itself
            last = now
            for key, _ in ready:
                if isinstance(key.data, _Peer):
                    self._read(key.data)
            if now >= beat_at:
                beat_at = now + settings.heartbeat_seconds
                self._tell_all(_ALIVE, self.rank, "")
            self._look_for_stalls(now)
            self._end_if_stuck(now)

    def _read(self, peer: _Peer) -> None:
        try:
            found = peer.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            self._disconnect(peer, self._broken_link(error))
            return
        peer.arrived += found
        while peer.socket.fileno() >= 0 and len(peer.arrived) >= _HEAD.size:
            kind, calls, cause, length = _HEAD.unpack_from(peer.arrived)
            if kind not in (_ALIVE, _FAILED, _LEFT) or length > _MOST_TEXT:
                self._disconnect(peer, "sent something that is not a message of a rank")
                return
            if len(peer.arrived) < _HEAD.size + length:
                break
            text = bytes(peer.arrived[_HEAD.size : _HEAD.size + length])
            del peer.arrived[: _HEAD.size + length]
            self._handle(peer, kind, calls, cause, text.decode(errors="replace"))
        if not found and peer.socket.fileno() >= 0:
            self._disconnect(peer, _ENDED)

    def _handle(self, peer: _Peer, kind: int, calls: int, cause: int, text: str) -> None:
        peer.heard_at, peer.calls = time.monotonic(), calls
        if kind == _LEFT:
            peer.left = True
        elif kind == _FAILED:
            self._lose(cause if 0 <= cause < self.world else peer.rank, text)

    def _disconnect(self, peer: _Peer, problem: str) -> None:
        self._selector.unregister(peer.socket)
        with self._lock:
            peer.socket.close()
        if not peer.left:
            self._lose(peer.rank, problem)

    def _broken_link(self, error: OSError) -> str:
        if isinstance(error, TimeoutError):
            seconds = self.settings.link_seconds
            return f"its machine has not been reachable for {seconds:.0f} s (the link may be cut)"
        if isinstance(error, ConnectionError):  # it ended before it had read all heartbeats
            return _ENDED
        return f"the connection broke: {error.strerror or error}"

    def _lose(self, rank: int, problem: str) -> None:
        """Make all calls fail, here and on the other ranks."""
        with self._lock:
            if self._lost is not None or self._closed:
                return
            self._lost, self._lost_at = self._error(rank, problem), time.monotonic()
        os.eventfd_write(self.lost_fd, 1)
        self._known.set()
        # All others may not see the same: a link may be cut between two machines only.
        self._tell_all(_FAILED, rank, problem)
        for call in self.on_loss:
            with contextlib.suppress(Exception):
                call(self._lost)

    def _forgive(self, seconds: float) -> None:
        """Do not count the time in which this process itself was stopped."""
        for peer in self._peers.values():
            peer.heard_at += seconds
        with self._lock:
            if self._inside is not None:
                self._inside = (self._inside[0], self._inside[1] + seconds)
            self._lost_at += seconds

    def _look_for_stalls(self, now: float) -> None:
        with self._lock:
            inside, calls = self._inside, self._calls
        if inside is None or self._lost is not None:
            return
        what, waited = inside[0], now - inside[1]
        if waited < self.settings.name_after_seconds:
            return
        stalled, limit = self._stalled(now, calls)
        if not stalled:
            return
        if waited >= limit:
            self._lose(min(stalled), f"{stalled[min(stalled)]} ({what}, {waited:.0f} s)")
            return
        # One line is enough: that of the first rank that does not stall.
        speaks = all(rank in stalled for rank in range(self.rank))
        if speaks and waited >= 2 * self._named_at:
            self._named_at = waited
            for rank, why in stalled.items():
                self._notify(
                    f"waiting for {self._name(rank)} since {waited:.0f} s ({what}): {why}. "
                    f"It is an error after {limit:.0f} s"
                )

    def _stalled(self, now: float, calls: int) -> tuple[dict[int, str], float]:
        """Return the ranks for which a call waits, what is known of each, and the time limit."""
        silent = {
            p.rank: f"it has not responded for {now - p.heard_at:.0f} s"
            for p in self._peers.values()
            if not p.left and now - p.heard_at > 5 * self.settings.heartbeat_seconds
        }
        if silent or self.idle:
            return silent, self.settings.silent_seconds
        behind = {
            p.rank: "its process responds, but has not made this call"
            for p in self._peers.values()
            if p.calls < calls
        }
        return behind, self.settings.stall_seconds

    def _end_if_stuck(self, now: float) -> None:
        if self._lost is None or not self._lost_at or self._closed:
            return
        if now - self._lost_at < self.settings.exit_seconds:
            return
        cleanup = threading.Thread(target=self._clean_up, daemon=True)
        cleanup.start()
        cleanup.join(CLEANUP_SECONDS)
        self._notify(
            f"rank {self.rank}: {self._lost}. This process did not end by itself within "
            f"{self.settings.exit_seconds:.0f} s, and is ended now"
        )
        sys.stdout.flush()
        os._exit(EXIT_CODE)

    def _clean_up(self) -> None:
        for call in self.before_exit:
            with contextlib.suppress(Exception):
                call()

    # Sending.

    def _tell_all(self, kind: int, cause: int, text: str) -> None:
        encoded = text.encode(errors="replace")[:_MOST_TEXT]
        with self._lock:
            message = _HEAD.pack(kind, self._calls, cause, len(encoded)) + encoded
            for rank, peer in self._peers.items():
                if peer.socket.fileno() >= 0:
                    self._send(peer, self._unsent[rank], message)

    def _send(self, peer: _Peer, unsent: bytearray, message: bytes) -> None:
        # A rank that stalls long enough does not empty its socket. Heartbeats to it are not kept.
        if unsent and message[0] == _ALIVE:
            message = b""
        unsent += message
        with contextlib.suppress(OSError):  # reading the socket reports what is wrong with it
            del unsent[: peer.socket.send(unsent)]

    def _prepare(self, made: socket.socket) -> None:
        made.setblocking(False)
        if made.family == socket.AF_UNIX:
            return
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        milliseconds = int(1000 * self.settings.link_seconds)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    # Words.

    def _error(self, rank: int, problem: str) -> PeerLostError:
        return PeerLostError(rank, problem, None if self._one_machine else self.hosts[rank])

    def _name(self, rank: int) -> str:
        return f"rank {rank}" if self._one_machine else f"rank {rank} on {self.hosts[rank]}"

    def _close_files(self) -> None:
        for peer in self._peers.values():
            # With unread heartbeats, the other end would see a broken connection.
            with contextlib.suppress(OSError):
                while peer.socket.recv(65536):
                    pass
            peer.socket.close()
        self._selector.close()
        os.close(self._wake_fd)


_watches: weakref.WeakSet[PeerWatch] = weakref.WeakSet()


def _forget_sockets() -> None:
    """Close the sockets in a forked child: they would stay open when its parent is killed."""
    for watch in _watches:
        for peer in watch._peers.values():
            with contextlib.suppress(OSError):
                peer.socket.close()
        watch._closed = True


os.register_at_fork(after_in_child=_forget_sockets)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _print_line(line: str) -> None:
    print(f"penstock: {line}", file=sys.stderr, flush=True)
