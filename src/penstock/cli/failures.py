"""Describe why a command failed, and choose its exit code."""

from __future__ import annotations

import errno
import os
import traceback

from penstock.cli.output import EXIT_BUG, EXIT_ERROR, print_errors
from penstock.errors import PenstockError
from penstock.version import __version__


def report_failure(problem: Exception, source: str = "") -> int:
    """Print why a command failed, and return its exit code.

    `source` is put in front of the message, for example "rank 1: ".
    """
    if isinstance(problem, PenstockError):
        print_errors(f"error: {source}{problem}")
        print_errors(*(f"also: {note}" for note in getattr(problem, "__notes__", ())))
        return EXIT_ERROR
    if isinstance(problem, OSError) and _is_users(problem):
        print_errors(f"error: {source}{describe_os_error(problem)}")
        return EXIT_ERROR
    text = "".join(traceback.format_exception(problem))
    print_errors(f"{text}{source}This is a bug in Penstock {__version__}; please report it.")
    return EXIT_BUG


_ADVICE = {
    errno.EIO: "the drive or the network failed; look at `dmesg`, or use another directory",
    errno.ESTALE: "the network file system lost it; mount it again, or use another directory",
    errno.ENOSPC: "free some space, or use another directory",
    errno.EDQUOT: "free some space, or use another directory",
    errno.EROFS: "mount it writable, or use another directory",
    errno.EACCES: "check its owner and permissions, or use another directory",
    errno.EPERM: "check its owner and permissions, or use another directory",
    errno.EMFILE: "raise the limit of open files, for example with `ulimit -n 65536`",
}
"""What the user can do about errors of the operating system."""


def describe_os_error(problem: OSError) -> str:
    """Name the files of an error, what went wrong, and what to do."""
    names = [problem.filename, problem.filename2]
    where = " -> ".join(os.fsdecode(name) for name in names if isinstance(name, str | bytes))
    # Without a name it is standard output, to which advice about directories does not apply.
    advice = _ADVICE.get(problem.errno or 0, "") if where or problem.errno == errno.EMFILE else ""
    parts = (f"{where}: " if where else "", problem.strerror or str(problem))
    return "".join(parts) + (f"; {advice}" if advice else "")


def _is_users(problem: OSError) -> bool:
    """Return whether the user can fix the error: it names a file, or a file system has failed."""
    failed = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN)
    return problem.filename is not None or problem.errno in failed
