"""Train random models at exactly the least HBM that the planner accepts, many at a time.

    python bench/fit_campaign.py --cases 200 --seconds 560 --out fit.jsonl
    python bench/fit_campaign.py --append --seconds 560 --out fit.jsonl   # continue
    python bench/fit_campaign.py --below 0.9 --cases 10 --out below.jsonl
    python bench/fit_campaign.py --seed 1794832000 --only 17              # repeat one case
    python bench/fit_campaign.py --summarize fit.jsonl below.jsonl --save

Every case is a random model and workload (`fit_cases.py`). The planner says how much HBM is the
least, the case is prepared with exactly that much and plenty of DRAM, and trains for a few steps.
Each case runs in a process of its own and appends one JSON line. The seed is the time of the run
unless `--seed` names one.

With `--below 0.9`, the plan is made at the least HBM, but torch gets a tenth of the least HBM less
than planned: training must fail, or the planner's least was too much.
"""

# ruff: noqa: E402

from __future__ import annotations

import os

# Before torch and numpy are imported: cases are forked from this process, which must have no
# threads, and many of them share the cores.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import argparse
import contextlib
import fnmatch
import importlib
import itertools
import json
import math
import multiprocessing
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench import certificate
from bench.fit_cases import TINY, Case, Limits, draw_batches, draw_case, make_config
from penstock.engine.model_source import inspect_model
from penstock.engine.plan_choice import PlanRequest, plan_request
from penstock.engine.prepare import prepare
from penstock.errors import (
    DeviceMemoryError,
    InfeasibleError,
    SurveyError,
    UnsupportedModelError,
    WorkloadError,
)
from penstock.plan.budget import Budget, tier_capacity
from penstock.plan.buffers import CONTEXT
from penstock.plan.plan import Plan
from penstock.probe.machine_choice import this_machine
from penstock.settings import Settings
from penstock.tiers import Tier
from penstock.units import GiB, KiB, format_bytes

Record = dict[str, Any]

TRAINED = ("planned", "replanned", "refused first")
"""Outcomes of cases that trained: the first plan was right; the rehearsal changed it within the
budget; the rehearsal refused the budget, and the case trained with the budget that it asked for."""

OUT_OF_MEMORY = ("out of memory", "torch out of memory")
"""Outcomes of cases that died of GPU memory, with an error of Penstock or of torch."""


class Room:
    """Shares GPU and host memory between the processes of the campaign.

    A case claims what its plan needs before it allocates, and waits while the others hold too much.
    The campaign gives a claim back when the process ends, however it ends.
    """

    def __init__(self, workers: int, hbm: int, dram: int) -> None:
        context = multiprocessing.get_context("fork")
        self._lock = context.Lock()
        self._hbm = context.Array("q", workers, lock=False)
        self._dram = context.Array("q", workers, lock=False)
        self.hbm, self.dram = hbm, dram

    def claim(self, slot: int, hbm: int, dram: int) -> None:
        while True:
            with self._lock:
                self._hbm[slot], self._dram[slot] = 0, 0
                others = (sum(self._hbm), sum(self._dram))
                fits = others[0] + hbm <= self.hbm and others[1] + dram <= self.dram
                if fits or others == (0, 0):
                    self._hbm[slot], self._dram[slot] = hbm, dram
                    return
            time.sleep(0.2)

    def release(self, slot: int) -> None:
        self._hbm[slot] = self._dram[slot] = 0


# One case, in a process of its own.


def new_record(case: Case, args: argparse.Namespace) -> Record:
    """Return what is known before a case runs: enough to repeat it."""
    return {"case": case.record(), "compiled_share": args.compiled, "tiny": args.tiny,
            "below": args.below, "device": args.device or "cuda"}  # fmt: skip


def run_case(case: Case, args: argparse.Namespace, claim: Callable[[int, int], None]) -> Record:
    """Plan a case at the least HBM and train it. Never raises: the record has the error."""
    record = new_record(case, args)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, _separate_caches(folder):
        make_config(case).save_pretrained(folder)
        try:
            _plan_and_train(case, folder, args, claim, record)
        except Exception as failed:
            record |= {"outcome": _outcome_of(failed, record), "error": str(failed)[:2000],
                       "error_type": type(failed).__name__,
                       "traceback": traceback.format_exc()[-3000:]}  # fmt: skip
    record["seconds"] = round(time.perf_counter() - began, 2)
    return record


