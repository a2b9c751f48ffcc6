"""Sockets between all ranks of a run, which only these ranks can open.

Ranks find each other through the store of torch.distributed. Each pair of ranks has one connection:
a Unix socket if all ranks run on one machine, else TCP. Both ends prove that they know a random
token from the store, so that a connection from elsewhere is never taken for a rank. Nothing that
arrives is unpickled or executed.

A Unix socket has an abstract name: no file is left behind, however its processes end.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from penstock.errors import PeerLostError

CONNECT_SECONDS = 120.0
"""How long a rank waits for the others when a run starts."""

HANDSHAKE_SECONDS = 5.0
"""How long one connection may take to prove that it is a rank. Others wait meanwhile."""

_MAGIC = b"penstock"
_HELLO = struct.Struct("<8sI16s")  # magic, rank, nonce
_PROOF = struct.Struct("<16s32s")  # nonce, proof


@dataclass(frozen=True, slots=True)
class PeerSockets:
    """The connections of one rank to all others."""

    rank: int
    world: int
    one_machine: bool
    """Whether all ranks run on one machine, with one network."""
    hosts: tuple[str, ...]
    """Name of each rank's machine, by rank."""
    sockets: dict[int, socket.socket]
    """The connection to each other rank, by rank; blocking, without a timeout."""

    def close(self) -> None:
        for each in self.sockets.values():
            each.close()


def connect_ranks(
    store: Store, rank: int, world: int, *, seconds: float = CONNECT_SECONDS
) -> PeerSockets:
    """Connect this rank to all others. All ranks must call this, with the same `store`.

    Raises PeerLostError, with the number of the rank, if one does not connect within `seconds`.
    """
    deadline = time.monotonic() + seconds
    mine = json.dumps({"machine": machine_identity(), "host": socket.gethostname()})
    store.set(f"machine {rank}", mine)
    found = [_read_record(store, f"machine {peer}", peer, deadline) for peer in range(world)]
    one_machine = len({each.get("machine") for each in found}) == 1
    if rank == 0:
        store.set("token", secrets.token_hex(32))
    token = _read(store, "token", 0, deadline)
    connected: dict[int, socket.socket] = {}
    try:
        with _listen(_own_address(store) if not one_machine else None) as listener:
            store.set(f"address {rank}", json.dumps(listener.getsockname()[:2]
                      if not one_machine else listener.getsockname()[1:].decode()))  # fmt: skip
            for peer in range(rank):
                address = _read_address(store, peer, deadline)
                connected[peer] = _connect(address, token, rank, peer, deadline)
            _accept(listener, token, rank, set(range(rank + 1, world)), connected, deadline)
    except BaseException:
        for each in connected.values():
            each.close()
        raise
    hosts = tuple(str(each.get("host")) for each in found)
    return PeerSockets(rank, world, one_machine, hosts, connected)


def machine_identity() -> str:
    """Return an identifier that processes share if abstract Unix sockets connect them.

    Containers on one machine have networks of their own, and count as machines of their own.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


# The store.


def _read(store: Store, key: str, peer: int, deadline: float) -> bytes:
    left = max(0.001, deadline - time.monotonic())
    try:
        store.wait([key], timedelta(seconds=left))
        return bytes(store.get(key))
    except RuntimeError as error:  # which includes torch's errors of the store
        raise PeerLostError(peer, "did not start in time, or the launcher ended") from error


def _read_record(store: Store, key: str, peer: int, deadline: float) -> dict[str, object]:
    with suppress(ValueError):
        found = json.loads(_read(store, key, peer, deadline))
        if isinstance(found, dict):
            return found
    raise PeerLostError(peer, "published something that is not a machine")


def _read_address(store: Store, peer: int, deadline: float) -> str | tuple[str, int]:
    with suppress(ValueError):
        match json.loads(_read(store, f"address {peer}", peer, deadline)):
            case str(name):
                return f"\0{name}"
            case [str(host), int(port)]:
                return host, port
    raise PeerLostError(peer, "published something that is not an address")


def _own_address(store: Store) -> str:
    """Return the address by which other machines reach this one.

    That is the one from which this machine reaches the store, or MASTER_ADDR.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    target = store.host if isinstance(store, TCPStore) else os.environ.get("MASTER_ADDR")
    for host in (target, socket.gethostname()):
        with suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing: it only selects a route
                return str(probe.getsockname()[0])
    return "0.0.0.0"


# Connections.


def _listen(address: str | None) -> socket.socket:
    if address is None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0penstock-{secrets.token_hex(16)}")
    else:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((address, 0))
    listener.listen(1024)
    return listener


def _connect(
    address: str | tuple[str, int], token: bytes, rank: int, peer: int, deadline: float
) -> socket.socket:
    left = max(0.001, deadline - time.monotonic())
    try:
        if isinstance(address, str):
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.settimeout(left)
            made.connect(address)
        else:
            made = socket.create_connection(address, timeout=left)
    except OSError as error:
        raise PeerLostError(peer, f"cannot be reached at {address}: {error}") from error
    try:
        nonce = secrets.token_bytes(16)
        made.sendall(_HELLO.pack(_MAGIC, rank, nonce))
        theirs, proof = _PROOF.unpack(_receive(made, _PROOF.size))
        if not hmac.compare_digest(proof, _prove(token, b"accept", nonce, rank, peer)):
            raise PeerLostError(peer, f"did not answer at {address}: something else did")
        made.sendall(_prove(token, b"connect", theirs, rank, peer))
        made.settimeout(None)
    except OSError as error:
        made.close()
        raise PeerLostError(peer, f"did not complete its connection: {error}") from error
    except BaseException:
        made.close()
        raise
    return made


def _accept(
    listener: socket.socket, token: bytes, rank: int, expected: set[int],
    connected: dict[int, socket.socket], deadline: float,
) -> None:  # fmt: skip
    """Accept one connection of each expected rank; drop whatever else connects."""
    while expected:
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            made, _ = listener.accept()
        except OSError as error:  # which includes the timeout
            raise PeerLostError(min(expected), "did not connect in time") from error
        peer = None
        with suppress(OSError, struct.error):
            peer = _check_caller(made, token, rank, expected)
        if peer is None:
            made.close()
        else:
            expected.remove(peer)
            connected[peer] = made


def _check_caller(
    made: socket.socket, token: bytes, rank: int, expected: Sequence[int] | set[int]
) -> int | None:
    """Return the rank at the other end, or None if it is none of those expected."""
    made.settimeout(HANDSHAKE_SECONDS)
    magic, peer, theirs = _HELLO.unpack(_receive(made, _HELLO.size))
    if magic != _MAGIC or peer not in expected:
        return None
    nonce = secrets.token_bytes(16)
    made.sendall(_PROOF.pack(nonce, _prove(token, b"accept", theirs, peer, rank)))
    proof = _receive(made, 32)
    if not hmac.compare_digest(proof, _prove(token, b"connect", nonce, peer, rank)):
        return None
    made.settimeout(None)
    return int(peer)


def _prove(token: bytes, role: bytes, nonce: bytes, caller: int, called: int) -> bytes:
    return hmac.digest(token, role + nonce + struct.pack("<II", caller, called), "sha256")


def _receive(made: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        more = made.recv(nbytes - len(found))
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        found += more
    return found
