"""One rank that trains over shared memory and prints how much memory it has, as JSON.

python -m tests.distributed.memory_worker STORE RANK WORLD
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from penstock.distributed.peer_sockets import connect_ranks
from penstock.distributed.peer_watch import PeerWatch
from penstock.distributed.shared_ranks import SharedTransport
from penstock.engine.device import pick_device
from penstock.engine.transport import SingleRank, Transport
from tests.equivalence.runs import DRAM, Setup

MAILBOX_NBYTES = 1 << 20
CONFIG = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 352, "head_dim": 32}


def mapped_nbytes() -> dict[str, int]:
    """Return the sizes of all mapped memory files: mapped, in memory, and the share of it."""
    found = dict.fromkeys(("Size", "Rss", "Pss"), 0)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = "/memfd:penstock" in line
        elif inside and (value := re.match(r"(\w+):\s+(\d+) kB", line)) and value[1] in found:
            found[value[1]] += 1024 * int(value[2])
    return found


def measure(ranks: Transport) -> dict[str, int]:
    setup = Setup.of("llama", batch=4, config=CONFIG, freeze=())
    shared = replace(setup, work=replace(setup.work, world=ranks.world))
    gather, gathers = ranks.gather, []
    ranks.gather = lambda shards: gathers.append(gather(shards))  # type: ignore[method-assign]
    with shared.engine(DRAM, Path(), ranks=ranks) as engine:
        for batch in setup.batches(2):
            engine.step(batch)
        elements = sum(t.elements for b in engine.inventory.blocks for t in b.tensors)
        ranks.meet(b"")  # all have read all weights, and none has ended
        found = {"arenas": engine.tiers()["dram"]["used"], "parameters": elements}
        found["gathers"] = len(gathers)
        found |= {name.lower(): nbytes for name, nbytes in mapped_nbytes().items()}
        ranks.meet(b"")
    return found


def main(path: str, rank: int, world: int) -> None:
    if world == 1:
        print(json.dumps(measure(SingleRank())))
        return
    store = dist.FileStore(path, world)
    watch = PeerWatch(connect_ranks(dist.PrefixStore("watch", store), rank, world))
    peers = connect_ranks(dist.PrefixStore("memory", store), rank, world)
    ranks = SharedTransport(peers, watch, pick_device(), mailbox_nbytes=MAILBOX_NBYTES)
    print(json.dumps(measure(ranks)))
    watch.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
