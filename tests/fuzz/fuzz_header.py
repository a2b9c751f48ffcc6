"""Fuzz the parser of store headers: `make fuzz`, 10^6 executions.

pytest does not collect this file. It prints how often each outcome occurred. A crash or a wrong
acceptance raises AssertionError with the seed that reproduces it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

from tests.support.storage_headers import check_one, header, mutate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    corpus = [
        header().to_bytes(),
        header(pattern=(0,), path=0, host="").to_bytes(),
        header(pattern=tuple(range(32)), path=31, host="h" * 255).to_bytes(),
    ]
    outcomes: Counter[str] = Counter()
    start = time.monotonic()
    for number in range(args.executions):
        seed = args.seed * args.executions + number
        rng = random.Random(seed)
        try:
            good = corpus[number % len(corpus)]
            outcomes["header " + check_one(mutate(good, rng), good)] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
    seconds = time.monotonic() - start
    print(f"{args.executions} executions in {seconds:.0f} s, no failures")
    for outcome, count in outcomes.most_common():
        print(f"{count:10} {outcome}")


if __name__ == "__main__":
    main()
