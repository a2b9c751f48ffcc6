"""Who may import whom: the architecture, as a test."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src/penstock"

MAY_IMPORT: dict[str, set[str]] = {
    # names
    "units": set(),
    "tiers": set(),
    "errors": {"units"},
    "system": {"units"},
    "records": {"errors", "units"},
    "record_files": {"errors", "records"},
    "packing": {"units"},
    "alike": set(),
    # measure
    "figures": {"errors", "records"},
    "node_rates": {"errors", "figures"},
    "machine_parts": {"errors", "figures", "node_rates", "records", "tiers"},
    "machine": {"errors", "figures", "machine_parts", "node_rates", "record_files"},
    "discovery": {"__init__", "machine", "machine_parts", "system"},
    "probe": {
        *{"_native", "backward_thread", "discovery", "errors", "machine", "machine_parts"},
        *{"node_rates", "system", "units"},
        *{"memory.arena", "memory.placement", "memory.region"},  # what it measures, it must hold
        *{"optim.rate", "optim.sweep", "optim.threads"},  # inside functions: they bring torch
        "storage.engines",
    },
    "gpu_catalogue": set(),
    "backward_thread": set(),
    "bundled": {"errors", "machine", "record_files", "records"},
    "probed": {"errors", "machine"},
    "model_config": {"errors"},
    "model_survey": {"errors", "inventory", "model_config"},
    # hold
    "memory.placement": {"_native", "errors"},
    "memory.region": {
        *{"_native", "errors", "system", "units"},
        *{"memory.placement", "memory.residency"},
    },
    "memory.residency": {"_native", "errors", "units"},
    "memory.heap": {"_native", "units"},
    "memory.arena": {
        *{"_native", "errors", "units", "memory.placement", "memory.region", "memory.residency"},
        "memory.tensors",  # inside a function: the core imports without torch
    },
    "memory.pool": {"errors", "memory.arena", "packing", "units"},
    "storage": {
        *{"_native", "errors", "system", "units"},
        *{"memory.arena", "memory.region"},
    },
    "memory.tensors": {
        *{"_native", "errors", "system"},
        *{"memory.arena", "memory.placement", "memory.region", "memory.residency"},
    },
    "kv": {"_native", "alike", "errors", "units", "memory.arena"},
    # keep: files and directories; neither training nor plans nor where bytes rest
    "checkpoint": {"__init__", "errors", "record_files", "records", "units"},
    # update
    "optim": {"_native", "errors", "system", "memory.placement", "memory.tensors"},
    # decide: neither torch, nor the native core, nor memory
    "roles": {"units"},
    "inventory": {"errors", "roles", "units"},
    "workload": {"errors", "inventory", "roles", "units"},
    "budget": {"errors", "machine", "records", "tiers", "units"},
    "cpu_machine": {"machine"},
    "placement_parts": {"errors", "roles", "tiers", "units"},
    "lending": {"placement_parts", "roles", "tiers"},
    "schedule": {"roles"},
    "step_facts": {"inventory", "placement_parts", "roles", "tiers"},
    "step_order": {"inventory", "placement_parts", "roles", "schedule", "step_facts"},
    "lifetimes": {
        *{"inventory", "packing", "placement_parts", "roles", "schedule", "tiers", "units"},
    },
    "pools": {
        *{"errors", "inventory", "lifetimes", "packing", "placement_parts", "roles", "schedule"},
        *{"step_order", "tiers", "units", "workload"},
    },
    "transfers": {
        *{"inventory", "lifetimes", "placement_parts", "pools", "roles", "schedule", "tiers"},
        *{"units", "workload"},
    },
    "plan": {
        *{"budget", "errors", "inventory", "lending", "machine", "placement_parts", "pools"},
        *{"record_files", "roles", "tiers", "units", "workload"},
    },
    "cost": {
        *{"lending", "lifetimes", "pools"},
        *{"errors", "gpu_catalogue", "inventory", "machine", "placement_parts", "roles"},
        *{"schedule", "step_order", "tiers", "workload"},
    },
    "planner": {
        *{"budget", "cost", "errors", "inventory", "lending", "machine", "placement_parts", "plan"},
        *{"pools", "roles", "schedule", "step_order", "tiers", "units", "workload"},
    },
    "baselines": {
        *{"cost", "errors", "inventory", "placement_parts", "planner", "roles", "schedule"},
        *{"tiers", "units", "workload"},
    },
    # move
    "stream": {
        *{
            "alike",
            "backward_thread",
            "errors",
            "inventory",
            "lifetimes",
            "packing",
            "placement_parts",
        },
        *{"plan", "pools", "record_files", "records", "roles", "schedule", "step_facts"},
        *{"step_order", "tiers", "units", "workload", "memory.arena", "memory.heap"},
        *{"memory.placement", "checkpoint", "storage", "kv", "optim", "transfers"},
    },
    # show
    "preparing": {
        *{"budget", "cpu_machine", "discovery", "errors", "inventory", "machine", "model_config"},
        *{"model_survey", "plan", "planner", "probed", "roles", "stream", "workload"},
    },
    "observe": {
        *{
            "__init__",
            "budget",
            "cost",
            "discovery",
            "errors",
            "machine",
            "preparing",
            "record_files",
        },
        *{"records", "schedule", "step_order", "stream", "system", "tiers", "transfers", "units"},
    },
    "advice": {"budget", "errors", "inventory", "machine", "planner", "tiers", "units", "workload"},
    "plan_words": {"machine", "plan", "tiers"},
    "plan_view": {
        *{"cost", "errors", "inventory", "machine", "plan", "plan_words", "planner"},
        *{"tiers", "units"},
    },
    "plan_command": {
        *{"advice", "budget", "bundled", "discovery", "errors", "inventory", "machine"},
        *{"plan_view", "planner", "probe", "probed", "records", "roles", "model_survey", "tiers"},
        *{"units", "workload"},
    },
    "doctor": {"_native", "discovery", "records", "storage.engines", "system", "units"},
    "store_command": {"storage", "errors", "units"},
    "data": {"errors", "record_files", "units"},
    "data_command": {"data"},
    "train": {
        *{"__init__", "budget", "checkpoint", "data", "errors", "inventory", "machine"},
        *{
            "model_config",
            "model_survey",
            "plan",
            "plan_view",
            "plan_words",
            "planner",
            "preparing",
        },
        *{"observe", "records", "roles", "storage.leftovers", "stream", "tiers", "units"},
        *{"generate_prompts", "kv", "workload"},
    },
    "train_command": {"train"},
    "profile_command": {"machine", "observe", "units"},
    "report_command": {"observe"},
    "generate_prompts": {"errors", "kv"},
    "generate_model": {
        *{"checkpoint", "data", "errors", "inventory", "model_config", "model_survey"},
        *{"kv", "preparing", "stream", "units"},
    },
    "generate_command": {"generate_model", "generate_prompts", "kv", "units"},
    "cli": {
        *{"__init__", "data_command", "doctor", "errors", "generate_command", "machine"},
        *{"plan_command", "probe", "probed", "profile_command", "records", "report_command"},
        *{"store_command", "train_command"},
    },
    "__init__": {
        *{"discovery", "errors", "machine"},
        *{"budget", "plan", "planner", "preparing", "model_survey", "observe", "workload"},
        *{"memory.arena", "memory.placement", "memory.residency", "memory.tensors"},
        *{"storage.errors", "storage.store"},
    },
}
"""A package's row holds for each of its modules, which may also import each other."""

