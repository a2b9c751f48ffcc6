"""Measure training steps of several ranks on one GPU, or on the CPU, over shared memory.

    python bench/bench_shared_ranks.py --ranks 2 --layers 8 --hidden 2048 --context 1024 --save

One GPU computes for all ranks, so this shows no speedup. It shows what ranks cost: the time that a
step with N ranks takes beyond a step with one, and host memory. Losses must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from bench.certificate import percentiles, save
from penstock.distributed.peer_sockets import connect_ranks
from penstock.distributed.peer_watch import PeerWatch
from penstock.distributed.shared_ranks import MAILBOX_NBYTES, SharedTransport
from penstock.engine.device import pick_device
from penstock.engine.transport import SingleRank, Transport
from penstock.units import format_bytes
from tests.distributed.memory_worker import mapped_nbytes
from tests.equivalence.runs import DRAM, Setup

ALL_IN_DRAM = replace(DRAM, threads=None)
"""Everything in DRAM, with as many sweep threads as the plan chooses."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--mailbox", type=int, default=MAILBOX_NBYTES, help="bytes per rank")
    parser.add_argument("--save", action="store_true", help="write a file in bench/results")
    parser.add_argument("--worker", nargs=3, metavar=("STORE", "RANK", "WORLD"), help="internal")
    return parser.parse_args()


def note(text: str) -> None:
    """Print progress, next to the results of workers on standard output."""
    print(text, file=sys.stderr, flush=True)


def setup_of(args: argparse.Namespace) -> Setup:
    heads = max(1, args.hidden // 64)
    config = {
        "hidden_size": args.hidden, "intermediate_size": 11 * args.hidden // 4,
        "num_hidden_layers": args.layers, "num_attention_heads": heads, "vocab_size": 4096,
        "num_key_value_heads": heads, "head_dim": 64, "max_position_embeddings": args.context,
    }  # fmt: skip
    return Setup.of("llama", freeze=(), config=config, batch=args.batch, context=args.context)


def measure(args: argparse.Namespace, ranks: Transport, kind: str) -> dict[str, Any]:
    """Train; return losses, the seconds of each step after the warm-up, and host memory."""
    began = time.perf_counter()
    setup = setup_of(args)
    shared = replace(setup, work=replace(setup.work, world=ranks.world))
    losses, seconds = [], []
    with shared.engine(ALL_IN_DRAM, Path(), ranks=ranks, device=kind) as engine:
        if ranks.rank == 0:
            note(f"  {ranks.world} ranks ready after {time.perf_counter() - began:.1f} s")
        for number, batch in enumerate(setup.batches(args.warmup + args.steps), 1):
            ranks.meet(b"")
            began = time.perf_counter()
            losses.append(float(engine.step(batch)))
            seconds.append(time.perf_counter() - began)
            if ranks.rank == 0:
                what = "warm-up " if number <= args.warmup else ""
                note(f"  {what}step {number}: {seconds[-1] * 1e3:.1f} ms, loss {losses[-1]:.4f}")
        ranks.meet(b"")
        elements = sum(t.elements for b in engine.inventory.blocks for t in b.tensors)
        found = {
            "losses": losses, "seconds": seconds[args.warmup :], "parameters": elements,
            "arenas": engine.tiers()["dram"]["used"], "pages": mapped_nbytes()["Pss"],
        }  # fmt: skip
        ranks.meet(b"")
    return found


def work(args: argparse.Namespace, path: str, rank: int, world: int) -> None:
    """Run one rank, and print what it measured."""
    device = pick_device()
    kind = device.torch_device.type
    if kind == "cpu":
        torch.set_num_threads(1)  # equal bits on a CPU need equally many threads
    if world == 1:
        print(json.dumps(measure(args, SingleRank(), kind)))
        return
    store = dist.FileStore(path, world)
    watch = PeerWatch(connect_ranks(dist.PrefixStore("watch", store), rank, world))
    peers = connect_ranks(dist.PrefixStore("memory", store), rank, world)
    ranks = SharedTransport(peers, watch, device, mailbox_nbytes=args.mailbox)
    print(json.dumps(measure(args, ranks, kind)))
    watch.close()


def run_ranks(world: int) -> list[dict[str, Any]]:
    note(f"{world} rank{'s' * (world > 1)}:")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--worker", f"{folder}/store"]
        processes = [
            subprocess.Popen([*command, str(rank), str(world)], stdout=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        return [json.loads(process.communicate()[0]) for process in processes]


def main() -> None:
    args = arguments()
    if args.worker is not None:
        path, rank, world = args.worker
        work(args, path, int(rank), int(world))
        return
    (one,), several = run_ranks(1), run_ranks(args.ranks)
    assert all(each["losses"] == one["losses"] for each in several), "the losses differ"
    steps = zip(*(each["seconds"] for each in several), strict=True)
    alone, together = percentiles(one["seconds"]), percentiles([max(step) for step in steps])
    parameters, mailboxes = one["parameters"], args.ranks * args.mailbox
    memory = sum(each["arenas"] for each in several) - mailboxes
    pages = sum(each["pages"] for each in several) - mailboxes
    overhead = together["p50"] / alone["p50"] - 1
    name = pick_device().name
    print(f"{name}, {os.cpu_count()} CPUs, {parameters / 1e6:.1f} million parameters, in DRAM; "
          f"losses are equal")  # fmt: skip
    print(f"1 rank: {alone['p50'] * 1e3:.1f} ms per step, {_memory(one['arenas'], parameters)}")
    print(f"{args.ranks} ranks: {together['p50'] * 1e3:.1f} ms per step ({overhead:+.1%}), "
          f"{_memory(memory, parameters)}, and mailboxes of {format_bytes(mailboxes)}; "
          f"weights that all ranks map: {format_bytes(pages)}")  # fmt: skip
    if args.save:
        results = {
            "parameters": parameters, "ranks": args.ranks, "batch": args.batch,
            "context": args.context, "equal_losses": True, "losses": one["losses"],
            "step_seconds": {"1": alone, str(args.ranks): together}, "overhead": overhead,
            "host_bytes": {"1": one["arenas"], str(args.ranks): memory},
            "host_bytes_per_parameter": {
                "1": one["arenas"] / parameters, str(args.ranks): memory / parameters,
            },
            "mailbox_bytes": mailboxes, "mapped_bytes": pages,
        }  # fmt: skip
        print(save("shared_ranks", results))


def _memory(nbytes: int, parameters: int) -> str:
    return f"{format_bytes(nbytes)} of host memory ({nbytes / parameters:.2f} bytes per parameter)"


if __name__ == "__main__":
    main()
