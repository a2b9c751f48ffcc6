"""A pytest plugin that records which lines of chosen modules each test runs.

    PENSTOCK_LINE_MAP=map.json pytest -p tests.mutation.line_map TEST...

It traces only the first calls of each function in a test, because tracing slows Python down.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.mutation.modules import MODULES, ROOT

CALLS = 30
"""Number of calls of a function whose lines are recorded, per test."""

_FILES = {str(ROOT / path): path for path in MODULES}
_tests: dict[str, dict[str, Any]] = {}


class _Tracer:
    """Records the lines of one test, in all threads that it starts."""

    def __init__(self) -> None:
        self.lines: defaultdict[str, set[int]] = defaultdict(set)
        self._calls: Counter[CodeType] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code.co_filename not in _FILES or self._calls[code] >= CALLS:
            return None
        self._calls[code] += 1
        lines = self.lines[_FILES[code.co_filename]]

        def record(frame: FrameType, event: str, argument: object) -> Any:
            lines.add(frame.f_lineno)
            return record

        return record(frame, event, argument)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    tracer, start = _Tracer(), time.perf_counter()
    threading.settrace(tracer)
    sys.settrace(tracer)
    yield
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    if tracer.lines:
        _tests[item.nodeid] = {
            "seconds": round(time.perf_counter() - start, 3),
            "lines": {path: sorted(lines) for path, lines in tracer.lines.items()},
        }


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test that fails on the unchanged code, or only under the tracer, can kill no mutant."""
    if report.failed:
        _tests.setdefault(report.nodeid, {})["failed"] = True


def pytest_sessionfinish() -> None:
    passed = {name: test for name, test in _tests.items() if "failed" not in test}
    path = Path(os.environ["PENSTOCK_LINE_MAP"])
    path.write_text(json.dumps(passed))
