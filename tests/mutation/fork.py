"""Run tests on changed code, in forks of a process that has imported and collected everything.

A change inside a function is applied to the live function objects of the fork, so a mutant costs
no more than its tests. A change of what runs at import needs a process that imports the package.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mutation.modules import MODULES, ROOT
from tests.mutation.mutants import Mutant
from tests.mutation.redirect import redirect

WORK = ROOT / "build/mutation"
OUTPUT = WORK / "output.txt"
FAILED = WORK / "failed.txt"
"""The test that failed in the last fork."""
CANNOT_PATCH = 77
"""Exit code of a fork in which the change could not be applied to the live functions."""
NO_TESTS = 78
"""Exit code of a fork whose tests do not exist any more: the line map is old."""


class Reporter:
    """A pytest plugin that writes down the first failed test."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not FAILED.read_text():
            FAILED.write_text(report.nodeid)


def run_in_fork(function: Callable[[], int], seconds: float, source: Path) -> tuple[str, str]:
    """Call a function in a fork; return the outcome, and the test that failed."""
    FAILED.write_text("")
    child = os.fork()
    if child == 0:
        _run(function, source)
    outcome = _wait(child, seconds)
    return outcome, FAILED.read_text()


def _run(function: Callable[[], int], source: Path) -> None:
    code = 3
    try:
        os.setsid()  # so that the time limit also ends what the tests start
        output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(ROOT)
        # Processes that the tests start import the changed copy.
        os.environ |= {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, seconds: float) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return _outcome(os.waitstatus_to_exitcode(status))
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timed out"


def _outcome(code: int) -> str:
    """Interpret pytest's exit code, or a signal if it is negative.

    A module that cannot be imported any more ends pytest with 2 or 4, according to who imports it.
    """
    if code == 0:
        return "survived"
    if code == CANNOT_PATCH:
        return "cannot patch"
    if code == NO_TESTS:
        return "not covered"
    return "killed" if code < 0 or code in (1, 2, 4) else "error"


def run_imported(tests: list[str], source: Path) -> int:
    """Import the package from `source` and run tests. The package must not be imported before."""
    assert "penstock" not in sys.modules
    sys.path.insert(0, str(source))
    redirect(str(source))
    return int(pytest.main([*_options(), "-x", *tests], plugins=[Reporter()]))


def _options() -> list[str]:
    # Libraries that were imported before, and are also plugins of pytest, are not rewritten.
    options = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--timeout", "300"]
    return [*options, "-q", "-p", "no:cacheprovider", "--basetemp", str(WORK / "tmp")]


class Collected:
    """A process that has collected tests, and forks itself for each mutant that it is sent."""

    def __init__(self, tests: Iterable[str], source: Path) -> None:
        read_request, write_request = _pipe()
        read_answer, write_answer = _pipe()
        self._process = os.fork()
        if self._process:
            read_request.close()
            write_answer.close()
            self._requests, self._answers = write_request, read_answer
        else:
            write_request.close()
            read_answer.close()
            self._requests, self._answers = read_request, write_answer
            output = os.open(WORK / "collected.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            self._source = source
            files = sorted({name.split("::")[0] for name in tests})
            os._exit(int(pytest.main([*_options(), *files], plugins=[Reporter(), self])))

    def run(self, mutant: Mutant | None, tests: list[str], seconds: float) -> tuple[str, str]:
        """Run tests in a fork, on changed code unless `mutant` is None."""
        change = [mutant.path, mutant.start, mutant.stop, mutant.after] if mutant else None
        message = json.dumps({"change": change, "tests": tests, "seconds": seconds})
        self._requests.write(message + "\n")
        self._requests.flush()
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError(f"collecting tests failed; see {WORK / 'collected.txt'}")
        outcome, failed = json.loads(answer)
        return outcome, failed

    def close(self) -> None:
        self._requests.close()
        os.waitpid(self._process, 0)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = _live_functions()
        for line in self._requests:
            request = json.loads(line)
            chosen = [items[name] for name in request["tests"] if name in items]
            answer = run_in_fork(
                lambda request=request, chosen=chosen: (
                    _run_items(session, chosen)
                    if request["change"] is None or _patch(functions, *request["change"])
                    else CANNOT_PATCH
                ),
                request["seconds"],
                self._source,
            )
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()
        os._exit(0)


def _pipe() -> tuple[Any, Any]:
    """Return the end to read from and the end to write to."""
    reader, writer = os.pipe()
    return os.fdopen(reader, "r"), os.fdopen(writer, "w")


def _run_items(session: pytest.Session, items: list[pytest.Item]) -> int:
    if not items:
        return NO_TESTS
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return 1
    return 0


def _live_functions() -> dict[str, list[FunctionType]]:
    """Return all functions of the modules that are changed, by file."""
    for path in MODULES:  # some are imported only when they are used
        name = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
        with contextlib.suppress(ImportError):  # a library may be missing that its tests need, too
            importlib.import_module(name)
    gc.unfreeze()  # the conftest froze them, and frozen objects are not listed
    found: dict[str, list[FunctionType]] = {}
    for thing in gc.get_objects():
        if type(thing) is FunctionType:  # isinstance would ask lazy objects for their class
            found.setdefault(thing.__code__.co_filename, []).append(thing)
    gc.freeze()
    return found


def _patch(
    functions: dict[str, list[FunctionType]], path: str, start: int, stop: int, after: str
) -> bool:
    """Apply a change to the live functions; return whether all that it changes could be."""
    file = str(ROOT / path)
    data = Path(file).read_bytes()
    old = compile(data, file, "exec")
    new = compile(data[:start] + after.encode() + data[stop:], file, "exec")
    changed = dict(_pairs(old, new))
    patched = False
    for function in functions.get(file, ()):
        code = changed.get(function.__code__)
        if code is not None and code != function.__code__:
            if code.co_freevars != function.__code__.co_freevars:
                return False
            function.__code__ = code
            patched = True
    return patched


def _pairs(old: CodeType, new: CodeType) -> Iterable[tuple[CodeType, CodeType]]:
    yield old, new
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
    if len(inner[0]) == len(inner[1]):
        for inner_old, inner_new in zip(*inner, strict=True):
            yield from _pairs(inner_old, inner_new)
