"""Choose the mutants of a sample, and the tests that may kill each of them."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tests.mutation.modules import MODULES, NEEDS_HARDWARE, ROOT
from tests.mutation.mutants import Mutant, make_mutants

LineMap = dict[str, dict[str, Any]]
"""By test: "seconds", and by module the "lines" that it runs."""


def draw_sample(seed: int, count: int, only: Sequence[str] = ()) -> list[Mutant]:
    """Draw mutants without replacement; a larger count only adds to a smaller one."""
    paths = [path for path in MODULES if not only or any(part in path for part in only)]
    mutants = [mutant for path in paths for mutant in population(path)]
    random.Random(seed).shuffle(mutants)
    return list(islice(filter(_is_valid, mutants), count))


def _is_valid(mutant: Mutant) -> bool:
    """Whether the changed module is still Python: a pattern takes no arithmetic, for example."""
    try:
        compile(mutant.apply((ROOT / mutant.path).read_text()), mutant.path, "exec")
    except SyntaxError:
        return False
    return True


def population(path: str) -> list[Mutant]:
    """Return the mutants of a module that tests on any machine can reach."""
    functions = NEEDS_HARDWARE.get(path, ())
    return [
        mutant
        for mutant in make_mutants(path, (ROOT / path).read_text())
        if not any(f"{mutant.scope.function}.".startswith(f"{name}.") for name in functions)
    ]


def read_line_map(path: Path) -> LineMap:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["test"]: record for record in records}


def choose_tests(mutant: Mutant, lines: LineMap, limit: float = 30) -> list[str]:
    """Return tests that run the changed lines, the quickest first, for `limit` seconds at most.

    The quickest test of every file is chosen before all others, so that a few slow files of tests
    of the whole engine are not lost behind many quick tests of one file.
    """
    covering = _covering(mutant, lines)
    covering.sort(key=lambda name: lines[name]["seconds"])
    files: Counter[str] = Counter()
    ranks = {}
    for name in covering:
        file = name.split("::")[0]
        ranks[name] = files[file]
        files[file] += 1
    chosen, seconds = [], 0.0
    for name in sorted(covering, key=lambda name: (ranks[name] > 0, lines[name]["seconds"])):
        if chosen and seconds + lines[name]["seconds"] > limit:
            continue
        seconds += lines[name]["seconds"]
        chosen.append(name)
    return sorted(chosen, key=lambda name: lines[name]["seconds"])


def _covering(mutant: Mutant, lines: LineMap) -> list[str]:
    """Return the tests that run the changed lines.

    What runs when a module is imported, such as the default of an argument, is in no test's lines.
    For that, the tests are chosen that run something of the function, class or module it is in.
    """
    ran = {name: test["lines"].get(mutant.path, ()) for name, test in lines.items()}
    ranges = [(mutant.first_line, mutant.last_line), mutant.scope.statement]
    if mutant.scope.at_import:
        ranges = [mutant.scope.lines, (1, 10**9)]
    for first, last in ranges:
        found = [n for n, numbers in ran.items() if any(first <= i <= last for i in numbers)]
        if found:
            return found
    if mutant.scope.at_import:
        folder = f"tests/{mutant.path.split('/')[2]}/"
        return [name for name in lines if name.startswith(folder)]
    return []
