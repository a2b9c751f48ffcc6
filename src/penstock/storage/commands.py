"""What commands do with disks: `store ls`, `store rm`, `--erase-device`. Room: hold.

Each does its work and returns data; each has a `render_...` that makes a table of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from penstock.storage.devices import Device, check_device, inspect_device
from penstock.storage.errors import DeviceNotEmptyError, StoreInUseError
from penstock.storage.leftovers import FoundStore, find_stores, remove_store
from penstock.storage.rates import Rate
from penstock.units import format_bytes, format_rate


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


def as_json(items: Sequence[FoundStore | Removed | Rate]) -> list[dict[str, object]]:
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
