"""The layers of the package: a module imports its own package, and packages of lower layers."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src/penstock"

LAYERS: list[set[str]] = [
    {"_native", "version", "units", "tiers", "io_retries"},
    {"errors", "packed_weights", "roles", "ticket", "durable_files"},
    {"records", "rank_place"},
    {"lora_options", "optimizer_options"},
    {"settings"},
    {"machine"},
    {"memory"},
    {"storage", "model", "optim"},
    {"probe", "doctor"},
    {"plan"},
    {"planner"},
    {"checkpoint", "data", "kv"},
    {"engine"},
    {"distributed"},
    {"generate", "observe"},
    {"autograd", "train"},
    {"integrations"},
    {"cli"},
    {"__init__", "__main__"},
]
"""Lowest first. A package may import its own modules and every package in a lower row."""

DEPTH = {name: depth for depth, row in enumerate(LAYERS) for name in row}

MAY_IMPORT_TORCH = {
    "memory.tensors",
    "memory.views",
    "optim",
    "model",
    "checkpoint",
    "kv",
    "engine",
    "distributed",
    "generate",
    "integrations",
    "autograd",
}
"""Packages that import torch at module level. Elsewhere torch is imported inside the function that
needs it, so that planning works, and the command line starts quickly, without it."""

TORCH_FREE = [
    *("cli.main", "doctor", "machine.discovery", "machine.machine", "memory.arena"),
    *("model.inventory", "model.survey", "observe.compare_page", "observe.launch", "observe.page"),
    *("observe.records", "plan.plan", "planner", "planner.cost", "probe", "settings"),
]

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


def top(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def penstock_imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, at any depth: deferred and type-only too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if top(a.name) == "penstock"}
        elif isinstance(node, ast.ImportFrom) and top(node.module or "") == "penstock":
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                found.add(below if is_module(below) else str(node.module))
    return {name.removeprefix("penstock").removeprefix(".") or "__init__" for name in found}


def is_module(dotted: str) -> bool:
    path = PACKAGE.parent.joinpath(*dotted.split("."))
    return path.with_suffix(".py").exists() or path.with_suffix(".pyi").exists() or path.is_dir()


NAMES = sorted(map(name_of, MODULES))


@functools.cache
def all_imports() -> dict[str, set[str]]:
    """Return the imports of each module. Every process of the tests collects this file, and
    parsing takes seconds, so only tests call it."""
    return {name_of(path): penstock_imports(path) for path in MODULES}


def test_every_package_has_a_layer() -> None:
    assert {top(name) for name in NAMES} | {"_native"} == set(DEPTH)


@pytest.mark.parametrize("name", NAMES)
def test_imports_point_down(name: str) -> None:
    above = {
        other
        for other in all_imports()[name]
        if top(other) != top(name) and DEPTH[top(other)] >= DEPTH[top(name)]
    }

    assert not above, f"penstock.{name} imports from its own or a higher layer: {sorted(above)}"


def test_there_are_no_import_cycles() -> None:
    """Counting deferred and type-only imports: a cycle means that two modules are one concept."""
    imports = all_imports()
    state: dict[str, int] = {}
    cycles: list[str] = []

    def visit(name: str, path: list[str]) -> None:
        state[name] = 1
        for other in sorted(imports.get(name, ())):
            if state.get(other) == 1:
                cycles.append(" -> ".join([*path[path.index(other) :], other]))
            elif other in imports and other not in state:
                visit(other, [*path, other])
        state[name] = 2

    for name in NAMES:
        if name not in state:
            visit(name, [name])
    assert not cycles, "\n".join(cycles)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_torch_is_imported_at_the_top_of_few_modules(path: Path) -> None:
    body = ast.parse(path.read_text()).body
    imported = {a.name for node in body if isinstance(node, ast.Import) for a in node.names}
    imported |= {str(node.module) for node in body if isinstance(node, ast.ImportFrom)}

    if not {name_of(path), top(name_of(path))} & MAY_IMPORT_TORCH:
        assert not {name for name in imported if top(name) == "torch"}


IMPORT_ALL = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(f"penstock.{module}")
    if "torch" in sys.modules:
        sys.exit(f"penstock.{module} imports torch")
"""


def test_the_core_imports_without_torch() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, *TORCH_FREE]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)

    assert ran.returncode == 0, ran.stderr


CSRC = PACKAGE.parents[1] / "csrc"

KNOWS_ONE_THING = {
    # text that a file contains                     the only files that may contain it
    "sys/mman.h": {"os_linux.cpp", "paging_linux.cpp", "ring_linux.cpp"},
    "sys/syscall.h": {"os_linux.cpp", "ring_linux.cpp"},
    "unistd.h": {"os_linux.cpp", "disk_linux.cpp", "paging_linux.cpp", "ring_linux.cpp"},
    "nanobind": {
        *{"bind.cpp", "bind_paging.cpp", "bind_store.cpp", "bind_store.h", "bind_sweep.cpp"},
    },
    "libcuda": {"cuda_driver.cpp"},
    "dlfcn.h": {"cuda_driver.cpp"},
    "torch/": set(),
    "Python.h": set(),
}


@pytest.mark.parametrize("sign", KNOWS_ONE_THING)
def test_system_interfaces_of_the_native_core_stay_in_their_files(sign: str) -> None:
    knowing = {path.name for path in CSRC.iterdir() if sign in path.read_text()}

    assert knowing <= KNOWS_ONE_THING[sign]
