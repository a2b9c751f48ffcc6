"""The public names of the package.

A change to these lists is a change for users: the commit that makes it explains why.
"""

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
    "Settings",
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
    "stream",
    "survey",
    "where",
    "zeros",
]


def test_public_names() -> None:
    assert sorted(penstock.__all__) == PUBLIC
    assert set(dir(penstock)) == {*PUBLIC, "__version__"}


def test_every_public_name_exists_and_has_a_docstring() -> None:
    for name in PUBLIC:
        assert inspect.getdoc(getattr(penstock, name)), name


def test_public_names_are_not_shadowed_by_modules_of_the_same_name() -> None:
    importlib.import_module("penstock.cli.plan")  # imports most of the package

    assert all(
        callable(getattr(penstock, name))
        for name in PUBLIC
        if name not in ("generate", "kv", "optim")
    )


def test_an_unknown_name_raises_attribute_error() -> None:
    assert not hasattr(penstock, "no_such_thing")


def test_every_error_is_a_penstock_error() -> None:
    kinds = [k for k in vars(errors).values() if inspect.isclass(k) and issubclass(k, Exception)]

    assert len(kinds) > 10
    assert all(issubclass(kind, errors.PenstockError) for kind in kinds)


def test_the_version_is_defined_in_one_place() -> None:
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())
    source = REPO / settings["tool"]["scikit-build"]["metadata"]["version"]["input"]

    assert settings["project"]["dynamic"] == ["version"]
    assert "version" not in settings["project"]
    assert f'__version__ = "{penstock.__version__}"' in source.read_text()
