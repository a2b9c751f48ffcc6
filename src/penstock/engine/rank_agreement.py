"""Between steps, ranks share bytes and agree whether all of them can go on."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping

import torch
from safetensors.torch import load, save

from penstock.checkpoint.checksums import crc32c
from penstock.checkpoint.disk import bytes_of
from penstock.checkpoint.errors import (
    SAVE_FAILURES,
    UNREADABLE,
    DamagedOnRankError,
    SaveOnRankError,
)
from penstock.checkpoint.writer import PartsError
from penstock.engine.transport import Transport
from penstock.errors import PeerLostError, RankFailedError

_LENGTH = struct.Struct("<q")

_SUM = struct.Struct("<I")

_OUTCOME = struct.Struct("<BH2000s")
"""What a rank says about its part of some work: the kind of failure, and its message."""

_FINE, _FAILED, _UNREADABLE, _NOT_SAVED = range(4)


def share_bytes(ranks: Transport, data: bytes = b"", source: int = 0) -> bytes:
    """Return what rank `source` passes as `data`, on all ranks."""
    if ranks.world == 1:
        return data
    (nbytes,) = _LENGTH.unpack(ranks.meet(_LENGTH.pack(len(data)))[source])
    values = torch.zeros(nbytes, dtype=torch.uint8)
    if ranks.rank == source and nbytes:
        values.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if nbytes:
        ranks.broadcast(values, source)
    return bytes(values.numpy())


def gather_tensors(ranks: Transport, own: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the host tensors of all ranks by name. No two ranks may use the same name."""
    if ranks.world == 1:
        return own
    sent, found = save({name: tensor.contiguous() for name, tensor in own.items()}), dict(own)
    for source in range(ranks.world):
        received = share_bytes(ranks, sent, source)
        if source != ranks.rank:
            found |= load(received)
    return found


def take_weights_of_rank_0(
    ranks: Transport, own: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Replace weights that differ between ranks by those of rank 0. All have the same names.

    Every process of a script makes its own model, and draws new weights, such as those of an
    adapter, from a seed of its own.
    """
    if ranks.world == 1:
        return own
    sums = b"".join(_SUM.pack(crc32c(bytes_of(t.cpu().contiguous()))) for t in own.values())
    everyones = [share_bytes(ranks, sums, source) for source in range(ranks.world)]
    found = dict(own)
    for number, (name, tensor) in enumerate(own.items()):
        at = slice(number * _SUM.size, (number + 1) * _SUM.size)
        if len({each[at] for each in everyones}) > 1:
            found[name] = tensor.cpu().contiguous().clone()
            ranks.broadcast(found[name].view(-1), 0)
    return found


@contextlib.contextmanager
def all_or_none(ranks: Transport) -> Iterator[None]:
    """Run a block on every rank, and raise an error on all of them if it fails on one.

    A block that fails must not leave out collective calls that the others make. A rank raises its
    own error if it has one, otherwise that of the first rank that failed: DamagedOnRankError if
    that rank could not read a checkpoint, SaveOnRankError if it could not write one, and otherwise
    RankFailedError.
    """
    if ranks.world == 1:
        yield
        return
    failed: Exception | None = None
    try:
        yield
    except (PeerLostError, PartsError):
        raise
    except Exception as error:
        failed = error
    except BaseException as error:
        ranks.abort(error)
        raise
    outcomes = [_OUTCOME.unpack(each) for each in ranks.meet(_pack_outcome(failed))]
    if failed is not None:
        raise failed
    for rank, (kind, length, text) in enumerate(outcomes):
        if kind != _FINE:
            errors = {_UNREADABLE: DamagedOnRankError, _NOT_SAVED: SaveOnRankError}
            raise errors.get(kind, RankFailedError)(rank, text[:length].decode(errors="replace"))


def _pack_outcome(failed: Exception | None) -> bytes:
    if failed is None:
        return _OUTCOME.pack(_FINE, 0, b"")
    kind = _FAILED
    if isinstance(failed, UNREADABLE):
        kind = _UNREADABLE
    elif isinstance(failed, SAVE_FAILURES):
        kind = _NOT_SAVED
    text = (str(failed) or type(failed).__name__).encode()[:2000]
    return _OUTCOME.pack(kind, len(text), text)
