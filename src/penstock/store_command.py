"""`penstock store ls|rm` and `penstock bench storage`. Room: show.

Functions ready for typer; `cli.py` gives them their names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from penstock.storage import commands
from penstock.storage.rates import bench_storage
from penstock.units import parse_bytes

EraseDevice = Annotated[
    bool, typer.Option("--erase-device", help="A raw device may be overwritten, all of it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs, nothing else.")]
Paths = Annotated[list[Path], typer.Argument(help="Directories, or raw devices.")]

store_app = typer.Typer(help="Stores on disk: what runs left behind.", no_args_is_help=True)
bench_app = typer.Typer(help="How fast parts of this machine are.", no_args_is_help=True)


@store_app.command("ls")
def list_stores(paths: Paths, as_json: AsJson = False) -> None:
    """List the stores below these paths: in use, left by a killed run, or damaged."""
    found = commands.list_stores(paths)
    if as_json:
        print(json.dumps(commands.as_json(found)))
    else:
        Console().print(commands.render_stores(found))


@store_app.command("rm")
def remove_stores(
    paths: Paths,
    force: Annotated[bool, typer.Option("--force", help="Damaged and foreign ones too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove stores whose runs are over. One that is in use is kept, and said so."""
    removed = commands.remove_stores(paths, force=force)
    if as_json:
        print(json.dumps(commands.as_json(removed)))
    else:
        Console().print(commands.render_removed(removed))


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
    commands.show_devices(
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
        print(json.dumps(commands.as_json(rates)))
    else:
        Console().print(commands.render_rates(rates))
