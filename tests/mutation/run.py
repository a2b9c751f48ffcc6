"""Test the tests: change the code in small ways, and see whether a test fails.

    python -m tests.mutation.run [--seed N] [--count N] [--minutes N] [--only PATH...]

Mutants are a random sample over `modules.MODULES`, the same for the same seed and code; the seed is
today's date unless you give one. Each runs the tests that execute its lines, the quickest first,
until one fails. Which tests those are is recorded once, in build/mutation/lines.jsonl; `--map`
records it again, for the tests named after it or for all.

The results are added to build/mutation/results-SEED.jsonl, one line each. A stopped run continues
where it stopped; `--again` runs what survived again, after new tests or with more `--seconds`.
A mutant is

- killed: a test failed that passes on the unchanged code in the same kind of process;
- timed out: the tests ran several times longer than they should, mostly because a loop never ends;
- survived: no test failed. Some changes cannot change a result; the others need a test;
- not covered: no test of the map runs those lines;
- error: pytest itself failed, so the result says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

from tests.mutation import fork, redirect
from tests.mutation.choice import LineMap, choose_tests, draw_sample, read_line_map
from tests.mutation.fork import WORK, Collected
from tests.mutation.modules import MARKERS, ROOT, TESTS
from tests.mutation.mutants import Mutant

LINES = WORK / "lines.jsonl"
SOURCE = WORK / "src"
"""A copy of src/, in which one mutant at a time is written."""

Result = dict[str, str | float]


def main() -> int:
    options = parse_options()
    WORK.mkdir(parents=True, exist_ok=True)
    if options.map or not LINES.exists():
        record_lines(options.tests)
    lines = read_line_map(LINES)
    results_file = WORK / f"results-{options.seed}.jsonl"
    done = read_results(results_file)
    sample = draw_sample(options.seed, options.count, options.only)
    left = [mutant for mutant in sample if is_left(done.get(mutant.name), options.again)]
    tests = {mutant.name: choose_tests(mutant, lines, options.seconds) for mutant in left}
    if left:
        copy_sources()
        import_libraries()
        session = Session(lines, {name for chosen in tests.values() for name in chosen})
    end = time.monotonic() + 60 * options.minutes
    with results_file.open("a") as log:
        for number, mutant in enumerate(left, start=1):
            if time.monotonic() > end:
                print(f"stopped after {options.minutes} minutes")
                break
            result = session.run(mutant, tests[mutant.name])
            done[mutant.name] = result
            log.write(json.dumps(result) + "\n")
            log.flush()
            print(f"{number}/{len(left)} {result['result']} ({result['seconds']} s) {mutant.name}")
            sys.stdout.flush()
    print_scores([done[mutant.name] for mutant in sample if mutant.name in done])
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    today = int(f"{datetime.now():%Y%m%d}")
    parser.add_argument("--seed", type=int, default=today, help="seed of the sample")
    parser.add_argument("--count", type=int, default=300, help="number of mutants")
    parser.add_argument("--minutes", type=float, default=600, help="stop after so many minutes")
    parser.add_argument(
        "--seconds", type=float, default=30, help="most seconds of tests per mutant"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="only modules whose path contains one of these"
    )
    parser.add_argument("--again", action="store_true", help="run what survived again")
    parser.add_argument("--map", action="store_true", help="record the line map again")
    parser.add_argument("tests", nargs="*", help="tests to record")
    return parser.parse_args()


def record_lines(tests: list[str]) -> None:
    """Run tests once on the unchanged code and record which lines each of them runs."""
    if LINES.exists():
        kept = LINES.read_text().splitlines() if tests else []
        named = tuple(tests)
        kept = [line for line in kept if not json.loads(line)["test"].startswith(named)]
        LINES.write_text("".join(f"{line}\n" for line in kept))
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "300", "-m", MARKERS]
    command += ["-p", "tests.mutation.line_map", "-p", "no:cacheprovider", *(tests or TESTS)]
    environment = os.environ | {"PENSTOCK_LINE_MAP": str(LINES), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)


def read_results(path: Path) -> dict[str, Result]:
    """Return the last result of each mutant."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["mutant"]: record for record in records}


def is_left(result: Result | None, again: bool) -> bool:
    return result is None or (again and result["result"] not in ("killed", "timed out"))


def copy_sources() -> None:
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "src", SOURCE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(redirect.__file__, SOURCE / "sitecustomize.py")


def import_libraries() -> None:
    """Import what takes long here, once: each mutant runs in a fork of this process.

    Penstock itself must not be imported, because some forks import another one.
    """
    import torch

    torch.set_num_threads(1)
    for family in ("llama", "qwen3", "gemma3", "gpt2"):
        __import__(f"transformers.models.{family}.modeling_{family}")
    assert "penstock" not in sys.modules


class Session:
    """Runs mutants one at a time."""

    def __init__(self, lines: LineMap, tests: set[str]) -> None:
        self._lines = lines
        self._collected = Collected(tests, SOURCE)
        self._passes: dict[str, bool] = {}
        """Whether a test passes on the unchanged code, if that was tried."""

    def run(self, mutant: Mutant, tests: list[str]) -> Result:
        start = time.monotonic()
        outcome, test = self._run_sound(mutant, tests) if tests else ("not covered", "")
        seconds = round(time.monotonic() - start, 1)
        return {"mutant": mutant.name, "result": outcome, "seconds": seconds, "test": test}

    def _run_sound(self, mutant: Mutant, tests: list[str]) -> tuple[str, str]:
        """Run a mutant, without the tests that fail on the unchanged code too."""
        while True:
            tests = [name for name in tests if self._passes.get(name, True)]
            if not tests:
                return "not covered", ""
            outcome, test = self._run_once(mutant, tests)
            if outcome != "killed" or not test:
                return outcome, test
            if test not in self._passes:
                limit = self._limit([test])
                self._passes[test] = self._collected.run(None, [test], limit)[0] == "survived"
            if self._passes[test]:
                return outcome, test

    def _run_once(self, mutant: Mutant, tests: list[str]) -> tuple[str, str]:
        source = (ROOT / mutant.path).read_text()
        target = WORK / mutant.path
        target.write_text(mutant.apply(source))
        limit = self._limit(tests)
        try:
            if not mutant.scope.at_import:
                outcome, test = self._collected.run(mutant, tests, limit)
                if outcome != "cannot patch":
                    return outcome, test
            return fork.run_in_fork(lambda: fork.run_imported(tests, SOURCE), limit + 60, SOURCE)
        finally:
            target.write_text(source)

    def _limit(self, tests: list[str]) -> float:
        """Return the seconds after which a mutant has timed out."""
        return 15 + 4 * sum(self._lines[name]["seconds"] for name in tests)


def print_scores(results: list[Result]) -> None:
    """Print the share of killed mutants, per package and in all."""
    packages: dict[str, Counter[str]] = {}
    for result in results:
        package = str(result["mutant"]).split("/")[2]
        for name in (package, "all"):
            packages.setdefault(name, Counter())[str(result["result"])] += 1
    for name in sorted(packages, key=lambda name: (name == "all", name)):
        counts = packages[name]
        found = counts["killed"] + counts["timed out"]
        print(f"{name:12} {found}/{counts.total()} {found / counts.total():6.1%} {dict(counts)}")


if __name__ == "__main__":
    sys.exit(main())
