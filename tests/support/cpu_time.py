"""Measure the CPU time of each test file, child processes included.

`make test` uses two cores, so its wall time is about half of the sum that this plugin reports, on a
machine that does nothing else.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.fork_server import CHILDREN_SECONDS

FILES_LISTED = 10


def seconds_used() -> float:
    """Return the CPU time of this process and of the children that have ended."""
    used = os.times()
    own = used.user + used.system + used.children_user + used.children_system
    return own + CHILDREN_SECONDS[0]


class CpuTime:
    """Attach the CPU time of each phase to its report, and sum the reports by file.

    With pytest-xdist the first half runs in the workers and the second half in the controller: a
    report's attributes travel with it."""

    def __init__(self) -> None:
        self.mark = seconds_used()
        self.files: Counter[str] = Counter()

    def pytest_collection_finish(self) -> None:
        self.mark = seconds_used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        # The difference to the last mark, so that no CPU time falls between two phases.
        now = seconds_used()
        report.cpu_seconds, self.mark = now - self.mark, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files[report.nodeid.split("::")[0]] += getattr(report, "cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_sep("=", f"CPU time of the tests: {sum(self.files.values()):.0f} s")
        for name, seconds in self.files.most_common(FILES_LISTED):
            terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
