"""Run each C++ test under the sanitizers, and compare the type stub with the module."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest

from penstock import _native

REPO = Path(__file__).parents[1]
PROGRAM = Path(os.environ.get("PENSTOCK_NATIVE_TESTS", REPO / "build/native-tests/native_tests"))


def cases() -> list[str]:
    if not PROGRAM.exists():
        return []
    listed = subprocess.run([PROGRAM, "--list"], capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def test_the_native_tests_were_built() -> None:
    assert cases(), f"{PROGRAM} is missing or empty: `make test` builds it"


@pytest.mark.parametrize("name", cases())
def test_native(name: str) -> None:
    run = subprocess.run([PROGRAM, name], capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr


def public_names(body: list[ast.stmt]) -> dict[str, set[str]]:
    """Return the names in the stub: each class with its members, each function with none."""
    names: dict[str, set[str]] = {}
    for item in body:
        if isinstance(item, ast.ClassDef):
            names[item.name] = set(public_names(item.body))
        elif isinstance(item, ast.FunctionDef):
            names[item.name] = set()
        elif isinstance(item, ast.Assign):
            names.update({t.id: set() for t in item.targets if isinstance(t, ast.Name)})
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names[item.target.id] = set()
    return {name: members for name, members in names.items() if not name.startswith("_")}


def test_the_stub_lists_the_names_of_the_module() -> None:
    stub = public_names(ast.parse((REPO / "src/penstock/_native.pyi").read_text()).body)

    assert set(stub) == {name for name in dir(_native) if not name.startswith("_")}
    for name, members in stub.items():
        for member in members:
            assert hasattr(getattr(_native, name), member), f"{name}.{member}"


def test_every_build_has_the_baseline_and_uses_the_best_instruction_set() -> None:
    names = _native.isa_names()

    assert names[0] == "baseline"
    assert _native.isa_name() in names


@pytest.mark.parametrize("isa", _native.isa_names())
def test_penstock_isa_limits_the_instruction_set(isa: str) -> None:
    code = "from penstock import _native; print(_native.isa_name())"
    run = subprocess.run(
        [os.sys.executable, "-c", code],  # type: ignore[attr-defined]
        env={**os.environ, "PENSTOCK_ISA": isa},
        capture_output=True,
        text=True,
        check=True,
    )

    assert run.stdout.strip() == isa
