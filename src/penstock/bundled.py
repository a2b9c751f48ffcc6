"""Machine files that come with the package: plan for a machine one does not own. Room: measure."""

from __future__ import annotations

from importlib import resources

from penstock.errors import MachineError
from penstock.machine import Machine
from penstock.record_files import parse
from penstock.records import from_json

DEFAULT = "desktop-24gb"
"""What is planned for where there is no GPU and no machine was named."""


def bundled_names() -> list[str]:
    folder = resources.files("penstock") / "machines"
    names = (file.name for file in folder.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def bundled(name: str) -> Machine:
    """One of them by name. MachineError lists the names."""
    if name not in bundled_names():
        listed = ", ".join(bundled_names())
        raise MachineError("machine", f"there is no bundled {name!r}; there are {listed}")
    text = (resources.files("penstock") / "machines" / f"{name}.json").read_text(encoding="utf-8")
    return from_json(Machine, parse(text), where=name, error=MachineError)
