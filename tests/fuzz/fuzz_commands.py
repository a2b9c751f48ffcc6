"""Fuzz the files and command lines that the commands read: `make fuzz-commands`.

pytest does not collect this file. The seed is the date unless one is given. Every input that
fails is printed; add it to tests/fuzz/kept_inputs.py after the fix.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.support.fuzzed_commands import KINDS, Inputs, problem


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(f"{datetime.date.today():%Y%m%d}"))
    parser.add_argument("--kind", choices=KINDS, action="append")
    args = parser.parse_args()
    kinds = args.kind or list(KINDS)
    print(f"seed {args.seed}", flush=True)
    counts: Counter[str] = Counter()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        inputs = Inputs(Path(folder))
        deadline = time.monotonic() + args.seconds
        for number in range(1 << 62):
            if time.monotonic() > deadline:
                break
            kind = kinds[number % len(kinds)]
            case = KINDS[kind](inputs, random.Random(f"{args.seed} {number}"))
            counts[kind] += 1
            if wrong := problem(inputs, case):
                failed += 1
                print(
                    f"--- number {number}: {wrong}\n{json.dumps(asdict(case))[:3000]}", flush=True
                )
    print(f"{sum(counts.values())} inputs, {failed} failed: {dict(counts)}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
