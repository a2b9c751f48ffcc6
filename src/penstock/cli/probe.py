"""`penstock probe`: measure the machine."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import (
    EXIT_INTERRUPTED,
    AsJson,
    EncodingConsole,
    print_errors,
    print_json,
    progress_bar,
)
from penstock.errors import ProbeError
from penstock.machine.machine import Machine
from penstock.machine.probe_cache import save_probe


def probe_command(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write the machine description to.")
    ] = Path("machine.json"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure less accurately, in under 20 s.")
    ] = False,
    storage: Annotated[
        list[Path] | None,
        typer.Option("--storage", help="Directory on a disk to measure. Repeatable."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also plot the results to this PNG file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure memory, GPU links and disks, and write machine.json, which plans are based on."""
    from penstock import probe as probing
    from penstock import records
    from penstock.probe import plot as plotting
    from penstock.probe import tables

    # Before the measurement, which takes minutes.
    _check_writable(out)
    if plot is not None:
        plotting.check_plot(plot)
        _check_writable(plot)
    options = probing.ProbeOptions(quick=quick, storage=tuple(storage or ()))
    try:
        with progress_bar("discovering", quiet=as_json) as report:
            result = probing.probe(options, report)
    except KeyboardInterrupt:
        print_errors("interrupted; nothing was written")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    machine = _record_command(result.machine)
    machine.save(out)
    saved = save_probe(machine)
    if plot is not None:
        plotting.save_plot(machine, plot)
    if as_json:
        print_json(records.to_json(machine))
        print_errors(*(f"note: {note}" for note in result.notes))  # machine.json has no notes
        return
    console = EncodingConsole()
    console.print(tables.tables(result))
    console.print(f"{out} written, {result.seconds:.1f} s; {saved}", highlight=False)


def _record_command(machine: Machine) -> Machine:
    """Record the command line in the machine description."""
    command = shlex.join(["penstock", *sys.argv[1:]])
    return replace(machine, made=replace(machine.made, command=command))


def _check_writable(path: Path) -> None:
    """Raise ProbeError unless the file can be written. Leaves nothing behind."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():  # a terminal or pipe is written to, not replaced
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as refused:
        raise ProbeError(
            f"{path} cannot be written ({refused.strerror}); "
            f"choose a file in an existing, writable directory"
        ) from None