MAY_IMPORT_TORCH = {"checkpoint", "kv", "memory.tensors", "optim", "stream"}
"""At module level. Elsewhere torch is imported inside the function that needs it, or not at all."""

TORCH_FREE = [
    "cli",
    "cost",
    "discovery",
    "doctor",
    "machine",
    "memory.arena",
    "observe.compare_page",
    "observe.page",
    "observe.records",
    "observe.report",
    "plan",
    "planner",
    "probe",
]

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def row_of(path: Path) -> str | None:
    """The row that speaks for a file: its own, or its package's."""
    name = name_of(path)
    return next((row for row in (name, name.split(".")[0]) if row in MAY_IMPORT), None)


def penstock_imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, anywhere in it, without the leading `penstock.`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] == "penstock"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "penstock":
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                found.add(below if is_module(below) else str(node.module))
    return {name.removeprefix("penstock.") if "." in name else "__init__" for name in found}


def is_module(dotted: str) -> bool:
    path = PACKAGE.parent.joinpath(*dotted.split("."))
    return path.with_suffix(".py").exists() or path.with_suffix(".pyi").exists()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_stay_in_their_room(path: Path) -> None:
    if path.name == "__init__.py" and not penstock_imports(path):
        return
    row = row_of(path)
    assert row is not None, "a new module: say in MAY_IMPORT what it may know"
    allowed = MAY_IMPORT[row]
    for name in penstock_imports(path):
        package = name.split(".")[0]
        assert name in allowed or package in allowed or package == row, name


def test_the_table_has_no_ghosts() -> None:
    assert set(MAY_IMPORT) <= {row_of(path) for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_torch_is_imported_at_the_top_of_few_modules(path: Path) -> None:
    top = ast.parse(path.read_text()).body
    imported = {a.name for node in top if isinstance(node, ast.Import) for a in node.names}
    imported |= {str(node.module) for node in top if isinstance(node, ast.ImportFrom)}

    if not {name_of(path), name_of(path).split(".")[0]} & MAY_IMPORT_TORCH:
        assert not {name for name in imported if name.split(".")[0] == "torch"}


@pytest.mark.parametrize("module", TORCH_FREE)
def test_the_core_imports_without_torch(module: str) -> None:
    code = f"import sys, penstock.{module}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_its_room(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""

    assert "Room: " in docstring or path.stem == "__init__"


CSRC = PACKAGE.parents[1] / "csrc"

KNOWS_ONE_THING = {
    # what the text of a file shows                 the only files that may show it
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
def test_in_the_native_core_one_file_knows(sign: str) -> None:
    knowing = {path.name for path in CSRC.iterdir() if sign in path.read_text()}

    assert knowing <= KNOWS_ONE_THING[sign]


LONG_BY_NATURE = {"sweep_kernel"}
"""A Triton kernel is one function, and half of this one is its arguments."""


def test_files_and_functions_stay_short() -> None:
    for path in [*MODULES, *CSRC.iterdir()]:
        assert len(path.read_text().splitlines()) <= 300, f"{path.name} has grown past one room"
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name not in LONG_BY_NATURE:
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 40, f"{name_of(path)}.{node.name} does too much: {length} lines"
