"""One rank that waits: `python -m tests.distributed.watch_worker STORE RANK WORLD WHAT`."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from penstock.distributed.gloo_ranks import GlooTransport
from penstock.distributed.peer_sockets import connect_ranks
from penstock.distributed.peer_watch import PeerWatch, WatchSettings
from penstock.errors import PeerLostError


def main(path: str, rank: int, world: int, what: str) -> None:
    store = dist.FileStore(path, world)
    peers = connect_ranks(dist.PrefixStore("watch", store), rank, world)
    settings = WatchSettings(heartbeat_seconds=0.05, name_after_seconds=0.5, exit_seconds=1)
    watch = PeerWatch(peers, settings)
    if what == "stuck":
        left = Path(f"{path}.{rank}")
        left.write_text("a file of this rank")
        watch.before_exit.append(left.unlink)
        print("ready", flush=True)
        with watch.call("gather"):
            threading.Event().wait()
    if what == "fork" and os.fork() == 0:
        os.closerange(0, 3)  # the test waits for the end of these
        time.sleep(20)
        os._exit(0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    ranks = GlooTransport(watch)
    print("ready", flush=True)
    while sys.stdin.readline().strip() == "meet":
        try:
            ranks.meet(b"message")
            print("met", flush=True)
        except PeerLostError as error:
            print(error, flush=True)
    watch.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
