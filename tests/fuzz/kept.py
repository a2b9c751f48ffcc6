"""Run the kept inputs: every fuzzed input that once failed. Print one JSON line for each.

corpus.jsonl has one input per line: its name, the exit codes that are right, words that the message
must contain, and the case. Add the case that `python -m tests.campaign` prints after its fix.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# As in a campaign: a fork has no threads, and a name that is no directory is not looked up.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

from tests.campaign.fuzz import Fuzz
from tests.fuzz.draw import judge, run_case
from tests.fuzz.inputs import Case

CORPUS = Path(__file__).with_name("corpus.jsonl")


def read_corpus() -> dict[str, Mapping[str, Any]]:
    """Return the kept inputs by name."""
    kept = [json.loads(line) for line in CORPUS.read_text().splitlines()]
    return {one["name"]: one for one in kept}


def problem(fuzz: Fuzz, one: Mapping[str, Any]) -> str:
    """Run a kept input and return what is wrong with how it ended; "" if nothing is."""
    here = fuzz.folder / "case"
    here.mkdir()
    try:
        case = Case.from_json(one)
        ended = run_case(fuzz.inputs, case, here)
    finally:
        shutil.rmtree(here, ignore_errors=True)
    verdict = judge(case, ended)
    if verdict.outcome != "ok":
        return f"{verdict.outcome}: {verdict.detail}"
    if ended.code not in one["code"]:
        return f"exit code {ended.code}, not one of {one['code']}: {ended.errors[-600:]}"
    missing = [words for words in one["says"] if words not in ended.errors]
    return f"the message lacks {missing}: {ended.errors[-600:]}" if missing else ""


def main() -> None:
    names = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/user-cache"
        fuzz = Fuzz(Path(folder))
        for name, one in read_corpus().items():
            if not names or name in names:
                print(json.dumps({"name": name, "problem": problem(fuzz, one)}), flush=True)


if __name__ == "__main__":
    main()
