"""Every benchmark can be started: nothing it imports has moved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"

CHECK = """
import runpy, sys
for path in sys.argv[1:]:
    before = list(sys.path)
    runpy.run_path(path, run_name="checked")
    sys.path[:] = before
"""


def test_all_of_them_import() -> None:
    scripts = sorted(str(path) for path in BENCH.rglob("*.py"))
    assert len(scripts) > 20
    line = [sys.executable, "-W", "ignore", "-c", CHECK, *scripts]
    ended = subprocess.run(line, capture_output=True, text=True, check=False, cwd=BENCH.parent)
    assert ended.returncode == 0, ended.stderr[-2000:]
