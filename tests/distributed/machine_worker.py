"""One rank on a machine of its own.

    python -m tests.distributed.machine_worker RANK WORLD ADDRESS PORT FOLDER

It trains, writes the digest of the result to `FOLDER/<rank>.json`, prints "trained", and then meets
the other ranks until one of them is lost. It prints what it was told, and ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.distributed.gloo_ranks import GlooTransport
from penstock.distributed.peer_sockets import connect_ranks
from penstock.distributed.peer_watch import PeerWatch
from penstock.errors import PeerLostError
from tests.distributed.conformance import check_transport
from tests.distributed.rank_worker import digests
from tests.equivalence.runs import DRAM


def main(rank: int, world: int, address: str, port: int, folder: Path) -> int:
    store = dist.TCPStore(address, port, world, rank == 0, timedelta(seconds=200))
    peers = connect_ranks(dist.PrefixStore("watch", store), rank, world, seconds=200)
    assert not peers.one_machine
    watch = PeerWatch(peers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    ranks = GlooTransport(watch)
    check_transport(ranks)
    (folder / f"{rank}.json").write_text(json.dumps(digests(folder, ranks, (DRAM,))))
    print("trained", flush=True)
    while True:
        began = time.monotonic()
        try:
            ranks.meet(b"message")
        except PeerLostError as error:
            seconds = time.monotonic() - began
            print(json.dumps([error.rank, error.host, error.problem, seconds]), flush=True)
            return 3


if __name__ == "__main__":
    torch.set_num_threads(1)
    number, count, where, port, folder = sys.argv[1:]
    code = main(int(number), int(count), where, int(port), Path(folder))
    sys.stdout.flush()
    # The process group is broken, and its destructor would wait.
    os._exit(code)