def _outcome_of(failed: Exception, record: Record) -> str:
    if isinstance(failed, torch.OutOfMemoryError):
        return "torch out of memory"
    if isinstance(failed, DeviceMemoryError):
        return "out of memory"
    if isinstance(failed, InfeasibleError):
        return "refused"
    if isinstance(failed, UnsupportedModelError | SurveyError | WorkloadError):
        return "unsupported" if "least_hbm" not in record else "failed"
    return "failed"


@contextlib.contextmanager
def _separate_caches(folder: str) -> Iterator[None]:
    """Keep measurements of this case out of the user's caches, and those out of this case."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
    try:
        yield
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def _plan_and_train(
    case: Case, folder: str, args: argparse.Namespace, claim: Callable[[int, int], None],
    record: Record,
) -> None:  # fmt: skip
    asked: dict[str, Any] = {
        "context": case.context, "batch": case.batch, "micro_batch": case.micro_batch,
        "moments": case.moments, "clip": case.clip, "freeze": _matching(case.freeze, folder),
        "init": "random", "seed": case.number,
    }  # fmt: skip
    if case.micro_batch is None:
        asked.pop("micro_batch")
    compiled = None if case.compiled else False
    settings = Settings().replace(asked)
    config, inventory = inspect_model(folder, settings)
    target = this_machine(args.device)
    dram = tier_capacity(target.machine, Budget(hbm=0, dram=0), Tier.DRAM)
    assert dram is not None

    def request(hbm: int) -> PlanRequest:
        budget = Budget(hbm=hbm, dram=dram)
        return plan_request(
            inventory, settings, target, config=config, budget=budget, compiled=compiled
        )

    def plan(hbm: int) -> Plan:
        return request(hbm).make_plan().plan

    began = time.perf_counter()
    least = find_least(plan)
    first = plan(least)
    asked_for = request(least)
    memory = asked_for.source(inventory, asked_for.workload)
    record |= {"plan_seconds": round(time.perf_counter() - began, 2), "least_hbm": least,
               "parameters": inventory.parameters(), "memory_origin": memory.origin,
               "memory_remark": memory.remark, **_plan_record(first)}  # fmt: skip
    claim(first.peak(Tier.HBM) * 9 // 8, first.peak(Tier.DRAM) * 9 // 8 + 3 * GiB)
    if args.below:
        _lower_limit(int((1 - args.below) * least))
    how: dict[str, Any] = {
        **asked, "compiled": compiled, "device": args.device, "optimizer": {"lr": 1e-4},
    }  # fmt: skip
    record["outcome"] = "planned"
    try:
        _train(case, folder, how, Budget(hbm=least, dram=dram), first, args.steps, record)
    except InfeasibleError as refused:
        wanted = refused.least.get("hbm")
        if args.below or wanted is None:
            raise
        record |= {"outcome": "refused first", "refused": str(refused), "asked_hbm": wanted}
        claim(wanted * 9 // 8, first.peak(Tier.DRAM) * 9 // 8 + 3 * GiB)
        _train(
            case, folder, how, Budget(hbm=wanted, dram=dram), plan(wanted), args.steps, record
        )  # fmt: skip


def _matching(patterns: Sequence[str], folder: str) -> list[str]:
    """Return the patterns that match a tensor of the model; others would be refused."""
    names = [t.name for b in inspect_model(folder, Settings())[1].blocks for t in b.tensors]
    return [pattern for pattern in patterns if fnmatch.filter(names, pattern)]


def find_least(plan: Callable[[int], Plan]) -> int:
    """Return the least HBM that the planner names when it is offered too little."""
    try:
        plan(64 * KiB)
    except InfeasibleError as error:
        least = error.least["hbm"]
        assert least is not None
        return least
    raise AssertionError("a plan fits in 64 KiB of HBM")


def _plan_record(plan: Plan) -> Record:
    return {
        "planned_hbm": plan.peak(Tier.HBM),
        "hbm_parts": dict(plan.parts(Tier.HBM)),
        "planned_dram": plan.peak(Tier.DRAM),
        "numerics": {name: getattr(plan.workload.numerics, name)
                     for name in plan.workload.numerics.__slots__},
    }  # fmt: skip


def _lower_limit(nbytes: int) -> None:
    """Let torch have `nbytes` less than any plan says, from here on in this process."""
    from penstock.engine.device import CudaDevice

    original = CudaDevice.limit_memory

    def lowered(self: CudaDevice, allowed: int | None) -> None:
        original(self, None if allowed is None else max(1, allowed - nbytes))

    CudaDevice.limit_memory = lowered  # type: ignore[method-assign]


def _train(
    case: Case, folder: str, how: Mapping[str, Any], budget: Budget, first: Plan, steps: int,
    record: Record,
) -> None:  # fmt: skip
    began = time.perf_counter()
    engine = prepare(folder, budget=budget, **how)
    record |= {"prepare_seconds": round(time.perf_counter() - began, 2), "hbm_budget": budget.hbm}
    record |= _plan_record(engine.plan)
    changed = engine.plan.placement != first.placement or engine.plan.pools != first.pools
    if changed and record["outcome"] == "planned":
        record |= {"outcome": "replanned", "plan_change": engine.plan_change,
                   "first_plan": _plan_record(first)}  # fmt: skip
    on_gpu = engine.device.torch_device.type == "cuda"
    if on_gpu:
        record["prepare_reserved"] = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
    losses: list[float] = []
    seconds: list[float] = []
    record |= {"losses": losses, "step_seconds": seconds}
    try:
        for batch in draw_batches(case, steps):
            start = time.perf_counter()
            losses.append(float(engine.step(batch)))
            seconds.append(round(time.perf_counter() - start, 3))
        engine.finish()
    finally:
        record |= _measure(engine, on_gpu)
    if not all(math.isfinite(loss) for loss in losses):
        record["outcome"] = "not finite"
    engine.close()


def _measure(engine: Any, on_gpu: bool) -> Record:
    """Return the high-water mark of live bytes, of reserved bytes, and the CUDA context."""
    context = sum(p.nbytes for p in engine.plan.pools if p.what == CONTEXT)
    if not on_gpu:
        return {"live_peak": engine.device.memory().allocated, "context_planned": context}
    return {
        "live_peak": torch.cuda.max_memory_allocated(),
        # An engine that was refused before has left the workspaces of libraries.
        "reserved_peak": torch.cuda.max_memory_reserved() - engine.device.reserved_before,
        "context_planned": context,
        "context_measured": engine.device.nbytes_outside_torch(),
    }


# The campaign.


@dataclass(slots=True)
class Child:
    """A process that runs one case."""

    pid: int
    case: Case
    slot: int
    result: Path
    log: Path
    deadline: float


def run_campaign(args: argparse.Namespace) -> list[Record]:
    """Run cases until all are done or the time is over; return the records of this call."""
    logs = Path(f"{args.out}.logs")
    logs.mkdir(parents=True, exist_ok=True)
    done = read_records(args.out) if args.append else []
    finished = {r["case"]["number"] for r in done if _is_case(r) and r["case"]["seed"] == args.seed}
    refused = {r["case"]["number"] for r in done if r["outcome"] == "unsupported"}
    numbers = iter(args.only or (n for n in itertools.count() if n not in finished | refused))
    wanted = len(args.only) if args.only else args.cases - len(finished)
    room = Room(args.workers, int(args.hbm * GiB), int(args.dram * GiB))
    end = time.monotonic() + args.seconds
    children: list[Child] = []
    made: list[Record] = []
    with args.out.open("a" if args.append else "w") as lines:
        while True:
            # A draw that Penstock does not support is not a case: another one takes its place.
            missing = wanted - sum(map(_is_case, made)) - len(children)
            # A case takes half a minute. One that could not finish is not started.
            late = time.monotonic() > end - args.reserve
            while missing > 0 and not late and len(children) < args.workers:
                number = next(numbers, None)
                if number is None:
                    wanted = 0
                    break
                slot = min(set(range(args.workers)) - {child.slot for child in children})
                case = draw_case(args.seed, number, compiled=args.compiled, limits=args.limits)
                children.append(_start(case, args, room, slot, logs))
                missing -= 1
            if not children:
                return made
            for child in list(children):
                record = _poll(child, args, end)
                if record is not None:
                    children.remove(child)
                    room.release(child.slot)
                    made.append(record)
                    print(json.dumps(record), file=lines, flush=True)
                    print(describe(record, len(made), wanted), flush=True)
            time.sleep(0.05)


def _is_case(record: Record) -> bool:
    """Return whether a record is the result of a case, and not of a draw without a result."""
    return record["outcome"] not in ("unsupported", "not finished")


def preload() -> None:
    """Import what every case needs, once, before cases are forked. Nothing here may use CUDA."""
    for name in ("penstock.engine.engine", "penstock.model.split", "transformers.modeling_utils",
                 "transformers.models.auto.modeling_auto", "torch._inductor.compile_fx",
                 "torch._inductor.codegen.triton"):  # fmt: skip
        importlib.import_module(name)


def _start(case: Case, args: argparse.Namespace, room: Room, slot: int, logs: Path) -> Child:
    result, log = (logs / f"{case.seed}-{case.number}.{kind}" for kind in ("json", "log"))
    result.unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        deadline = time.monotonic() + args.case_seconds
        return Child(pid, case, slot, result, log, deadline)
    try:
        os.setsid()
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        record = run_case(case, args, lambda hbm, dram: room.claim(slot, hbm, dram))
        partial = result.with_suffix(".part")
        partial.write_text(json.dumps(record))
        partial.rename(result)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _poll(child: Child, args: argparse.Namespace, end: float) -> Record | None:
    """Return the record of a case that has ended, or that took too long; None if it runs."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    late = time.monotonic() > min(child.deadline, end)
    if not pid and not late:
        return None
    if not pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    if child.result.exists():
        record: Record = json.loads(child.result.read_text())
        return record
    tail = child.log.read_text(errors="replace")[-2000:] if child.log.exists() else ""
    if late and not pid:
        # Out of time is not a failure of the case unless the case had its full time.
        outcome = "timed out" if time.monotonic() > child.deadline else "not finished"
        return new_record(child.case, args) | {"outcome": outcome, "error": tail}
    problem = f"ended with status {status}: {tail}"
    return new_record(child.case, args) | {"outcome": "crashed", "error": problem}


