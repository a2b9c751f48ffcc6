"""A campaign against the parsers of what lies on disk: `make fuzz`, 10^6 executions.

Not collected by pytest. Prints what became of them; any crash, hang or wrong acceptance is an
assertion with the seed that brings it back.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

from penstock.storage.layout import Layout
from penstock.units import MiB
from tests.support.storage_headers import check_one, check_table, header, mutate, table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    corpus = [
        header().to_bytes(),
        header(pattern=(0,), path=0, host="").to_bytes(),
        header(pattern=tuple(range(32)), path=31, host="h" * 255).to_bytes(),
    ]
    layout, tables = Layout(pattern=(0,)), table()
    outcomes: Counter[str] = Counter()
    began = time.monotonic()
    for number in range(chosen.executions):
        seed = chosen.seed * chosen.executions + number
        chance = random.Random(seed)
        try:
            if number % 10 == 9:
                outcomes["table " + check_table(mutate(tables, chance), layout, 64 * MiB)] += 1
            else:
                good = corpus[number % len(corpus)]
                outcomes["header " + check_one(mutate(good, chance), good)] += 1
        except BaseException as failed:
            raise AssertionError(f"seed {seed}") from failed
    seconds = time.monotonic() - began
    print(f"{chosen.executions} executions in {seconds:.0f} s, none wrong")
    for outcome, count in outcomes.most_common():
        print(f"{count:10} {outcome}")


if __name__ == "__main__":
    main()
