"""The runner of the GPU tests: it finds every test, and reports whatever did not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import run as runner

GOOD = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("n", range(6))
def test_many(n):
    assert n < 6
"""


@pytest.fixture(autouse=True)
def _no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start pytest without plugins: importing Hypothesis takes seconds in each process."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(
    folder: Path, files: dict[str, str], *, limit: float = 60, start_within: float = 600
) -> tuple[int, dict[str, str]]:
    """Run the tests of some files; return the exit code and the outcome of each test."""
    for name, text in files.items():
        (folder / "suite" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "suite" / name).write_text(text)
    code = runner.run(
        [str(folder / "suite")],
        jobs=2,
        limit=limit,
        logs=folder / "logs",
        start_within=start_within,
    )
    results = json.loads((folder / "logs/results.json").read_text())["results"]
    return code, {r["test"].partition("::")[2]: r["outcome"] for r in results}


def test_tests_are_found_by_their_marker_in_any_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "import pytest\n\ndef test_unmarked(): assert False\n"
    marked = other + "\n@pytest.mark.gpu\ndef test_marked(tmp_path): assert tmp_path.exists()\n"
    code, outcomes = run(tmp_path, {"test_a.py": GOOD, "new/deep/test_b.py": marked})

    assert code == 0
    assert outcomes == {"test_marked": "passed"} | {f"test_many[{n}]": "passed" for n in range(6)}
    assert "7 tests collected" in capsys.readouterr().out


def test_tests_that_may_not_start_any_more_fail_the_suite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, outcomes = run(tmp_path, {"test_a.py": GOOD}, start_within=0)

    assert code == 1
    assert outcomes == {}
    assert capsys.readouterr().out.count("ran 0 times") == 6


def test_a_failure_fails_the_suite_and_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "import pytest\n\n@pytest.mark.gpu\ndef test_bad(): assert 1 == 2, 'not the same'\n"
    code, outcomes = run(tmp_path, {"test_a.py": GOOD, "test_b.py": bad})

    assert code == 1
    assert outcomes["test_bad"] == "failed"
    assert sum(outcome == "passed" for outcome in outcomes.values()) == 6
    assert "not the same" in capsys.readouterr().out


def test_a_process_that_has_lost_its_context_is_replaced(tmp_path: Path) -> None:
    lost = """
import pytest

pytestmark = pytest.mark.gpu
LOST = []

@pytest.mark.parametrize("n", range(8))
def test_many(n):
    assert not LOST
    if n in (1, 4):
        LOST.append(n)
        raise RuntimeError("CUDA error: misaligned address")
"""
    code, outcomes = run(tmp_path, {"test_a.py": lost})

    assert code == 1
    failed = {test for test, outcome in outcomes.items() if outcome != "passed"}
    assert failed == {"test_many[1]", "test_many[4]"}


def test_a_skip_is_an_error_unless_its_reason_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    skips = "import pytest\n\n@pytest.mark.gpu\ndef test_skips(): pytest.skip('the moon is full')\n"
    code, outcomes = run(tmp_path, {"test_a.py": skips})
    assert (code, outcomes) == (1, {"test_skips": "skipped"})
    assert "the moon is full (not in ALLOWED_SKIPS)" in capsys.readouterr().out

    monkeypatch.setattr(runner, "ALLOWED_SKIPS", ("the moon is",))
    assert run(tmp_path, {})[0] == 0


def test_a_crash_fails_one_test_and_the_others_run(tmp_path: Path) -> None:
    crash = "import os, pytest\n\n@pytest.mark.gpu\ndef test_crash(): os._exit(3)\n"
    code, outcomes = run(tmp_path, {"test_a.py": GOOD, "test_b.py": crash})

    assert code == 1
    assert outcomes.pop("test_crash") == "crashed"
    assert set(outcomes.values()) == {"passed"}
    assert len(outcomes) == 6


def test_a_test_that_hangs_is_stopped_and_the_others_run(tmp_path: Path) -> None:
    hang = "import pytest, time\n\n@pytest.mark.gpu\ndef test_hang(): time.sleep(1000)\n"
    code, outcomes = run(tmp_path, {"test_a.py": hang, "test_b.py": GOOD}, limit=2)

    assert code == 1
    assert outcomes.pop("test_hang") == "timed out"
    assert list(outcomes.values()) == ["passed"] * 6


def test_a_file_that_cannot_be_read_fails_the_suite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, outcomes = run(tmp_path, {"test_a.py": GOOD, "test_b.py": "import no_such_package\n"})

    assert code == 1
    assert len(outcomes) == 6
    assert "no_such_package" in capsys.readouterr().out


def test_a_test_that_no_process_ran_fails_the_suite(tmp_path: Path) -> None:
    suite = runner.Suite(["tests/a.py::test_a"], 1, 10, [], tmp_path)

    (problem,) = runner.find_problems(suite)

    assert problem.startswith("ran 0 times: tests/a.py::test_a")