def describe(record: Record, number: int, total: int) -> str:
    """Return one line about a finished case."""
    case = record["case"]
    line = (f"{number}/{total} case {case['number']}: {record['outcome']}, {case['family']}, "
            f"{case['parameters'] / 1e6:.0f}M, {case['batch']} x {case['context']}")  # fmt: skip
    if "least_hbm" in record:
        line += f", least {format_bytes(record['least_hbm'])}"
    if (share := used_share(record)) is not None:
        line += f", used {share:.0%}"
    line += f", {record.get('seconds', 0):.0f} s"
    if "error" in record:
        line += f"\n    {' '.join(str(record['error']).split())[-400:]}"
    return line


def used_share(record: Record) -> float | None:
    """Return (live high-water mark + context) / planned HBM of a case that trained."""
    if record["outcome"] not in TRAINED or "live_peak" not in record:
        return None
    context = record.get("context_measured")
    if context is None:
        context = record["context_planned"]
    return float((record["live_peak"] + context) / record["planned_hbm"])


def read_records(path: Path) -> list[Record]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def summarize(records: Sequence[Record]) -> Record:
    """Return counts of outcomes, how much of the plans was used, and every failure."""
    at_least = [r for r in records if not r["below"] and _is_case(r)]
    below = [r for r in records if r["below"] and _is_case(r)]
    shares = [share for r in at_least if (share := used_share(r)) is not None]
    reserved = [r["reserved_peak"] + r["context_planned"] - r["hbm_budget"]
                for r in at_least if "reserved_peak" in r]  # fmt: skip
    failures = [r for r in at_least if r["outcome"] not in TRAINED]
    return {
        "cases": len(at_least),
        "outcomes": dict(Counter(r["outcome"] for r in at_least)),
        "out_of_memory": sum(r["outcome"] in OUT_OF_MEMORY for r in at_least),
        "not_finite": sum(r["outcome"] == "not finite" for r in at_least),
        "trained": sum(r["outcome"] in TRAINED for r in at_least),
        "families": dict(Counter(r["case"]["family"] for r in at_least)),
        "memory_origins": dict(Counter(r.get("memory_origin", "unknown") for r in at_least)),
        "compiled": sum(r["case"]["compiled"] for r in at_least),
        "packed": sum(r["case"]["packed"] for r in at_least),
        "used_share": _percentiles(shares),
        "most_reserved_over_budget": max(reserved, default=None),
        "below": {
            "cases": len(below),
            "failed_as_expected": sum(
                r["outcome"] in (*OUT_OF_MEMORY, "refused") for r in below
            ),
            "outcomes": dict(Counter(r["outcome"] for r in below)),
        },
        "unsupported": sum(r["outcome"] == "unsupported" for r in records),
        "not_finished": sum(r["outcome"] == "not finished" for r in records),
        "seeds": sorted({r["case"]["seed"] for r in records}),
        "failures": [
            {"outcome": r["outcome"], "error": str(r.get("error", ""))[:500],
             "repeat": repeat_command(r)}
            for r in [*failures, *(r for r in below if r["outcome"] in TRAINED)]
        ],
    }  # fmt: skip


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)

    return {"least": at(0), "p10": at(0.1), "p25": at(0.25),
            "median": round(statistics.median(ordered), 4), "p75": at(0.75), "p90": at(0.9),
            "most": at(1), "count": len(ordered)}  # fmt: skip


