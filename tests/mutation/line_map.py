"""A pytest plugin that records which lines of the package each test runs.

    PENSTOCK_LINE_MAP=map.jsonl pytest -p tests.mutation.line_map TEST...

It adds one JSON line per test that passes, so that a stopped recording can be continued: tests that
the file has already are not run again. Code that a test runs in another process is not recorded.
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

from tests.mutation.modules import ROOT

CALLS = 100
"""Number of calls of a function whose lines are recorded per test: tracing slows Python down."""

_SOURCES = str(ROOT / "src/penstock") + "/"
_failed: set[str] = set()


class _Tracer:
    """Records the lines of one test, in all threads that it starts."""

    def __init__(self) -> None:
        self.lines: defaultdict[str, set[int]] = defaultdict(set)
        self._calls: Counter[CodeType] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_SOURCES) or self._calls[code] >= CALLS:
            return None
        self._calls[code] += 1
        lines = self.lines[code.co_filename]

        def record(frame: FrameType, event: str, argument: object) -> Any:
            lines.add(frame.f_lineno)
            return record

        return record(frame, event, argument)


def _file() -> Path:
    return Path(os.environ["PENSTOCK_LINE_MAP"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _file().exists():
        known = {json.loads(line)["test"] for line in _file().read_text().splitlines()}
        items[:] = [item for item in items if item.nodeid not in known]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    tracer, start = _Tracer(), time.perf_counter()
    threading.settrace(tracer)
    sys.settrace(tracer)
    yield
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    # A test that fails on the unchanged code, or only under the tracer, can kill no mutant.
    if item.nodeid in _failed:
        return
    lines = {
        str(Path(path).relative_to(ROOT)): sorted(numbers) for path, numbers in tracer.lines.items()
    }
    seconds = round(time.perf_counter() - start, 3)
    with _file().open("a") as output:
        output.write(json.dumps({"test": item.nodeid, "seconds": seconds, "lines": lines}) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed or report.skipped:
        _failed.add(report.nodeid)
