"""Every benchmark script can be imported."""

from __future__ import annotations

from pathlib import Path

from tests.support import fork_server

BENCH = Path(__file__).parents[2] / "bench"

CHECK = """
import runpy, sys, warnings
warnings.simplefilter("ignore")
for path in sys.argv[1:]:
    before = list(sys.path)
    runpy.run_path(path, run_name="checked")
    sys.path[:] = before
"""


def test_every_script_imports() -> None:
    scripts = sorted(str(path) for path in BENCH.rglob("*.py"))
    assert len(scripts) > 20
    result = fork_server.run(["-c", CHECK, *scripts])
    assert result.returncode == 0, result.stderr[-2000:]
