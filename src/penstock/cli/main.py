"""The `penstock` command. Room: show.

Exit codes: 0 fine; 1 something the user can mend, said in one message; 2 wrong usage; 70 a bug of
ours, with a traceback. `--json` puts data on standard output and nothing else there.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.data import data_app
from penstock.cli.generate import generate_command
from penstock.cli.plan import machines_command, plan_command
from penstock.cli.profile import SETTINGS as PROFILE_SETTINGS
from penstock.cli.profile import profile_command
from penstock.cli.report import compare_command, report_command
from penstock.cli.store import bench_app, store_app
from penstock.cli.train import train_command
from penstock.errors import PenstockError, ProbeError
from penstock.machine.machine import Machine
from penstock.machine.probe_cache import save_probe
from penstock.version import __version__

EXIT_MENDABLE = 1
EXIT_BUG = 70
EXIT_INTERRUPTED = 130

app = typer.Typer(
    help="Fine-tune language models larger than the GPU's memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

T = TypeVar("T")

app.command("plan")(plan_command)
app.command("machines")(machines_command)
app.command("train")(train_command)
app.command("profile", context_settings=PROFILE_SETTINGS)(profile_command)
app.command("report")(report_command)
app.command("compare")(compare_command)
app.command("generate")(generate_command)
app.add_typer(data_app, name="data")
app.add_typer(store_app, name="store")
app.add_typer(bench_app, name="bench")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs, nothing else.")]


def main() -> None:
    """The entry point: runs the command and turns what went wrong into an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("penstock", _spell_out)
        sys.stdout.reconfigure(errors="penstock")
    sys.exit(_flushed(run(sys.argv[1:])))


def run(arguments: list[str]) -> int:
    """One command line as an exit code. Usage errors and --help are typer's own business."""
    try:
        app(args=arguments, prog_name="penstock")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except PenstockError as problem:
        _say(f"error: {problem}")
        for also in getattr(problem, "__notes__", ()):
            _say(f"also: {also}")
        return EXIT_MENDABLE
    except Exception as problem:
        if isinstance(problem, OSError) and _is_mendable(problem):
            where = f"{problem.filename}: " if problem.filename is not None else ""
            _say(f"error: {where}{problem.strerror or problem}")
            return EXIT_MENDABLE
        _say(f"{traceback.format_exc()}This is a bug in Penstock {__version__}; please report it.")
        return EXIT_BUG
    return 0


def _is_mendable(problem: OSError) -> bool:
    """It names a file, or is of a kind that no program can help."""
    return problem.filename is not None or problem.errno in (errno.ENOSPC, errno.EDQUOT)


def _flushed(code: int) -> int:
    """`code`, or 1 where standard output did not take all of it: a closed pipe, a full disk."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as problem:
        # Whoever closed the pipe has read enough and wants no message.
        if problem.errno != errno.EPIPE:
            _say(f"error: standard output: {problem.strerror}")
        # What is left would be tried again at exit, and complained of there.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or EXIT_MENDABLE
    return code


def _spell_out(failed: UnicodeError) -> tuple[str, int]:
    """What an encoding lacks, in ASCII: a table is to be read on every terminal."""
    assert isinstance(failed, UnicodeEncodeError)
    lacking = failed.object[failed.start : failed.end]
    return "".join({"±": "+-"}.get(sign, "?") for sign in lacking), failed.end


class _Page(Console):
    """A console that spells out what its encoding lacks before it measures a table's columns."""

    def render_str(self, text: str, **options: Any) -> Text:
        with contextlib.suppress(LookupError):
            text = text.encode(self.encoding, "penstock").decode(self.encoding)
        return super().render_str(text, **options)


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=2, allow_nan=False))


@app.callback(invoke_without_command=True)
def penstock(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    as_json: AsJson = False,
) -> None:
    if version:
        if as_json:
            _print_json({"penstock": __version__})
        else:
            print(f"penstock {__version__}")
        raise typer.Exit


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine and say what to mend, why, and how. Exits 1 if something is bad."""
    from penstock.doctor import examine, render, to_json

    findings = examine()
    if as_json:
        _print_json(to_json(findings))
    else:
        render(findings, _Page())
    if any(finding.status == "bad" for finding in findings):
        raise typer.Exit(EXIT_MENDABLE)


@app.command()
def probe(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write it.")] = Path(
        "machine.json"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Coarser, in under 20 s.")] = False,
    storage: Annotated[
        list[Path] | None,
        typer.Option("--storage", help="A directory whose disk to measure; may be repeated."),
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw it, as a PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure memory, GPU links and disks, and write machine.json, from which plans are made."""
    from penstock import probe as probing
    from penstock import records
    from penstock.probe import plot as plotting
    from penstock.probe import tables

    _check_writable(out)
    if plot is not None:
        plotting.check_plot(plot)
        _check_writable(plot)
    options = probing.ProbeOptions(quick=quick, storage=tuple(storage or ()))
    try:
        result = _with_progress(lambda tell: probing.probe(options, tell), quiet=as_json)
    except KeyboardInterrupt:
        _say("interrupted; nothing was written")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    machine = _signed(result.machine)
    machine.save(out)
    kept = save_probe(machine)
    if plot is not None:
        plotting.save_plot(machine, plot)
    if as_json:
        _print_json(records.to_json(machine))
        _say(*(f"note: {note}" for note in result.notes))  # for which the machine has no place
        return
    console = _Page()
    console.print(tables.tables(result))
    console.print(f"{out} written, {result.seconds:.1f} s; {kept}", highlight=False)


def _signed(machine: Machine) -> Machine:
    """With the command that made it."""
    command = shlex.join(["penstock", *sys.argv[1:]])
    return replace(machine, made=replace(machine.made, command=command))


def _check_writable(path: Path) -> None:
    """By trying it, before the work and not after it. Leaves nothing behind."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():  # a terminal, a pipe: written to, not replaced
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as refused:
        raise ProbeError(
            f"{path} cannot be written ({refused.strerror}); "
            f"name a file in a directory where one can be made"
        ) from None


def _with_progress(work: Callable[[Callable[[int, int, str], None]], T], *, quiet: bool) -> T:
    """Run `work(tell)` under a progress bar on standard error, where there is a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("looking", total=None)

        def tell(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        return work(tell)
