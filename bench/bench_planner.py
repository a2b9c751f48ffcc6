"""Measure the CPU time of `penstock plan`, and compare the plans that it finds.

Every case runs in a process of its own and does what the command does: it imports the command,
surveys the model from its config, plans, and asks what would help most. The survey is cached, as it
is for every plan of a model but the first; what it takes without a cache is shown once per model.
Working memory is estimated: tracing it is not measured here. The time is CPU time, user
and system, so that other work on the machine changes it little. The seconds per step of the plan
show whether a faster planner finds worse plans.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import certificate

COMMON = {"max_position_embeddings": 131072}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-4b": ("qwen3", {
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True}),
    "llama-3.1-8b": ("llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": False}),
    "qwen3-8b": ("qwen3", {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False}),
    "phi-4": ("phi3", {
        "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10,
        "tie_word_embeddings": False, "pad_token_id": 0}),
    "gemma-3-27b": ("gemma3_text", {
        "vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "sliding_window": 1024, "tie_word_embeddings": True}),
    "llama-3.1-70b": ("llama", {
        "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "tie_word_embeddings": False}),
}  # fmt: skip
"""Published sizes: model type and fields of the config."""


@dataclass(frozen=True)
class Case:
    """One call of `penstock plan`."""

    name: str
    model: str
    machine: str
    hbm: str
    dram: str = "auto"
    cxl: str = "0"
    nvme: str = ""
    context: int = 4096
    batch: int = 4


CASES = (
    Case("4b-dram", "qwen3-4b", "h200", "24GiB"),
    Case("4b-desktop", "qwen3-4b", "desktop-24gb", "20GiB", nvme="200GiB"),
    Case("4b-tight", "qwen3-4b", "desktop-24gb", "14GiB", "16GiB", nvme="200GiB"),
    Case("8b-dram", "llama-3.1-8b", "h200", "24GiB"),
    Case("8b-all-hbm", "llama-3.1-8b", "h200", "130GiB"),
    Case("8b-nvme", "llama-3.1-8b", "h200", "16GiB", "64GiB", nvme="100GiB"),
    Case("8b-desktop", "llama-3.1-8b", "desktop-24gb", "23GiB", nvme="400GiB", batch=8),
    Case("8b-showcase", "llama-3.1-8b", "desktop-24gb", "22GiB", "64GiB", nvme="400GiB",
         context=32768, batch=8),
    Case("8b-long", "llama-3.1-8b", "h200", "48GiB", context=65536, batch=1),
    Case("8b-rounds", "llama-3.1-8b", "h200", "40GiB", "110GiB", context=32768, batch=16),
    Case("8b-cxl", "llama-3.1-8b", "cxl-paper-1", "30GiB", "48GiB", "96GiB"),
    Case("qwen3-8b-desktop", "qwen3-8b", "desktop-24gb", "23GiB", nvme="400GiB", batch=32),
    Case("qwen3-8b-tight", "qwen3-8b", "desktop-24gb", "16GiB", "24GiB", nvme="400GiB"),
    Case("qwen3-8b-infeasible", "qwen3-8b", "desktop-24gb", "23GiB"),
    Case("qwen3-8b-all", "qwen3-8b", "cxl-paper-2", "24GiB", "32GiB", "64GiB"),
    Case("phi-4-desktop", "phi-4", "desktop-24gb", "23GiB", nvme="400GiB", batch=16),
    Case("phi-4-cxl", "phi-4", "cxl-paper-2", "30GiB", "96GiB", "160GiB", batch=8),
    Case("27b-nvme", "gemma-3-27b", "h200", "60GiB", "110GiB", nvme="600GiB"),
    Case("27b-desktop", "gemma-3-27b", "desktop-24gb", "23GiB", nvme="800GiB", batch=16),
    Case("70b-nvme", "llama-3.1-70b", "h200", "120GiB", "110GiB", nvme="1200GiB"),
    Case("70b-desktop", "llama-3.1-70b", "desktop-24gb", "23.5GiB", nvme="1500GiB", batch=16),
    Case("70b-cxl", "llama-3.1-70b", "cxl-paper-2", "30GiB", "480GiB", "500GiB", batch=8),
    Case("70b-infeasible", "llama-3.1-70b", "desktop-24gb", "20GiB", nvme="100GiB"),
)  # fmt: skip


def write_config(name: str, folder: Path) -> Path:
    """Write a model's config.json, and return its directory."""
    kind, fields = MODELS[name]
    directory = folder / name
    directory.mkdir(exist_ok=True)
    text = json.dumps({"model_type": kind, **COMMON, **fields})
    (directory / "config.json").write_text(text)
    return directory


