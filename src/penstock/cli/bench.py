"""`penstock bench storage`: measure a disk through Penstock's storage engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from penstock.cli.flags import parse_size
from penstock.cli.output import AsJson
from penstock.cli.store import stores_json
from penstock.storage.benchmark import Rate, bench_storage
from penstock.storage.devices import Device, check_device, inspect_device
from penstock.storage.errors import DeviceNotEmptyError
from penstock.units import MiB, format_bytes, format_rate

bench_app = typer.Typer(help="Measure how fast parts of this machine are.", no_args_is_help=True)


@bench_app.callback()
def bench() -> None:
    """Measure how fast parts of this machine are."""


@bench_app.command("storage")
def storage_command(
    path: Annotated[Path, typer.Argument(help="Directory on the disk, or a raw device.")],
    nbytes: Annotated[
        str, typer.Option("--size", help="Number of bytes to write and read, e.g. 1GiB.")
    ] = "1GiB",
    passes: Annotated[int, typer.Option(help="Number of runs of each pattern.", min=1)] = 3,
    erase_device: Annotated[
        bool, typer.Option("--erase-device", help="Allow overwriting an entire raw device.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure read, write and mixed rates of a disk with each storage engine."""
    size = parse_size(nbytes, "--size", least=MiB)
    console = Console(stderr=True)
    confirm_devices(
        [path], erase=erase_device, say=lambda line: console.print(Text(line), soft_wrap=True)
    )
    hidden = as_json or not console.is_terminal
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(f"measuring {path}", total=1.0)
        rates = bench_storage(
            path,
            nbytes=size,
            passes=passes,
            erase=erase_device,
            progress=lambda done: bar.update(task, completed=done),
        )
    if as_json:
        print(json.dumps(stores_json(rates)))
    else:
        Console().print(render_rates(rates))


def confirm_devices(
    paths: Iterable[str | Path], *, erase: bool, say: Callable[[str], None]
) -> None:
    """Describe each raw device among the paths, and refuse it unless it may be erased.

    A device that looks empty is refused as well: on a command line, one letter names another disk.
    A device in use is always refused.
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
    """Describe a device in one line: path, model, size and content."""
    content = ", ".join(device.signatures) or "nothing with a known signature"
    uses = f"; in use: {', '.join(device.uses)}" if device.uses else ""
    return f"{device.path}: {device.model}, {format_bytes(device.nbytes)}, holds {content}{uses}"


def render_rates(rates: Sequence[Rate]) -> Table:
    """Show measured rates as a table."""
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