def repeat_command(record: Record) -> str:
    case = record["case"]
    words = [f"python bench/fit_campaign.py --seed {case['seed']} --only {case['number']}"]
    words.append(f"--compiled {record['compiled_share']}")
    words += [f"--below {record['below']}"] if record["below"] else []
    words += ["--tiny"] if record["tiny"] else []
    words += [f"--device {record['device']}"] if record["device"] != "cuda" else []
    return " ".join(words)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the cases to run")
    parser.add_argument("--seed", type=int, help="default: the time in seconds")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--compiled", type=float, default=0.7, help="share of compiled cases")
    parser.add_argument("--below", type=float, default=0.0, help="share of the least HBM, e.g. 0.9")
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--seconds", type=float, default=560, help="time for this call")
    parser.add_argument("--case-seconds", type=float, default=300)
    parser.add_argument("--reserve", type=float, default=45, help="start no case this late")
    parser.add_argument("--hbm", type=float, default=120, help="GiB of GPU memory to share")
    parser.add_argument("--dram", type=float, default=90, help="GiB of host memory to share")
    parser.add_argument("--device", help="cpu to rehearse; default: the GPU")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to rehearse on a CPU")
    parser.add_argument("--out", type=Path, default=Path("build/fit_campaign.jsonl"))
    parser.add_argument("--append", action="store_true", help="continue the campaign in --out")
    parser.add_argument("--summarize", type=Path, nargs="+", help="only summarize these files")
    parser.add_argument("--save", action="store_true", help="write bench/results")
    args = parser.parse_args(words)
    args.limits = TINY if args.tiny else Limits()
    if args.append and args.seed is None and (done := read_records(args.out)):
        args.seed = done[-1]["case"]["seed"]
    if args.seed is None:
        args.seed = int(time.time())
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    if args.summarize:
        records = [record for path in args.summarize for record in read_records(path)]
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        print(f"seed {args.seed}, {args.workers} processes", flush=True)
        preload()
        run_campaign(args)
        records = read_records(args.out)
    summary = summarize(records)
    print(json.dumps(summary, indent=1))
    if args.save:
        short = [{k: v for k, v in r.items() if k != "traceback"} for r in records]
        print(certificate.save("fit_campaign", {"summary": summary, "cases": short}))
    return 1 if summary["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
