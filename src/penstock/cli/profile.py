"""`penstock profile`. Room: show.

`cli.py` gives it its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Option = typer.Option

SETTINGS = {"allow_interspersed_args": False}
"""What follows the first word that is no option of ours is the program's."""


def profile_command(
    command: Annotated[
        list[str], typer.Argument(help="The program and its arguments, after `--`.", metavar="...")
    ],
    out: Annotated[Path, Option("--out", "-o", help="The directory to write.")] = Path("run"),
    interval: Annotated[float, Option(help="Seconds between samples.")] = 0.1,
    exact: Annotated[
        str, Option(help="Steps whose every copy is recorded, such as 3,5; they run slower.")
    ] = "",
    limit: Annotated[str, Option(help="The most that the directory may take.")] = "256MiB",
    machine: Annotated[
        Path | None, Option(help="What `penstock probe` wrote: how fast links could be.")
    ] = None,
    all_processes: Annotated[
        bool, Option("--all-processes", help="Record every process that uses torch.")
    ] = False,
) -> None:
    """Run any PyTorch program and record where its memory and time go. Its exit code is ours."""
    from penstock.machine.machine import Machine
    from penstock.observe.hardware import ceilings
    from penstock.observe.launch import ProfileOptions, profile
    from penstock.observe.observer import finish

    options = ProfileOptions(
        interval=_interval(interval),
        exact=_steps(exact),
        limit=_limit(limit),
        all_processes=all_processes,
        ceilings=ceilings(Machine.load(machine)) if machine is not None else None,
    )
    code = profile(command, out, options)
    typer.echo(finish(out), err=True)
    raise typer.Exit(code)


def _interval(given: float) -> float:
    from penstock.observe.observer import LEAST_INTERVAL

    if not LEAST_INTERVAL <= given < float("inf"):
        raise typer.BadParameter(
            f"must be {LEAST_INTERVAL} s or more, got {given}", param_hint="--interval"
        )
    return given


def _steps(given: str) -> tuple[int, ...]:
    words = [word.strip() for word in given.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise typer.BadParameter(
            f"must be steps such as 3,5, counted from 1, got {given}", param_hint="--exact"
        )
    return tuple(int(word) for word in words)


def _limit(given: str) -> int:
    from penstock.units import MiB, parse_bytes

    try:
        nbytes = parse_bytes(given)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong), param_hint="--limit") from None
    if nbytes < MiB:
        raise typer.BadParameter(f"must be 1MiB or more, got {given}", param_hint="--limit")
    return nbytes
