"""What commands do with disks: `store ls`, `store rm`, `--erase-device`. Room: hold.

Each does its work and returns data; each has a `render_...` that makes a table of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from penstock.storage.benchmark import Rate, bench_storage
from penstock.storage.devices import Device, check_device, inspect_device
from penstock.storage.errors import DeviceNotEmptyError, StoreInUseError
from penstock.storage.leftovers import FoundStore, find_stores, remove_store
from penstock.units import format_bytes, format_rate, parse_bytes


def list_stores(paths: Iterable[str | Path]) -> list[FoundStore]:
    """`penstock store ls PATH...`"""
    return find_stores(paths)


def render_stores(stores: Sequence[FoundStore]) -> Table:
    table = Table("store", "state", "owner", "age", "on disk", box=None, pad_edge=False)
    for store in stores:
        header = store.header
        owner = f"{header.pid} on {header.host}" if header else "unknown"
        age = _age(time.time() - header.created_ns / 1e9) if header else "unknown"
        table.add_row(store.data_path, store.state, owner, age, format_bytes(store.nbytes))
    if not stores:
        table.add_row("no stores", "", "", "", "")
    return table


@dataclass(frozen=True, slots=True)
class Removed:
    """What became of one store."""

    data_path: str
    freed_nbytes: int
    kept_because: str
    """Empty if it was removed."""


def remove_stores(paths: Iterable[str | Path], *, force: bool = False) -> list[Removed]:
    """`penstock store rm PATH...`: those whose runs are over. Living ones are kept, and said so."""
    removed = []
    for store in find_stores(paths):
        if store.state == "in use":
            removed.append(Removed(store.data_path, 0, "in use"))
            continue
        try:
            removed.append(Removed(store.data_path, remove_store(store, force=force), ""))
        except StoreInUseError as kept:
            removed.append(Removed(store.data_path, 0, str(kept)))
    return removed


def render_removed(removed: Sequence[Removed]) -> Table:
    table = Table("store", "freed", "", box=None, pad_edge=False)
    for item in removed:
        freed = "" if item.kept_because else format_bytes(item.freed_nbytes)
        table.add_row(item.data_path, freed, item.kept_because and f"kept: {item.kept_because}")
    if not removed:
        table.add_row("no stores", "", "")
    return table


def show_devices(paths: Iterable[str | Path], *, erase: bool, say: Callable[[str], None]) -> None:
    """`--erase-device`: say what each raw device among the paths is, and refuse those not meant.

    On a command line, where one letter names another disk, an empty-looking device is refused too
    unless `erase`; one in use always is. Directories pass.
    """
    for path in paths:
        if not Path(path).is_block_device():
            continue
        device = inspect_device(path)
        say(describe_device(device))
        check_device(device, erase=erase)
        if not erase:
            raise DeviceNotEmptyError(
                device.path, signatures=(), model=device.model, nbytes=device.nbytes
            )


def describe_device(device: Device) -> str:
    """One line for a person to look twice at."""
    holds = ", ".join(device.signatures) or "nothing with a known signature"
    used = f"; in use: {', '.join(device.uses)}" if device.uses else ""
    return f"{device.path}: {device.model}, {format_bytes(device.nbytes)}, holds {holds}{used}"


def render_rates(rates: Sequence[Rate]) -> Table:
    """The table of `penstock bench storage PATH`; the rates come from `rates.bench_storage`."""
    table = Table("engine", "request", "pattern", "median", "slowest", "fastest", box=None)
    for rate in rates:
        table.add_row(
            rate.engine,
            format_bytes(rate.request_nbytes),
            rate.pattern,
            format_rate(rate.median),
            format_rate(min(rate.samples)),
            format_rate(max(rate.samples)),
        )
    return table


def stores_json(items: Sequence[FoundStore | Removed | Rate]) -> list[dict[str, object]]:
    """For --json: plain values, uuids as text."""
    return [{key: _plain(value) for key, value in asdict(item).items()} for item in items]


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _age(seconds: float) -> str:
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= scale:
            return f"{seconds / scale:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# --------
# `penstock store ls|rm` and `penstock bench storage`. Room: show.
#
# Functions ready for typer; `cli.py` gives them their names.

EraseDevice = Annotated[
    bool, typer.Option("--erase-device", help="A raw device may be overwritten, all of it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs, nothing else.")]
Paths = Annotated[list[Path], typer.Argument(help="Directories, or raw devices.")]

store_app = typer.Typer(help="Stores on disk: what runs left behind.", no_args_is_help=True)
bench_app = typer.Typer(help="How fast parts of this machine are.", no_args_is_help=True)


@store_app.command("ls")
def list_command(paths: Paths, as_json: AsJson = False) -> None:
    """List the stores below these paths: in use, left by a killed run, or damaged."""
    found = list_stores(paths)
    if as_json:
        print(json.dumps(stores_json(found)))
    else:
        Console().print(render_stores(found))


@store_app.command("rm")
def remove_command(
    paths: Paths,
    force: Annotated[bool, typer.Option("--force", help="Damaged and foreign ones too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove stores whose runs are over. One that is in use is kept, and said so."""
    removed = remove_stores(paths, force=force)
    if as_json:
        print(json.dumps(stores_json(removed)))
    else:
        Console().print(render_removed(removed))


@bench_app.command("storage")
def storage(
    path: Annotated[Path, typer.Argument(help="A directory on the disk, or a raw device.")],
    nbytes: Annotated[str, typer.Option("--size", help="How much to write and read.")] = "1GiB",
    passes: Annotated[int, typer.Option(help="Times that each pattern runs.", min=1)] = 3,
    erase_device: EraseDevice = False,
    as_json: AsJson = False,
) -> None:
    """Read, write and mixed rates of a disk through each storage engine."""
    console = Console(stderr=True)
    show_devices(
        [path], erase=erase_device, say=lambda line: console.print(Text(line), soft_wrap=True)
    )
    hidden = as_json or not console.is_terminal
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(f"measuring {path}", total=1.0)
        rates = bench_storage(
            path,
            nbytes=parse_bytes(nbytes),
            passes=passes,
            erase=erase_device,
            progress=lambda done: bar.update(task, completed=done),
        )
    if as_json:
        print(json.dumps(stores_json(rates)))
    else:
        Console().print(render_rates(rates))
