"""`penstock profile`: record a PyTorch program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.flags import parse_size
from penstock.units import MiB

LONGEST_INTERVAL = 3600
"""Most seconds between samples; threads cannot wait for arbitrarily long times."""

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""Pass everything after the first word that is not an option of ours to the program."""


def profile_command(
    command: Annotated[
        list[str], typer.Argument(help="Program and its arguments, after `--`.", metavar="...")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Directory to write the recording to.")
    ] = Path("run"),
    interval: Annotated[float, typer.Option(help="Seconds between samples.")] = 0.1,
    exact: Annotated[
        str,
        typer.Option(help="Steps to record every copy of, e.g. 3,5. These steps run slower."),
    ] = "",
    limit: Annotated[str, typer.Option(help="Maximum size of the recording.")] = "256MiB",
    machine: Annotated[
        Path | None,
        typer.Option(help="Machine file of `penstock probe`, for the peak rates of links."),
    ] = None,
    all_processes: Annotated[
        bool, typer.Option("--all-processes", help="Record every process that uses torch.")
    ] = False,
) -> None:
    """Run a PyTorch program and record its memory and time. Exits with the program's code."""
    from penstock.machine.machine import Machine
    from penstock.observe.hardware import ceilings
    from penstock.observe.launch import ProfileOptions, profile
    from penstock.observe.observer import finish

    options = ProfileOptions(
        interval=_check_interval(interval),
        exact=_parse_steps(exact),
        limit=parse_size(limit, "--limit", least=MiB),
        all_processes=all_processes,
        ceilings=ceilings(Machine.load(machine)) if machine is not None else None,
    )
    code = profile(command, out, options)
    typer.echo(finish(out), err=True)
    raise typer.Exit(code)


def _check_interval(seconds: float) -> float:
    from penstock.observe.observer import MIN_INTERVAL

    if not MIN_INTERVAL <= seconds <= LONGEST_INTERVAL:
        raise typer.BadParameter(
            f"must be from {MIN_INTERVAL} to {LONGEST_INTERVAL} s, got {seconds}",
            param_hint="--interval",
        )
    return seconds


def _parse_steps(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and 0 < len(word) <= 18 and int(word) > 0 for word in words):
        raise typer.BadParameter(
            f"must be step numbers such as 3,5, counted from 1, got {text}", param_hint="--exact"
        )
    return tuple(int(word) for word in words)
