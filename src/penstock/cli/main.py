"""The `penstock` command: all subcommands, and what their failures mean to the caller.

Exit codes: 0 for success; 1 for a problem that the user can fix, described in one message; 2 for
wrong usage; 70 for a bug in Penstock, with a traceback; 130 after Ctrl-C. With `--json`, standard
output contains the data and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import warnings
from typing import Annotated

import typer

from penstock.cli.bench import bench_app
from penstock.cli.check import check_command
from penstock.cli.compare import compare_command
from penstock.cli.data import data_app
from penstock.cli.doctor import doctor_command
from penstock.cli.failures import report_failure
from penstock.cli.fit import fit_command
from penstock.cli.generate import generate_command
from penstock.cli.machines import machines_command
from penstock.cli.merge import merge_command
from penstock.cli.output import (
    EXIT_ERROR,
    AsJson,
    format_warning,
    print_errors,
    print_json,
    register_ascii_fallback,
)
from penstock.cli.plan import plan_command
from penstock.cli.probe import probe_command
from penstock.cli.profile import CONTEXT_SETTINGS as PROFILE_CONTEXT
from penstock.cli.profile import profile_command
from penstock.cli.report import report_command
from penstock.cli.store import store_app
from penstock.cli.train import train_command
from penstock.errors import PenstockError
from penstock.version import __version__

TRAIN, MACHINE, OBSERVE = "Train", "Machine", "Observe"
"""Panels of `penstock --help`."""

app = typer.Typer(
    help="Fine-tune language models larger than the GPU's memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.command("fit", rich_help_panel=TRAIN)(fit_command)
app.command("plan", rich_help_panel=TRAIN)(plan_command)
app.command("train", rich_help_panel=TRAIN)(train_command)
app.command("generate", rich_help_panel=TRAIN)(generate_command)
app.command("merge", rich_help_panel=TRAIN)(merge_command)
app.command("check", rich_help_panel=TRAIN)(check_command)
app.add_typer(data_app, name="data", rich_help_panel=TRAIN)
app.command("doctor", rich_help_panel=MACHINE)(doctor_command)
app.command("probe", rich_help_panel=MACHINE)(probe_command)
app.command("machines", rich_help_panel=MACHINE)(machines_command)
app.add_typer(store_app, name="store", rich_help_panel=MACHINE)
app.add_typer(bench_app, name="bench", rich_help_panel=MACHINE)
app.command("profile", context_settings=PROFILE_CONTEXT, rich_help_panel=OBSERVE)(profile_command)
app.command("report", rich_help_panel=OBSERVE)(report_command)
app.command("compare", rich_help_panel=OBSERVE)(compare_command)


@app.callback(invoke_without_command=True)
def penstock(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    as_json: AsJson = False,
) -> None:
    if version:
        if as_json:
            print_json({"penstock": __version__})
        else:
            print(f"penstock {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line of this process and exit with its exit code."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        register_ascii_fallback()
        sys.stdout.reconfigure(errors="penstock")
    warnings.formatwarning = format_warning
    sys.exit(_flush_output(run(sys.argv[1:])))


def _open_closed_streams() -> None:
    """Open standard streams that are closed, as after `penstock train 2>&-`, on /dev/null.

    The next file that is opened gets the lowest free number. A checkpoint or a store with the
    number 2 would receive the messages of every library that writes to standard error.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
            continue
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets this number: it is the lowest free one
        os.set_inheritable(number, True)
        stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. Typer handles usage errors and --help."""
    try:
        if arguments[:1] != ["doctor"]:  # which reports it, and everything else it finds
            _check_current_directory()
        app(args=arguments, prog_name="penstock")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except Exception as problem:
        return report_failure(problem)
    return 0


def _check_current_directory() -> None:
    """Raise PenstockError if the current directory was deleted: no relative path has a meaning."""
    try:
        os.getcwd()
    except OSError as problem:
        raise PenstockError(
            f"the current directory does not exist any more ({problem.strerror}); change to "
            f"another one with cd"
        ) from None


def _flush_output(code: int) -> int:
    """Return `code`, or 1 if standard output could not be written: a closed pipe or a full disk."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as problem:
        # The reader of a closed pipe, such as `head`, has read enough and wants no message.
        if problem.errno != errno.EPIPE:
            print_errors(f"error: standard output: {problem.strerror}")
        # Python flushes again at exit, and would print a second error.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or EXIT_ERROR
    return code
