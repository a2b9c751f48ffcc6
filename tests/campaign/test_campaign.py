"""A sample of each kind of cases, and how the campaign judges and records them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.campaign.forks import Ended
from tests.campaign.results import CaseResult, ResultsFile, count, table
from tests.campaign.tiny_runs import saved_step
from tests.fuzz.draw import judge
from tests.fuzz.edits import Edit
from tests.fuzz.inputs import Case
from tests.support import fork_server

SEED = 20261116

SAMPLES = {"kills": 4, "power-cuts": 3, "flips": 5, "checkpoints": 10, "concurrent": 1, "fuzz": 20}
"""Number of cases of each kind. test_file_faults.py has a sample of `faults`."""


def test_runs_killed_at_a_call_and_at_a_moment_end_well(tmp_path: Path) -> None:
    """Other tests have the other kinds: damaged checkpoints, stores and caches (test_damage.py and
    test_store_corruption.py), shared stores (test_shared_scratch.py), and fuzzed inputs
    (test_commands.py)."""
    run_cases("kills", 2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", SAMPLES)
def test_a_sample_of_each_kind_ends_well(kind: str, tmp_path: Path) -> None:
    run_cases(kind, SAMPLES[kind], tmp_path)


def run_cases(kind: str, cases: int, folder: Path) -> None:
    results = folder / "results.jsonl"
    options = ["--cases", str(cases), "--seed", str(SEED), "--results", str(results)]
    ran = fork_server.run(["-m", "tests.campaign", "--kind", kind, *options])
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    if "NOT RUN" in ran.stdout:
        pytest.skip(ran.stdout.strip().splitlines()[-1])
    outcomes = [one.outcome for one in ResultsFile(results).read()]
    assert outcomes == ["ok"] * cases


def ended(code: int, errors: str = "", output: str = "") -> Ended:
    return Ended(code, output, errors, 0.1)


CASE = Case(("plan", "{model}"), (Edit("model/config.json", "set", ("hidden_size",), -1),))


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        (ended(0), "ok"),
        (ended(1, "error: /a/config.json: hidden_size must be positive\n"), "ok"),
        (ended(1, output='{"feasible": false}'), "ok"),
        (ended(2, "Usage: penstock plan\n"), "ok"),
        (ended(1), "silent"),
        (ended(1, "error: list index out of range\n"), "silent"),
        (ended(1, "error: config.json is wrong\nand so is this\n"), "silent"),
        (ended(70, "Traceback ...\nKeyError\n"), "traceback"),
        (ended(-signal.SIGSEGV), "traceback"),
        (ended(-signal.SIGXCPU), "hang"),
    ],
)
def test_a_fuzzed_input_is_judged_by_its_exit_code_and_message(how: Ended, outcome: str) -> None:
    assert judge(CASE, how).outcome == outcome


def test_a_results_file_continues_and_keeps_the_last_result_of_a_case(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "results.jsonl")
    assert file.read() == []
    for number, outcome in ((0, "ok"), (1, "lost"), (2, "hang"), (1, "ok")):
        file.add(CaseResult("kills", 7, number, outcome, "", 0.5))  # type: ignore[arg-type]
    with file.path.open("a") as stream:
        stream.write('{"kind": "kills", "se')  # killed while it was written

    assert file.numbers("kills", 7) == {0, 1, 2}
    assert file.numbers("kills", 7, again=True) == {0, 1}
    assert file.numbers("kills", 8) == set()
    counted = count(file.read())
    assert counted["kills"]["cases"] == 3
    assert (counted["kills"]["ok"], counted["kills"]["hang"]) == (2, 1)
    assert "kills" in table(counted)
    failed = [json.loads(line) for line in file.path.read_text().splitlines()[:4]]
    assert failed[2]["command"] == "python -m tests.campaign --kind kills --seed 7 --only 2"


def test_the_newest_saved_step_is_read_from_output_that_was_cut_off() -> None:
    lines = ['{"event": "save", "step": 2}', '{"event": "step", "step": 3}', '{"event": "sa']
    assert saved_step("\n".join(lines)) == 2
