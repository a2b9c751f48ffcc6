"""One process of a group of ranks.

    python -m tests.distributed.rank_worker RANK WORLD FOLDER TRANSPORT WAYS

The group is also divided into smaller groups, each of its first ranks. Every group trains, and its
ranks write the digest of the result to `FOLDER/<ranks>.<rank>.json`. Then the last rank dies, and
the others write what they were told to `FOLDER/lost.<rank>`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.distributed.gloo_ranks import GlooTransport
from penstock.distributed.nccl_ranks import NcclTransport
from penstock.distributed.peer_sockets import connect_ranks
from penstock.distributed.peer_watch import PeerWatch, WatchSettings
from penstock.distributed.shared_ranks import SharedTransport
from penstock.engine.device import CpuDevice, pick_device
from penstock.engine.transport import Transport
from penstock.errors import PeerLostError
from tests.distributed.conformance import check_transport
from tests.equivalence.runs import DRAM, FEW, WAYS, Setup, Way, follow, state_of

CHOICES = {"some": (DRAM, *FEW[1:]), "few": FEW} | {way.name: (way,) for way in WAYS}
"""Ways to train: which to choose, by name."""

MAILBOX_NBYTES = 256 * 1024
"""Small, so that most messages need several pieces."""


def digest(setup: Setup, way: Way, folder: Path, ranks: Transport) -> dict[str, Any]:
    """Train and return losses, norms and a digest of the state, equal on all ranks."""
    shared = replace(setup, work=replace(setup.work, world=ranks.world))
    with shared.engine(way, folder, ranks=ranks) as engine:
        losses, norms = follow(engine, setup.batches(3))
        state = state_of(engine)
    hashed = hashlib.sha256()
    for name in sorted(state):
        hashed.update(name.encode() + bytes(state[name].contiguous().view(torch.uint8).numpy()))
    return {"losses": losses, "norms": norms, "state": hashed.hexdigest()}


def digests(folder: Path, ranks: Transport, ways: tuple[Way, ...]) -> dict[str, Any]:
    setup = Setup.of("llama", batch=9)
    return {way.name: digest(setup, way, folder, ranks) for way in ways}


def watch_ranks(store: dist.Store, rank: int, world: int, **settings: float) -> PeerWatch:
    peers = connect_ranks(dist.PrefixStore(f"{world} ranks", store), rank, world)
    return PeerWatch(peers, WatchSettings(**settings))


def make_transport(name: str, store: dist.Store, rank: int, group: dist.ProcessGroup) -> Transport:
    world = group.size()
    watch = watch_ranks(store, rank, world)
    if name != "shared":
        gloo = GlooTransport(watch, group)
        return gloo if name == "gloo" else NcclTransport(gloo, CpuDevice(), backend="gloo")
    peers = connect_ranks(dist.PrefixStore(f"{world} ranks, memory", store), rank, world)
    return SharedTransport(peers, watch, pick_device(), mailbox_nbytes=MAILBOX_NBYTES)


def main(rank: int, world: int, folder: Path, transport: str, ways: tuple[Way, ...]) -> None:
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    groups = {size: dist.new_group(list(range(size))) for size in range(2, world + 1)}
    for size, group in groups.items():
        if rank < size:
            ranks = make_transport(transport, store, rank, group)
            check_transport(ranks, pick_device().torch_device.type)
            found = digests(folder, ranks, ways)
            (folder / f"{size}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    if rank == world - 1:
        os._exit(0)  # without a word to the others, as after kill -9
    try:
        ranks.meet(b"message")
    except PeerLostError as error:
        (folder / f"lost.{rank}").write_text(str(error))
    os._exit(0)  # the process group is broken, and its destructor would wait


if __name__ == "__main__":
    torch.set_num_threads(1)
    number, count, where, transport, choice = sys.argv[1:]
    main(int(number), int(count), Path(where), transport, CHOICES[choice])
