"""Fuzzed inputs: every file that a command reads, and every flag."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from tests.campaign.forks import import_what
from tests.campaign.results import Verdict
from tests.fuzz.draw import draw_case, judge, run_case
from tests.fuzz.inputs import Inputs

CASES = 10_000


class Fuzz:
    """Runs commands on fuzzed inputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inputs = Inputs(folder / "inputs")
        import_what(self.inputs.make, folder)

    def run(self, seed: int, number: int) -> Verdict:
        case = draw_case(self.inputs, number, random.Random(f"{seed} {number}"))
        here = self.folder / "case"
        here.mkdir()
        try:
            verdict = judge(case, run_case(self.inputs, case, here))
        finally:
            shutil.rmtree(here, ignore_errors=True)
        if verdict.outcome == "ok":
            return verdict
        return Verdict(verdict.outcome, f"{verdict.detail}\n{json.dumps(case.to_json())[:3000]}")
