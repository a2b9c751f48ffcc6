"""A campaign against the reader of safetensors headers: `make fuzz`, 10^6 executions.

Not collected by pytest. Each is judged by the safetensors library too; any crash, or any file that
one reads and the other does not, is an assertion with the seed that brings it back.
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
    chosen = parser.parse_args()
    good = corpus()
    outcomes: Counter[str] = Counter()
    began = time.monotonic()
    for number in range(chosen.executions):
        seed = chosen.seed * chosen.executions + number
        try:
            outcomes[check_one(mutate(good[number % len(good)], random.Random(seed)))] += 1
        except BaseException as failed:
            raise AssertionError(f"seed {seed}") from failed
    seconds = time.monotonic() - began
    print(f"{chosen.executions} executions in {seconds:.0f} s, none wrong")
    for outcome, count in outcomes.most_common():
        print(f"{count:10} {outcome}")


if __name__ == "__main__":
    main()
