"""Commands by which rank 0 leads the other ranks of a run.

Rank 0 runs the session: it reads the data, decides what happens next, talks to the user and writes
all files but shards. Before it calls the engine, it sends the others a command, and they make the
same call. Every decision is therefore made once. A command is one fixed-size message, in which the
other ranks say whether somebody wants to stop the run, and for some commands the bytes after it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from penstock.train.signals import StopRequest

if TYPE_CHECKING:
    import torch

    from penstock.engine.transport import Transport

_MESSAGE = struct.Struct("<BBq")
"""The command of rank 0, the signal that a rank has received (0 for none), and how many bytes rank
0 sends next."""

_HEADER = struct.Struct("<q")


class Command(IntEnum):
    """What all ranks do next."""

    CHECK_OUT = 1
    """Look for a file that rank 0 has written, and compare the settings."""
    PREPARE = 2
    """Prepare the engine, and read a checkpoint if the run is resumed."""
    STEP = 3
    """Take a step with a batch."""
    EVALUATE = 4
    """Begin an evaluation."""
    BATCH = 5
    """Evaluate a batch."""
    LAST_BATCH = 6
    """End the evaluation."""
    WRITE = 7
    """Write weights and states to a folder."""
    LISTEN = 8
    """Do nothing: rank 0 asks for signals."""
    END = 9
    """End the run."""
    PROFILE = 10
    """Record the next steps."""


class RankLeader:
    """Rank 0's side. With a single rank, nothing is sent."""

    def __init__(self, ranks: Transport, stop: StopRequest) -> None:
        self.ranks, self._stop = ranks, stop

    @property
    def stop_requested(self) -> bool:
        """Whether somebody wants to stop the run: a signal was sent to this or any other rank."""
        self.wait_for_ranks()
        return self._stop.requested

    def wait_for_ranks(self) -> None:
        """Return when all ranks have done everything that they were told before."""
        self._send(Command.LISTEN)

    def profile(self, folder: str, origin: float, steps: int) -> None:
        """Let the other ranks record steps, next to the recording of this one."""
        fields = {"folder": folder, "origin": origin, "steps": steps}
        self._send(Command.PROFILE, _to_bytes(fields))

    def check_out(self, path: str, settings: Mapping[str, Any]) -> None:
        self._send(Command.CHECK_OUT, _to_bytes({"path": path, "settings": settings}))

    def prepare(self, settings: Mapping[str, Any], checkpoint: str | None) -> None:
        self._send(Command.PREPARE, _to_bytes({"settings": settings, "checkpoint": checkpoint}))

    def step(self, batch: Mapping[str, torch.Tensor], rates: Sequence[float]) -> None:
        """Send a batch and the learning rate of each param group."""
        if self.ranks.world > 1:
            self._send(Command.STEP, _pack_batch(batch, {"rates": list(rates)}))

    def evaluate(self) -> None:
        self._send(Command.EVALUATE)

    def batch(self, batch: Mapping[str, torch.Tensor]) -> None:
        if self.ranks.world > 1:
            self._send(Command.BATCH, _pack_batch(batch, {}))

    def last_batch(self) -> None:
        self._send(Command.LAST_BATCH)

    def write(self, folder: str, *, optimizer: bool) -> None:
        self._send(Command.WRITE, _to_bytes({"folder": folder, "optimizer": optimizer}))

    def end(self, code: int) -> None:
        self._send(Command.END, _to_bytes({"code": code}))

    def _send(self, command: Command, data: bytes = b"") -> None:
        if self.ranks.world == 1:
            return
        messages = self.ranks.meet(_MESSAGE.pack(command, 0, len(data)))
        for message in messages[1:]:
            _, number, _ = _MESSAGE.unpack(message)
            if number:
                self._stop.request(number)
        if data:
            _broadcast(self.ranks, data, len(data))


class RankFollower:
    """The side of every other rank."""

    def __init__(self, ranks: Transport, stop: StopRequest) -> None:
        self.ranks, self._stop = ranks, stop

    def receive(self) -> tuple[Command, bytes]:
        """Wait for a command of rank 0."""
        own = _MESSAGE.pack(0, self._stop.signal or 0, 0)
        command, _, nbytes = _MESSAGE.unpack(self.ranks.meet(own)[0])
        return Command(command), _broadcast(self.ranks, b"", nbytes) if nbytes else b""


def read_fields(data: bytes) -> dict[str, Any]:
    """Read the fields of a command."""
    fields: dict[str, Any] = json.loads(data)
    return fields


def read_batch(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read the batch of a command, and the fields next to it."""
    from safetensors.torch import load

    (length,) = _HEADER.unpack_from(data)
    start = _HEADER.size + length
    return load(data[start:]), read_fields(data[_HEADER.size : start])


def _pack_batch(batch: Mapping[str, torch.Tensor], fields: Mapping[str, Any]) -> bytes:
    from safetensors.torch import save

    header = _to_bytes(fields)
    tensors = {name: tensor.contiguous() for name, tensor in batch.items()}
    return _HEADER.pack(len(header)) + header + save(tensors)


def _to_bytes(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def _broadcast(ranks: Transport, data: bytes, nbytes: int) -> bytes:
    """Return the bytes of rank 0, whose number all ranks know."""
    import torch

    values = torch.empty(nbytes, dtype=torch.uint8)
    if ranks.rank == 0:
        values.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    ranks.broadcast(values, 0)
    return bytes(values.numpy())
