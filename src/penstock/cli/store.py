"""`penstock store`: list and remove stores that runs left on disks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock.cli.output import AsJson
from penstock.storage.benchmark import Rate
from penstock.storage.errors import StorageError
from penstock.storage.leftovers import (
    FoundStore,
    find_stores,
    remove_empty_directories,
    remove_store,
)
from penstock.units import format_bytes

Paths = Annotated[list[Path], typer.Argument(help="Directories or raw devices.")]

store_app = typer.Typer(
    help="List and remove stores that runs left on disks.", no_args_is_help=True
)


@store_app.command("ls")
def list_command(paths: Paths, as_json: AsJson = False) -> None:
    """List the stores below the paths: in use, left by a killed run, damaged or unreadable."""
    stores = find_stores(paths)
    if as_json:
        print(json.dumps(stores_json(stores)))
    else:
        Console().print(render_stores(stores))


@store_app.command("rm")
def remove_command(
    paths: Paths,
    force: Annotated[
        bool, typer.Option("--force", help="Also remove stores of other machines.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the stores below the paths whose runs have ended. Stores in use are kept."""
    removed = remove_stores(paths, force=force)
    if as_json:
        print(json.dumps(stores_json(removed)))
    else:
        Console().print(render_removed(removed))


@dataclass(frozen=True, slots=True)
class Removed:
    """The outcome of removing one store."""

    data_path: str
    freed_nbytes: int
    kept_because: str
    """Why the store was kept; "" if it was removed."""


def remove_stores(paths: Iterable[str | Path], *, force: bool = False) -> list[Removed]:
    """Remove the stores below the paths, except those in use, and report on each."""
    paths, removed = list(paths), []
    for store in find_stores(paths):
        if store.state == "in use":
            removed.append(Removed(store.data_path, 0, "in use"))
            continue
        try:
            removed.append(Removed(store.data_path, remove_store(store, force=force), ""))
        # A run has opened the store since it was listed, or it belongs to another user.
        except (StorageError, OSError) as kept:
            removed.append(Removed(store.data_path, 0, str(kept)))
    remove_empty_directories(paths)
    return removed


def render_stores(stores: Sequence[FoundStore]) -> Table:
    """Show stores as a table."""
    table = Table("store", "state", "owner", "age", "on disk", box=None, pad_edge=False)
    for store in stores:
        header = store.header
        owner = f"{store.user}, {header.pid} on {header.host}" if header else store.user
        age = _format_age(time.time() - header.created_ns / 1e9) if header else "unknown"
        size = "unknown" if store.nbytes is None else format_bytes(store.nbytes)
        table.add_row(store.data_path, store.state, owner, age, size)
    if not stores:
        table.add_row("no stores", "", "", "", "")
    return table


def render_removed(removed: Sequence[Removed]) -> Table:
    """Show which stores were removed, and why others were kept."""
    table = Table("store", "freed", "", box=None, pad_edge=False)
    for item in removed:
        freed = "" if item.kept_because else format_bytes(item.freed_nbytes)
        table.add_row(item.data_path, freed, item.kept_because and f"kept: {item.kept_because}")
    if not removed:
        table.add_row("no stores", "", "")
    return table


def stores_json(items: Sequence[FoundStore | Removed | Rate]) -> list[dict[str, object]]:
    """Convert items for --json: plain values, and UUIDs as text."""
    return [{key: _to_plain(value) for key, value in asdict(item).items()} for item in items]


def _to_plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(inner) for inner in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _format_age(seconds: float) -> str:
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= scale:
            return f"{seconds / scale:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
