"""Measure the overhead of observing: the same steps with and without, in turn, in one run.

    python bench/bench_observe.py --rounds 20 --steps 20 --save
    python bench/bench_observe.py --layers 24 --width 2048 --tokens 2048 --save     # with a GPU

Each round runs some steps with observation and as many without, in alternating order. The overhead
is the median over rounds of the ratio of both median steps, so that other load on the machine
affects both. The results also contain the same ratio for the CPU time of all threads, in which
other programs do not count; the cost of the hooks in the program's own thread; and the recorder
thread's share of a core.
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

sys.path.insert(0, str(Path(__file__).parents[1]))

import penstock
from bench import certificate


class Program:
    """A training program: a transformer of torch.nn and its optimizer."""

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
        loss.item()  # waits for the GPU, like a program that prints its loss


WARM_UP = 3
CLOCKS = {"clock": time.perf_counter, "process": time.process_time, "thread": time.thread_time}
"""Wall-clock time, CPU time of all threads, and CPU time of this thread."""


def timed(program: Program, steps: int) -> dict[str, float]:
    """Return the seconds of the median step by each clock.

    The first steps do not count, because the observer searches for modules in them.
    """
    for _ in range(WARM_UP):
        program.step()
    seconds_by: dict[str, list[float]] = {name: [] for name in CLOCKS}
    for _ in range(steps):
        before = {name: clock() for name, clock in CLOCKS.items()}
        program.step()
        for name, clock in CLOCKS.items():
            seconds_by[name].append(clock() - before[name])
    whole = {name: statistics.median(seconds) for name, seconds in seconds_by.items()}
    # The recorder's thread wakes up in few steps: the mean includes its time, the median does not.
    return whole | {"process": statistics.mean(seconds_by["process"])}


def measure(program: Program, rounds: int, steps: int, interval: float) -> dict[str, Any]:
    samples_of: dict[str, list[float]] = {
        name: [] for name in ("clock", "process", "thread", "off", "on")
    }
    shares = []
    for number in range(rounds):
        medians: dict[bool, dict[str, float]] = {}
        for observed in (number % 2 == 0, number % 2 == 1):
            with tempfile.TemporaryDirectory() as folder:
                observer = penstock.observe(folder, interval=interval)
                with observer if observed else contextlib.nullcontext():
                    medians[observed] = timed(program, steps)
                if observed:
                    from penstock.observe.run_files import read_run

                    shares.append(read_run(folder).observation.overhead or 0.0)
            samples_of["on" if observed else "off"].append(medians[observed]["clock"])
        on, off = medians[True], medians[False]
        for name in ("clock", "process"):
            samples_of[name].append(on[name] / off[name] - 1)
        samples_of["thread"].append(on["thread"] - off["thread"])
    return {
        "interval": interval,
        "step_seconds_off": certificate.percentiles(samples_of["off"]),
        "step_seconds_on": certificate.percentiles(samples_of["on"]),
        "overhead": certificate.percentiles(samples_of["clock"]),
        "overhead_of_the_processor": certificate.percentiles(samples_of["process"]),
        "hook_seconds_a_step": certificate.percentiles(samples_of["thread"]),
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
