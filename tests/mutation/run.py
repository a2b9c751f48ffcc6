"""Test the tests: change the code in small ways, and see whether a test fails.

    python -m tests.mutation.run [--seed N] [--count N] [--minutes N] [--only PATH]

Mutants are a random sample over `modules.MODULES`, the same for the same seed and code. Each runs
the tests that execute its lines, the quickest first. Which tests those are is recorded once, in
build/mutation/lines.json; `--map` records it again.

The results are printed and kept in build/mutation/results.jsonl. A mutant is

- killed: a test failed;
- timed out: the tests ran longer than the limit, mostly because the change never ends a loop;
- survived: no test failed. Some changes cannot change a result; the others need a test;
- not covered: no test of the map runs those lines;
- error: pytest itself failed, so the result says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.mutation.modules import MARKERS, MODULES, ROOT, TESTS
from tests.mutation.mutants import Mutant, make_mutants

WORK = ROOT / "build/mutation"
LINES = WORK / "lines.json"
TEST_SECONDS = 30.0
"""Most seconds of tests per mutant, as measured for the line map."""
MUTANT_SECONDS = 90
"""Time limit of one mutant."""

LineMap = dict[str, dict[str, Any]]


def main() -> int:
    options = parse_options()
    WORK.mkdir(parents=True, exist_ok=True)
    if options.map or not LINES.exists():
        record_lines(options.tests or list(TESTS))
    lines: LineMap = json.loads(LINES.read_text())
    sample = draw_sample(options.seed, options.count, options.only)
    copied = copy_sources()
    import_libraries()
    check_unchanged(lines, copied)
    end = time.monotonic() + 60 * options.minutes
    results: Counter[str] = Counter()
    with (WORK / "results.jsonl").open("a") as log:
        for number, mutant in enumerate(sample, start=1):
            if time.monotonic() > end:
                print(f"stopped after {options.minutes} minutes")
                break
            tests = choose_tests(mutant, lines)
            start = time.monotonic()
            result = run_mutant(mutant, tests, copied) if tests else "not covered"
            results[result] += 1
            seconds = round(time.monotonic() - start, 1)
            record = {"mutant": mutant.name, "result": result, "seconds": seconds}
            log.write(json.dumps(record | {"seed": options.seed, "tests": len(tests)}) + "\n")
            log.flush()
            print(f"{number}/{len(sample)} {result} ({seconds} s) {mutant.name}", flush=True)
    tried = results.total()
    found = results["killed"] + results["timed out"]
    print(f"{tried} mutants: {dict(results)}")
    if tried:
        print(f"{found / tried:.1%} killed or timed out")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=20, help="seed of the sample")
    parser.add_argument("--count", type=int, default=300, help="number of mutants")
    parser.add_argument("--minutes", type=float, default=600, help="stop after so many minutes")
    parser.add_argument("--only", default="", help="only modules whose path contains this")
    parser.add_argument("--map", action="store_true", help="record the line map again")
    parser.add_argument("tests", nargs="*", help="tests of the line map")
    return parser.parse_args()


def record_lines(tests: list[str]) -> None:
    """Run all tests once on the unchanged code and record which lines each of them runs."""
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "300", "-m", MARKERS]
    command += ["-p", "tests.mutation.line_map", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PENSTOCK_LINE_MAP": str(LINES), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)


def draw_sample(seed: int, count: int, only: str) -> list[Mutant]:
    """Draw mutants without replacement; a larger count only adds to a smaller one."""
    mutants = []
    for path in MODULES:
        if only in path:
            mutants += make_mutants(path, (ROOT / path).read_text())
    random.Random(seed).shuffle(mutants)
    return mutants[:count]


def copy_sources() -> Path:
    """Copy src/, in which one mutant at a time is written."""
    target = WORK / "src"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "src", target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def import_libraries() -> None:
    """Import what takes long here, once: each mutant runs in a fork of this process.

    Penstock itself must not be imported, because each fork imports another one.
    """
    import torch

    torch.set_num_threads(1)
    for family in ("llama", "qwen3", "gemma3", "gpt2"):
        __import__(f"transformers.models.{family}.modeling_{family}")
    assert "penstock" not in sys.modules


def check_unchanged(lines: LineMap, copied: Path) -> None:
    """Exit unless tests pass on the unchanged code: otherwise every mutant would seem killed."""
    quickest = sorted(lines, key=lambda name: lines[name]["seconds"])[:40]
    result = run_tests(quickest, copied)
    if result != "survived":
        print((WORK / "output.txt").read_text()[-4000:])
        sys.exit(f"tests fail on the unchanged code ({result}); record the line map with --map")


def choose_tests(mutant: Mutant, lines: LineMap) -> list[str]:
    """Return tests that run the changed lines: the quickest of each file, then the others.

    Lines outside of functions run when the module is imported. For those, and for the tests of a
    function's header, every test that runs anything of the module is chosen.
    """
    inside = range(mutant.first_line, mutant.last_line + 1)
    ran = {name: test["lines"].get(mutant.path, ()) for name, test in lines.items()}
    covering = [name for name, found in ran.items() if any(line in found for line in inside)]
    if not covering and not _in_function(mutant):
        covering = [name for name, found in ran.items() if found]
    covering.sort(key=lambda name: lines[name]["seconds"])
    files: Counter[str] = Counter()
    ranks = {}
    for name in covering:
        file = name.split("::")[0]
        ranks[name] = files[file]
        files[file] += 1
    chosen, seconds = [], 0.0
    # The quickest test of every file first, then all others by their time.
    for name in sorted(covering, key=lambda name: (ranks[name] > 0, lines[name]["seconds"])):
        if chosen and seconds + lines[name]["seconds"] > TEST_SECONDS:
            continue
        seconds += lines[name]["seconds"]
        chosen.append(name)
    return sorted(chosen, key=lambda name: lines[name]["seconds"])


def _in_function(mutant: Mutant) -> bool:
    """Whether the change is in the body of a function."""
    import ast

    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for node in ast.walk(ast.parse((ROOT / mutant.path).read_text())):
        if isinstance(node, functions):
            body = node.body if isinstance(node.body, list) else [node.body]
            assert body[-1].end_lineno is not None
            if body[0].lineno <= mutant.first_line <= body[-1].end_lineno:
                return True
    return False


def run_mutant(mutant: Mutant, tests: list[str], copied: Path) -> str:
    """Run the tests on the changed code, in a fork of this process."""
    source = (ROOT / mutant.path).read_text()
    target = copied.parent / mutant.path
    target.write_text(mutant.apply(source))
    try:
        return run_tests(tests, copied)
    finally:
        target.write_text(source)


def run_tests(tests: list[str], copied: Path) -> str:
    """Run tests in a fork of this process; return what that says about the code in `copied`."""
    child = os.fork()
    if child == 0:
        _run_in_child(tests, copied)
    return _wait(child)


def _run_in_child(tests: list[str], copied: Path) -> None:
    """Run the tests in this forked process, and end it with pytest's exit code."""
    code = 3
    try:
        import pytest

        os.setsid()  # so that the time limit also ends what the tests start
        output = os.open(WORK / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(ROOT)
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(copied))
        os.environ |= {"PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1"}
        # Libraries that were imported before, and are also plugins of pytest, are not rewritten.
        options = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        options += ["-x", "-q", "-p", "no:cacheprovider", "--timeout", str(MUTANT_SECONDS)]
        code = int(pytest.main([*options, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> str:
    end = time.monotonic() + MUTANT_SECONDS
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return _outcome(os.waitstatus_to_exitcode(status))
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timed out"


def _outcome(code: int) -> str:
    """Interpret pytest's exit code, or a signal if it is negative.

    A module that cannot be imported any more ends pytest with 2 or 4, according to who imports it.
    """
    if code == 0:
        return "survived"
    return "killed" if code < 0 or code in (1, 2, 4) else "error"


if __name__ == "__main__":
    sys.exit(main())
