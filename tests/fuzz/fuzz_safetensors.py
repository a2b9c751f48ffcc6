"""Fuzz the parser of safetensors headers: `make fuzz`, 10^6 executions.

pytest does not collect this file. The safetensors library parses each file as well. A crash, or a
file that only one of the two accepts, raises AssertionError with the seed that reproduces it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

from tests.support.safetensors_files import check_one, corpus, mutate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    good = corpus()
    outcomes: Counter[str] = Counter()
    start = time.monotonic()
    for number in range(args.executions):
        seed = args.seed * args.executions + number
        try:
            outcomes[check_one(mutate(good[number % len(good)], random.Random(seed)))] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
    seconds = time.monotonic() - start
    print(f"{args.executions} executions in {seconds:.0f} s, no failures")
    for outcome, count in outcomes.most_common():
        print(f"{count:10} {outcome}")


if __name__ == "__main__":
    main()
