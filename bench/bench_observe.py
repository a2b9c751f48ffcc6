"""What observing costs: the same steps with and without, in turn, in one run.

    python bench/bench_observe.py --rounds 20 --steps 20 --save
    python bench/bench_observe.py --layers 24 --width 2048 --tokens 2048 --save     # with a GPU

Each round takes some steps observed and as many not, in changing order. The overhead is the median,
over rounds, of the ratio of both median steps: what else the machine does falls on both. Beside it:
the same of the processor's time for all threads together, in which other programs do not count;
what the hooks cost the program's own thread; and what the recorder's thread takes of a core.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import certificate

import penstock


class Program:
    """A transformer of torch's own, and its optimizer."""

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
        self.model = nn.TransformerEncoder(layer, layers).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.batch = torch.randn(1, tokens, width, device=self.device)

    def step(self) -> None:
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()  # as a program that prints its loss


WARM_UP = 3
CLOCKS = {"clock": time.perf_counter, "process": time.process_time, "thread": time.thread_time}
"""The time of day; the processor's for all threads, and for this one."""


def timed(program: Program, steps: int) -> dict[str, float]:
    """Seconds of the median step, by each clock. The first ones do not count: an observer looks for
    modules then, once."""
    for _ in range(WARM_UP):
        program.step()
    taken: dict[str, list[float]] = {name: [] for name in CLOCKS}
    for _ in range(steps):
        before = {name: clock() for name, clock in CLOCKS.items()}
        program.step()
        for name, clock in CLOCKS.items():
            taken[name].append(clock() - before[name])
    whole = {name: statistics.median(seconds) for name, seconds in taken.items()}
    # A thread that wakes now and then is in few steps: the mean has its share, the median none.
    return whole | {"process": statistics.mean(taken["process"])}


def measure(program: Program, rounds: int, steps: int, interval: float) -> dict[str, Any]:
    found: dict[str, list[float]] = {
        name: [] for name in ("clock", "process", "thread", "off", "on")
    }
    shares = []
    for number in range(rounds):
        medians: dict[bool, dict[str, float]] = {}
        for observed in (number % 2 == 0, number % 2 == 1):
            with tempfile.TemporaryDirectory() as folder:
                watching = penstock.observe(folder, interval=interval)
                with watching if observed else contextlib.nullcontext():
                    medians[observed] = timed(program, steps)
                if observed:
                    from penstock.observe.run_files import read_run

                    shares.append(read_run(folder).observation.overhead or 0.0)
            found["on" if observed else "off"].append(medians[observed]["clock"])
        on, off = medians[True], medians[False]
        for name in ("clock", "process"):
            found[name].append(on[name] / off[name] - 1)
        found["thread"].append(on["thread"] - off["thread"])
    return {
        "interval": interval,
        "step_seconds_off": certificate.percentiles(found["off"]),
        "step_seconds_on": certificate.percentiles(found["on"]),
        "overhead": certificate.percentiles(found["clock"]),
        "overhead_of_the_processor": certificate.percentiles(found["process"]),
        "hook_seconds_a_step": certificate.percentiles(found["thread"]),
        "recorder_share_of_a_core": certificate.percentiles(shares),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--interval", type=float, default=0.1)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    program = Program(args.layers, args.width, args.tokens)
    timed(program, 5)
    results = measure(program, args.rounds, args.steps, args.interval)
    for name, value in results.items():
        print(name, value)
    if args.save:
        shape = {"layers": args.layers, "width": args.width, "tokens": args.tokens}
        print(certificate.save("observe", {"program": shape, **results}))


if __name__ == "__main__":
    main()
