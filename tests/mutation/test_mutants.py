"""Mutants change one thing that can change a result, and nothing else."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.mutation import redirect
from tests.mutation.choice import choose_tests, draw_sample, population
from tests.mutation.modules import MODULES, NEEDS_HARDWARE, ROOT, TESTS
from tests.mutation.mutants import Mutant, make_mutants

SOURCE = '''\
"""A module."""

LIMIT: int = 3


def clamp(x: int, wide: bool = False) -> int:
    """Return x, at most 3."""
    note(x, "ä")
    if x < LIMIT and not wide:
        return x + 1
    if x == LIMIT:
        warn(f"{x}", 1)
    assert x > 0, "not seen"
    raise ValueError(f"{x - 1}")


if TYPE_CHECKING:
    LIMIT = 4


class Text:
    def __repr__(self) -> str:
        return str(1)
'''


def mutant_at(line: int, kind: str) -> Mutant:
    (mutant,) = (m for m in make_mutants("m.py", SOURCE) if (m.first_line, m.kind) == (line, kind))
    return mutant


def test_every_kind_of_change_is_made_once() -> None:
    found = [(m.first_line, m.kind, m.after) for m in make_mutants("m.py", SOURCE)]

    assert sorted(found) == [
        (3, "constant", "(4)"),
        (6, "constant", "(True)"),
        (8, "dropped statement", "pass"),
        (8, "swapped arguments", "(note('ä', x))"),
        (9, "and, or", "(x < LIMIT or not wide)"),
        (9, "comparison", "(x <= LIMIT)"),
        (9, "negation", "(not (x < LIMIT and (not wide)))"),
        (9, "negation", "(wide)"),
        (10, "constant", "(2)"),
        (10, "dropped return", "return None"),
        (10, "operator", "(x - 1)"),
        (11, "comparison", "(x != LIMIT)"),
        (12, "dropped statement", "pass"),
    ]


def test_a_mutant_is_valid_and_changes_only_its_lines() -> None:
    lines = SOURCE.splitlines()
    for mutant in make_mutants("m.py", SOURCE):
        changed = mutant.apply(SOURCE).splitlines()
        ast.parse("\n".join(changed))
        different = [i for i, (a, b) in enumerate(zip(lines, changed, strict=True), 1) if a != b]
        assert different == [mutant.first_line], mutant.name


def test_what_runs_at_import_is_told_apart_from_what_runs_in_a_call() -> None:
    at_import = {m.first_line for m in make_mutants("m.py", SOURCE) if m.scope.at_import}

    assert at_import == {3, 6}
    assert mutant_at(6, "constant").scope.lines == (6, 14)
    assert mutant_at(9, "comparison").scope.function == "clamp"


def test_the_sample_depends_on_the_seed_only_and_grows_at_its_end() -> None:
    small, large = draw_sample(1, 20, ["optim/"]), draw_sample(1, 40, ["optim/"])

    assert large[:20] == small
    assert draw_sample(2, 20, ["optim/"]) != small
    assert {m.path.split("/")[2] for m in large} == {"optim"}
    both = draw_sample(1, 40, ["optim/", "kept_layers"])
    assert {m.path.split("/")[2] for m in both} == {"optim", "planner"}


def test_processes_that_tests_start_import_the_changed_copy(tmp_path: Path) -> None:
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock/__init__.py").write_text("CHANGED = True")
    shutil.copy(redirect.__file__, tmp_path / "sitecustomize.py")
    command = [sys.executable, "-c", "import penstock; print(penstock.CHANGED)"]

    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert found.stdout == "True\n", found.stderr


def test_the_modules_and_tests_exist() -> None:
    for path in (*MODULES, *TESTS):
        assert (ROOT / path).exists(), path


def test_functions_that_need_hardware_exist_and_are_not_in_the_sample() -> None:
    for path, functions in NEEDS_HARDWARE.items():
        everything = {m.scope.function for m in make_mutants(path, (ROOT / path).read_text())}
        left = {m.scope.function for m in population(path)}
        assert set(functions) <= everything, path
        assert not left & set(functions), path


def test_tests_that_run_the_line_are_chosen_quickest_first() -> None:
    path = "src/penstock/optim/norms.py"
    mutant = next(m for m in population(path) if not m.scope.at_import)
    at = mutant.first_line
    elsewhere = mutant.scope.statement[0] - 1
    lines = {
        "a.py::slow": {"seconds": 5.0, "lines": {path: [at]}},
        "a.py::quick": {"seconds": 1.0, "lines": {path: [at, at + 1]}},
        "b.py::other": {"seconds": 2.0, "lines": {path: [at]}},
        "b.py::elsewhere": {"seconds": 0.1, "lines": {path: [elsewhere]}},
        "c.py::endless": {"seconds": 1000.0, "lines": {path: [at]}},
    }

    assert choose_tests(mutant, lines) == ["a.py::quick", "b.py::other", "a.py::slow"]


def test_a_default_argument_is_tested_by_the_tests_of_its_function() -> None:
    mutant = mutant_at(6, "constant")
    lines = {
        "a.py::inside": {"seconds": 1.0, "lines": {"m.py": [9]}},
        "b.py::outside": {"seconds": 1.0, "lines": {"m.py": [18]}},
    }

    assert choose_tests(mutant, lines) == ["a.py::inside"]
