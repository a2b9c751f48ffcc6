"""Every benchmark script can be imported."""

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


def test_every_script_imports() -> None:
    scripts = sorted(str(path) for path in BENCH.rglob("*.py"))
    assert len(scripts) > 20
    command = [sys.executable, "-W", "ignore", "-c", CHECK, *scripts]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=BENCH.parent)
    assert result.returncode == 0, result.stderr[-2000:]