def run(case: Case, directory: Path) -> dict[str, Any]:
    """Do what `penstock plan` does, and return CPU seconds of each part and the plan's step."""
    marks = {"start": 0.0}

    def mark(name: str) -> None:
        marks[name] = time.process_time()

    from rich.console import Console

    from penstock.cli.plan import advice_text
    from penstock.engine.plan_choice import budget_paths, plan_request
    from penstock.errors import InfeasibleError
    from penstock.model.survey_cache import cached_survey
    from penstock.planner.advice import WhatIf, advise
    from penstock.planner.plan_view import plan_view
    from penstock.probe.machine_choice import machine_to_plan_for
    from penstock.settings import Settings

    mark("import")
    budgets = {"hbm": case.hbm, "dram": case.dram, "cxl": case.cxl}
    budgets |= {"nvme": case.nvme} if case.nvme else {}
    given = {"model": str(directory), "context": case.context, "batch": case.batch, **budgets}
    settings = Settings.of(given)
    target = machine_to_plan_for(case.machine, budget_paths(settings.memory.budgets))
    _, inventory = cached_survey(settings.model.model)
    mark("survey")
    # Without the config, working memory is estimated.
    request = plan_request(inventory, settings, target)
    args = (request.inventory, request.workload, request.budget, request.machine)
    found: dict[str, Any] = {"step_seconds": None}
    try:
        result = request.make_plan().planned
        assert result is not None
        mark("plan")
        advices = advise(WhatIf(*args, result, request.source))
        mark("advice")
        with Path(os.devnull).open("w") as nowhere:
            Console(file=nowhere).print(plan_view(result, request.machine), advice_text(advices))
        mark("output")
        found["step_seconds"] = result.cost.step_seconds
        found["rounds"] = result.plan.placement.rounds
        found["nvme_written"] = sum(result.disk_writes.values())
        found["advice"] = [f"{advice.what}: {advice.gain}" for advice in advices]
    except InfeasibleError as problem:
        mark("plan")
        found["least"] = problem.least
    times = list(marks.values())
    parts = {
        name: round(stop - start, 3)
        for name, start, stop in zip(list(marks)[1:], times, times[1:], strict=False)
    }
    return {"cpu_seconds": round(times[-1], 2), "parts": parts, **found}


def survey_alone(model: str, folder: Path) -> float:
    """Survey a model in a new process, and return the CPU seconds it takes without a cache."""
    directory = write_config(model, folder)
    code = (
        f"import time; from penstock.model.survey_cache import cached_survey; "
        f"cached_survey({str(directory)!r}); print(time.process_time())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


def run_alone(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case in a new process."""
    command = [sys.executable, "-m", "bench.bench_planner", "--alone", case.name]
    command += ["--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, cwd=certificate.REPO
    )
    return {**asdict(case), **json.loads(done.stdout)}


def show(row: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Return a row of the table."""

    def step(of: dict[str, Any]) -> str:
        return "does not fit" if of["step_seconds"] is None else f"{of['step_seconds']:.3f} s"

    cells = [row["name"], row["model"], row["machine"], f"{row['cpu_seconds']:.1f} s", step(row)]
    if before is not None:
        cells += [f"{before['cpu_seconds']:.1f} s", step(before)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="names of the cases to run (default: all)")
    parser.add_argument(
        "--save", nargs="?", const="planner", help="write a file of this name to bench/results"
    )
    parser.add_argument("--before", type=Path, help="results file to show next to the new results")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    known = {case.name: case for case in CASES}
    if args.alone:
        case = known[args.alone]
        print(json.dumps(run(case, write_config(case.model, args.folder))))
        return
    before = json.loads(args.before.read_text())["results"]["cases"] if args.before else []
    earlier = {row["name"]: row for row in before}
    rows = []
    names = args.cases or list(known)
    with tempfile.TemporaryDirectory() as folder:
        surveys = {
            model: survey_alone(model, Path(folder))
            for model in dict.fromkeys(known[name].model for name in names)
        }
        print(", ".join(f"{model}: first survey {s:.1f} s" for model, s in surveys.items()))
        for name in names:
            rows.append(run_alone(known[name], Path(folder)))
            print(show(rows[-1], earlier.get(name)), flush=True)
    if args.save:
        print(certificate.save(args.save, {"first_surveys": surveys, "cases": rows}))


if __name__ == "__main__":
    main()
