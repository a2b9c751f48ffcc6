"""The public surface, frozen. A change here is a change to users: argue for it in the commit."""

from __future__ import annotations

import importlib
import inspect
import tomllib
from pathlib import Path

import penstock
from penstock import errors

REPO = Path(__file__).parents[1]

PUBLIC = [
    "Arena",
    "Budget",
    "Interleave",
    "Machine",
    "Node",
    "PenstockError",
    "Plan",
    "Residency",
    "StorageError",
    "Store",
    "Stripe",
    "Workload",
    "discover",
    "empty",
    "from_tensor",
    "full",
    "generate",
    "kv",
    "make_plan",
    "move",
    "observe",
    "optim",
    "placing",
    "prepare",
    "survey",
    "where",
    "zeros",
]


def test_public_names() -> None:
    assert sorted(penstock.__all__) == PUBLIC
    assert set(dir(penstock)) == {*PUBLIC, "__version__"}


def test_every_public_name_is_there_and_explained() -> None:
    for name in PUBLIC:
        assert inspect.getdoc(getattr(penstock, name)), name


def test_a_name_is_the_thing_and_not_a_module_of_that_name() -> None:
    importlib.import_module("penstock.cli.plan")  # imports most of the package

    assert all(
        callable(getattr(penstock, name))
        for name in PUBLIC
        if name not in ("generate", "kv", "optim")
    )


def test_a_missing_name_is_an_attribute_error() -> None:
    assert not hasattr(penstock, "no_such_thing")


def test_every_error_is_a_penstock_error() -> None:
    kinds = [k for k in vars(errors).values() if inspect.isclass(k) and issubclass(k, Exception)]

    assert len(kinds) > 10
    assert all(issubclass(kind, errors.PenstockError) for kind in kinds)


def test_the_version_is_the_same_in_both_places() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]

    assert penstock.__version__ == project["version"]
