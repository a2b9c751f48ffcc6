"""The reliability campaign: `make campaign`, or `python -m tests.campaign --help`.

Each case is determined by its kind, the seed and its number, and its result is one line of
build/campaign/results-SEED.jsonl. A later call with the same seed continues.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Protocol

# Sums then run in one order, and a fork finds no threads that it lacks.
os.environ["OMP_NUM_THREADS"] = "1"
# A name that is no directory must not be looked up on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

from penstock.units import GiB
from tests.campaign.results import CaseResult, NotAvailableError, ResultsFile, Verdict, count, table

ROOT = Path(__file__).parents[2]

KINDS = {
    "kills": "tests.campaign.kills:Kills",
    "power-cuts": "tests.campaign.power_cuts:PowerCuts",
    "flips": "tests.campaign.flips:Flips",
    "faults": "tests.campaign.file_faults:FailingCalls",
    "checkpoints": "tests.campaign.checkpoint_damage:CheckpointDamage",
    "concurrent": "tests.campaign.concurrent_runs:ConcurrentRuns",
    "fuzz": "tests.campaign.fuzz:Fuzz",
}
"""The class of each kind. They are imported when they run."""


class Kind(Protocol):
    """A kind of cases."""

    def run(self, seed: int, number: int) -> Verdict: ...


def main() -> int:
    args = _parse()
    results = ResultsFile(args.results or ROOT / f"build/campaign/results-{args.seed}.jsonl")
    if args.summary or args.save:
        return _summarize(results, save=args.save)
    failed = 0
    for name in args.kind or KINDS:
        # In a process of its own: some kinds train in it, and others fork it.
        child = os.fork()
        if child == 0:
            sys.exit(_run_kind(name, args, results))
        failed += os.waitpid(child, 0)[1] != 0
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    today = int(f"{datetime.date.today():%Y%m%d}")
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="default: all")
    parser.add_argument("--cases", type=int, help="number of cases of each kind")
    parser.add_argument("--minutes", type=float, help="stop each kind after this time")
    parser.add_argument("--seed", type=int, default=today, help="default: the date")
    parser.add_argument("--again", action="store_true", help="also repeat cases that failed")
    parser.add_argument("--only", type=int, help="run the case with this number, again")
    parser.add_argument("--results", type=Path, help="results file")
    parser.add_argument("--summary", action="store_true", help="print the table of all results")
    parser.add_argument("--save", action="store_true", help="also write it to bench/results")
    return parser.parse_args()


def _run_kind(name: str, args: argparse.Namespace, results: ResultsFile) -> int:
    """Run the cases of a kind that have not run yet; return whether some failed."""
    module_name, _, class_name = KINDS[name].partition(":")
    module = importlib.import_module(module_name)
    cases = args.cases or module.CASES
    done = results.numbers(name, args.seed, again=args.again)
    numbers = [n for n in range(cases) if n not in done]
    if args.only is not None:
        numbers = [args.only]
    print(f"{name}: {len(numbers)} cases, seed {args.seed}", flush=True)
    if not numbers:
        return 0
    failed = 0
    with tempfile.TemporaryDirectory(prefix="penstock-campaign-", dir=_quick_disk()) as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/user-cache"
        try:
            kind: Kind = getattr(module, class_name)(Path(folder))
        except NotAvailableError as reason:
            print(f"{name}: NOT RUN on this machine: {reason}", flush=True)
            return 0
        deadline = time.monotonic() + 60 * (args.minutes or 1e9)
        with contextlib.ExitStack() as stack:
            stack.callback(getattr(kind, "close", lambda: None))
            for number in numbers:
                if time.monotonic() > deadline or number >= getattr(kind, "cases", cases):
                    break
                failed += not _run_case(kind, name, args, number, results)
    print(f"{name}: {failed} failed", flush=True)
    return int(failed > 0)


def _run_case(
    kind: Kind, name: str, args: argparse.Namespace, number: int, results: ResultsFile
) -> bool:
    start = time.monotonic()
    verdict = kind.run(args.seed, number)
    seconds = round(time.monotonic() - start, 3)
    result = CaseResult(name, args.seed, number, verdict.outcome, verdict.detail, seconds)
    if args.only is None:
        results.add(result)
    if verdict.outcome != "ok" or args.only is not None:
        print(f"--- {result.outcome}: {result.command}\n{verdict.detail}", flush=True)
    return verdict.outcome == "ok"


def _quick_disk() -> str | None:
    """Return a directory in memory if there is one: files are copied for every case."""
    shared = "/dev/shm"
    if not os.access(shared, os.W_OK) or shutil.disk_usage(shared).free < 2 * GiB:
        return None  # a container may have only 64 MiB
    return shared


def _summarize(results: ResultsFile, *, save: bool) -> int:
    """Print the table of all results, and the command of each case that failed."""
    found = results.read()
    counted = count(found)
    print(table(counted))
    failed = [one for one in found if one.outcome != "ok"]
    for one in failed:
        print(f"{one.outcome}: {one.command}")
    if save:
        sys.path.insert(0, str(ROOT / "bench"))
        certificate = importlib.import_module("certificate")
        print(certificate.save("campaign", counted))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
