"""Pytest plugin of `run.py`: list the tests, or run the ones that the parent process asks for.

The plugin talks to its parent over two pipes, whose file descriptors are in the environment. It
sends one JSON object per line, and reads one test id per line. Standard input and output cannot
serve: pytest replaces them while a test runs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from typing import Any, TextIO

import pytest

ORDERS, REPORTS = "PENSTOCK_GPU_ORDERS", "PENSTOCK_GPU_REPORTS"
"""Environment variables with the descriptors to read test ids from and to write JSON to."""


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        # Some tests set a limit for pytest-timeout. Without it, run.py limits every test.
        config.addinivalue_line("markers", "timeout(seconds): used by pytest-timeout")
    config.pluginmanager.register(_Worker())


class _Worker:
    def __init__(self) -> None:
        self._reports: TextIO = os.fdopen(int(os.environ.pop(REPORTS)), "w", encoding="utf-8")
        orders = os.environ.pop(ORDERS, None)
        self._orders: TextIO | None = None
        if orders is not None:
            self._orders = os.fdopen(int(orders), encoding="utf-8")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._send(uncollected=report.nodeid, detail=str(report.longrepr))
        elif report.skipped:
            self._send(skipped_file=report.nodeid, detail=_reason(report))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if self._orders is None:
            tests = [(item.nodeid, str(item.path)) for item in session.items]
            self._send(collected=tests, root=str(session.config.rootpath))
            return True
        items = {item.nodeid: item for item in session.items}
        self._send(ready=True)
        for line in self._orders:
            self._run(items.get(line.strip()), line.strip())
        return True

    def _run(self, item: pytest.Item | None, test: str) -> None:
        self._result: dict[str, Any] = {"test": test, "outcome": "passed", "detail": ""}
        began = time.perf_counter()
        if item is None:
            self._result |= {"outcome": "error", "detail": "this process did not collect the test"}
        else:
            # No test follows as far as pytest can know, so it tears down all fixtures.
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        if self._result["outcome"] in ("failed", "error"):
            _release_last_failure()
        self._send(**self._result, seconds=time.perf_counter() - began)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst of the outcomes of setup, call and teardown."""
        if report.failed:
            outcome = "failed" if report.when == "call" else "error"
            self._result |= {"outcome": outcome, "detail": str(report.longrepr)}
        elif report.skipped and self._result["outcome"] == "passed":
            expected = hasattr(report, "wasxfail")
            outcome, reason = ("xfailed", report.wasxfail) if expected else ("skipped", "")
            self._result |= {"outcome": outcome, "detail": reason or _reason(report)}

    def _send(self, **message: Any) -> None:
        print(json.dumps(message), file=self._reports, flush=True)


def _release_last_failure() -> None:
    """Drop the traceback that pytest keeps for debuggers: its frames hold tensors on the GPU."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # files that the failed test left open
        gc.collect()


def _reason(report: Any) -> str:
    """Return why pytest skipped a test or a file."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)
