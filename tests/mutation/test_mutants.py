"""Mutants change one thing that can change a result, and nothing else."""

from __future__ import annotations

import ast

from tests.mutation.modules import MODULES, ROOT, TESTS
from tests.mutation.mutants import Mutant, make_mutants
from tests.mutation.run import choose_tests, draw_sample

SOURCE = '''\
"""A module."""

LIMIT: int = 3


def clamp(x: int, wide: bool = False) -> int:
    """Return x, at most 3."""
    note(x, "ä")
    if x < LIMIT and not wide:
        return x + 1
    assert x > 0, "not seen"
    raise ValueError(f"{x - 1}")
'''


def mutant_at(line: int, kind: str) -> Mutant:
    (mutant,) = (m for m in make_mutants("m.py", SOURCE) if (m.first_line, m.kind) == (line, kind))
    return mutant


def test_every_kind_of_change_is_made_once() -> None:
    found = {(m.first_line, m.kind, m.after) for m in make_mutants("m.py", SOURCE)}

    assert found == {
        (3, "constant", "(4)"),
        (6, "constant", "(True)"),
        (8, "dropped statement", "pass"),
        (8, "swapped arguments", "(note('ä', x))"),
        (9, "negation", "(wide)"),
        (9, "negation", "(not (x < LIMIT and (not wide)))"),
        (9, "and, or", "(x < LIMIT or not wide)"),
        (9, "comparison", "(x <= LIMIT)"),
        (10, "dropped return", "return None"),
        (10, "operator", "(x - 1)"),
        (10, "constant", "(2)"),
    }


def test_a_mutant_is_valid_and_changes_only_its_lines() -> None:
    lines = SOURCE.splitlines()
    for mutant in make_mutants("m.py", SOURCE):
        changed = mutant.apply(SOURCE).splitlines()
        ast.parse("\n".join(changed))
        different = [i for i, (a, b) in enumerate(zip(lines, changed, strict=True), 1) if a != b]
        assert different == [mutant.first_line], mutant.name


def test_the_sample_depends_on_the_seed_only_and_grows_at_its_end() -> None:
    small, large = draw_sample(1, 20, "optim/"), draw_sample(1, 40, "optim/")

    assert large[:20] == small
    assert draw_sample(2, 20, "optim/") != small
    assert {m.path.split("/")[2] for m in large} == {"optim"}


def test_the_modules_and_tests_exist() -> None:
    for path in (*MODULES, *TESTS):
        assert (ROOT / path).exists(), path


def test_tests_that_run_the_line_are_chosen_quickest_first() -> None:
    path = "src/penstock/optim/norms.py"
    mutant = next(m for m in make_mutants(path, (ROOT / path).read_text()) if m.first_line > 50)
    at = mutant.first_line
    lines = {
        "a.py::slow": {"seconds": 5.0, "lines": {path: [at]}},
        "a.py::quick": {"seconds": 1.0, "lines": {path: [at, at + 1]}},
        "b.py::other": {"seconds": 2.0, "lines": {path: [at]}},
        "b.py::elsewhere": {"seconds": 0.1, "lines": {path: [1]}},
        "c.py::endless": {"seconds": 1000.0, "lines": {path: [at]}},
    }

    assert choose_tests(mutant, lines) == ["a.py::quick", "b.py::other", "a.py::slow"]
