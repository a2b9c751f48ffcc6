"""Random models train on the GPU with exactly the least HBM that the planner accepts.

The models differ from run to run: the seed is the time. A failure prints the command that repeats
it. `bench/fit_campaign.py` runs hundreds of them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import fit_campaign

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
CASES = 9

SAMPLE = 6
"""Number of random models of `make test-gpu`. The others run with `--long`."""


def run(out: Path, number: int, *words: str) -> dict[str, Any]:
    """Run one case in a process of its own and return its record."""
    seed = int(time.time())
    command = [sys.executable, "-W", "ignore", "bench/fit_campaign.py", "--seed", str(seed),
               "--only", str(number), "--workers", "1", "--out", str(out), *words]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    records = fit_campaign.read_records(out)
    assert records, result.stdout[-3000:] + result.stderr[-3000:]
    (record,) = records
    if record["outcome"] == "unsupported":
        return run(out, number + CASES, *words)
    return record


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=() if number < SAMPLE else pytest.mark.long)
     for number in range(CASES)],
)  # fmt: skip
def test_a_random_model_trains_at_the_least_hbm(number: int, tmp_path: Path) -> None:
    compiled = "1" if number % 3 else "0"
    record = run(tmp_path / "fit.jsonl", number, "--compiled", compiled)

    problem = f"{record.get('error')}\nrepeat with: {fit_campaign.repeat_command(record)}"
    assert record["outcome"] in fit_campaign.TRAINED, problem
    assert len(record["losses"]) == 3
    assert record["reserved_peak"] + record["context_planned"] <= record["hbm_budget"], problem


@pytest.mark.parametrize("number", range(1))
def test_a_fifth_less_than_the_least_hbm_is_not_enough(number: int, tmp_path: Path) -> None:
    """Of 206 random models at the least HBM, the least frugal used 83 % of it, a quarter 89 %."""
    record = run(tmp_path / "fit.jsonl", number, "--below", "0.8", "--compiled", "0")

    failed = (*fit_campaign.OUT_OF_MEMORY, "refused")
    problem = f"{record.get('error')}\nrepeat with: {fit_campaign.repeat_command(record)}"
    assert record["outcome"] in failed, problem
