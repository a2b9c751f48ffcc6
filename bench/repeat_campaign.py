"""Check that runs of `penstock train` with default flags repeat to the bit.

    python bench/repeat_campaign.py --out build/repeat          # on a GPU
    python bench/repeat_campaign.py --tiny --out build/repeat   # also on a CPU

For each family and each kind of data (packed chats, and rows that are one document), the same model
is trained on the same data several times: with everything in HBM, the same again, streamed from
DRAM, from NVMe, and twice killed with SIGKILL and resumed with another budget. Every loss, gradient
norm and tensor of the last checkpoint must equal those of the first run. Each run compiles its own
kernels, because a cache shared between runs would hide a choice that differs.

A run that has finished is not repeated if the command is called again with the same `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from penstock.engine.model_source import inspect_model
from penstock.engine.prepare import choose_plan
from penstock.errors import InfeasibleError
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.plan import Plan
from penstock.settings import Settings
from penstock.tiers import Tier
from penstock.units import GiB, KiB, MiB
from tests.support.engines import plain_model, tiny_config
from tests.support.small_tokenizers import MARKED, WORDS, small_tokenizer

FAMILIES = ("llama", "qwen3", "gemma2")
DATA = ("chats", "rows")

MARGIN = 1.1
"""Budgets of the runs that stream are this much larger than the least."""

SAVE_EVERY = 2


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the models and of the data."""

    config: Mapping[str, int]
    context: int
    batch: int
    micro_batch: int
    steps: int
    resident: int
    """Bytes of HBM that hold everything."""

    @property
    def killed_after(self) -> int:
        """The step after which a run is killed: one that no checkpoint has."""
        return self.steps // 2 // SAVE_EVERY * SAVE_EVERY + 1


SIZE = Size(
    {"vocab_size": 32_003, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
     "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
     "max_position_embeddings": 2048},
    context=1024, batch=7, micro_batch=2, steps=8, resident=16 * GiB,
)  # fmt: skip
TINY = Size(
    {"vocab_size": 1003, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
     "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
     "max_position_embeddings": 128},
    context=64, batch=5, micro_batch=2, steps=6, resident=256 * MiB,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arm:
    """One run: its budget and, if it is killed, the budget with which it resumes."""

    name: str
    budget: str
    resumed: str | None = None


ARMS = (
    Arm("resident", "hbm"),
    Arm("again", "hbm"),
    Arm("dram", "dram"),
    Arm("nvme", "nvme"),
    Arm("killed, to nvme", "hbm", "nvme"),
    Arm("killed, to hbm", "dram", "hbm"),
)
"""The first is what the others are compared with."""


@dataclass(frozen=True, slots=True)
class Combination:
    """A model and its data, in a directory of their own."""

    family: str
    data: str
    folder: Path
    size: Size

    @property
    def name(self) -> str:
        return f"{self.family}, {self.data}"

    def make_files(self) -> None:
        """Save the model, its tokenizer and the data, unless an earlier call has."""
        if (self.folder / "ready").exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        tokenizer = small_tokenizer(MARKED)
        changes: dict[str, Any] = {**self.size.config, "eos_token_id": tokenizer.eos_token_id}
        if self.family in ("gemma2", "gemma3"):
            kinds = ("sliding_attention", "full_attention")
            changes["layer_types"] = [kinds[n % 2] for n in range(changes["num_hidden_layers"])]
            changes["sliding_window"] = self.size.context // 2
        if self.family == "gemma2":
            changes["query_pre_attn_scalar"] = changes["head_dim"]
        model = plain_model(tiny_config(self.family, **changes))
        model.save_pretrained(self.folder / "model")
        tokenizer.save_pretrained(self.folder / "model")
        write_data(self.folder / "data.jsonl", self.data, self.size)
        (self.folder / "ready").touch()

    def settings(self) -> dict[str, Any]:
        size = self.size
        return {"context": size.context, "batch": size.batch, "micro_batch": size.micro_batch}

    def budgets(self) -> dict[str, list[str]]:
        """Return the flags of each budget: all in HBM, streamed from DRAM, and from NVMe."""
        settings = Settings().replace(self.settings())
        config, inventory = inspect_model(self.folder / "model", settings)
        disk = self.folder / "disk"
        disk.mkdir(exist_ok=True)

        def least(tier: str, budget: Budget) -> int:
            try:
                choose_plan(inventory, settings, config=config, budget=budget)
                return budget.of(Tier(tier))
            except InfeasibleError as error:
                found = error.least[tier]
                if found is None:
                    raise
                return int(found * MARGIN)

        plenty = self.size.resident
        hbm = least("hbm", Budget(hbm=64 * KiB, dram=plenty))
        paths = (PathBudget(path=str(disk), nbytes=plenty),)
        dram = least("dram", Budget(hbm=hbm, dram=64 * KiB, nvme=paths))
        # Where DRAM is as fast as HBM, a plan may use it although HBM has room.
        little = least("dram", Budget(hbm=plenty, dram=64 * KiB))
        return {
            "hbm": ["--hbm", f"{plenty}B", "--dram", f"{little}B"],
            "dram": ["--hbm", f"{hbm}B", "--dram", f"{plenty}B"],
            "nvme": ["--hbm", f"{hbm}B", "--dram", f"{dram}B", "--nvme", f"{disk}:{plenty}B"],
        }


def write_data(path: Path, kind: str, size: Size) -> None:
    """Write chats that are packed several to a row, or documents that fill one row each."""
    words = WORDS.split()
    lines = []
    for number in range(2 * size.steps * size.batch):
        start = number * 7 % len(words)
        shifted = words[start:] + words[:start]
        if kind == "rows":
            text = " ".join([str(number), *(shifted * (2 + 2 * size.context // len(words)))])
            lines.append({"text": text})
            continue
        length = 1 + number % max(3, size.context // 64)
        turns = [("user", shifted[:length]), ("assistant", shifted[length : 3 * length])]
        messages = [{"role": role, "content": f"{number} {' '.join(text)}"} for role, text in turns]
        lines.append({"messages": messages})
    if kind == "chats":  # many chats fill one row
        lines *= max(4, size.context // 64)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# Runs.


def run_arm(combination: Combination, arm: Arm, budgets: Mapping[str, list[str]]) -> dict[str, Any]:
    """Train once and return what the run printed and where its last checkpoint is."""
    folder = combination.folder / arm.name.replace(", ", "-").replace(" ", "-")
    saved = folder / "arm.json"
    if saved.exists():
        record: dict[str, Any] = json.loads(saved.read_text())
        return record
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began, size, out = time.perf_counter(), combination.size, folder / "out"
    command = [sys.executable, "-m", "penstock", "train", str(combination.folder / "model"),
               "--data", str(combination.folder / "data.jsonl"), "--out", str(out), "--json",
               "--cache", str(folder / "tokens"), "--steps", str(size.steps), "--lr", "1e-3",
               "--save-every", str(SAVE_EVERY)]  # fmt: skip
    for name, value in combination.settings().items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    first = [*command, *budgets[arm.budget]]
    record = {"arm": arm.name, "command": first, "plan": {}}
    if arm.resumed is None:
        record["steps"] = _train(first, folder)
    else:
        steps = _train(first, folder, kill_after=size.killed_after)
        record["placed_before"] = placed(out)
        second = [*command, "--resume", *budgets[arm.resumed]]
        after = _train(second, folder)
        record |= {"resumed_command": second, "killed_after": max(map(int, steps)),
                   "resumed_from": min(map(int, after)) - 1}  # fmt: skip
        # A step that was made twice must be the same both times.
        record["repeated_steps_differ"] = [n for n in after if n in steps and steps[n] != after[n]]
        record["steps"] = steps | after
    record |= {"placed": placed(out), "checkpoint": str(max(out.glob("checkpoint-*"))),
               "seconds": round(time.perf_counter() - began, 1)}  # fmt: skip
    saved.write_text(json.dumps(record))
    return record


def _train(
    command: Sequence[str], folder: Path, kill_after: int | None = None
) -> dict[str, tuple[float, float]]:
    """Run the command and return loss and gradient norm of each step, which it may be killed at."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "xdg"),
                   "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
                   "TRITON_CACHE_DIR": str(folder / "triton")}  # fmt: skip
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    steps: dict[str, tuple[float, float]] = {}
    killed = False
    log = folder / "log.txt"
    with log.open("a") as errors, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        start_new_session=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        for line in child.stdout:
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "step":
                steps[str(event["step"])] = (event["loss"], event["grad_norm"])
                if event["step"] == kill_after:
                    killed = True
                    os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
    if killed and code == -signal.SIGKILL:
        return steps
    if code or kill_after is not None:
        tail = log.read_text(errors="replace")[-1500:]
        raise RuntimeError(f"exit code {code}, {len(steps)} steps: {' '.join(command)}\n{tail}")
    return steps


def placed(out: Path) -> dict[str, int]:
    """Return the bytes of weights and states that a run's plan stores in each tier."""
    plan = Plan.load(out / "plan.json")
    return {tier.value: plan.at_rest(tier) for tier in Tier}


# Comparison.


def tensors_of(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path in sorted(checkpoint.glob("*.safetensors")):
        opened: Any = safe_open(path, framework="pt")  # type: ignore[no-untyped-call]
        with opened as file:
            for name in sorted(file.keys()):
                yield f"{path.name}:{name}", file.get_tensor(name)


def compare(reference: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a run differs from the first one; empty if every bit is the same."""
    found: dict[str, Any] = {}
    wanted, steps = reference["steps"], other["steps"]
    wrong = [n for n in wanted if list(wanted[n]) != list(steps.get(n, ()))]
    if wrong or set(wanted) != set(steps):
        step = min(map(int, wrong or set(wanted) ^ set(steps)))
        found["first_step"] = {"step": step, "first": wanted.get(str(step)),
                               "other": steps.get(str(step))}  # fmt: skip
        found["differing_steps"] = len(wrong)
    if other.get("repeated_steps_differ"):
        found["repeated_steps_differ"] = other["repeated_steps_differ"]
    mine = dict(tensors_of(Path(reference["checkpoint"])))
    differing, names = [], set()
    for name, tensor in tensors_of(Path(other["checkpoint"])):
        names.add(name)
        if name not in mine or not _same_bits(mine[name], tensor):
            differing.append(name)
    differing += sorted(set(mine) - names)
    if differing:
        found |= {"differing_tensors": len(differing), "tensors": len(mine),
                  "first_tensors": differing[:5]}  # fmt: skip
    return found


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bytes, since a NaN does not equal itself and zeros of both signs are equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return bool(torch.equal(*bits))


def check_placement(arm: Arm, placed: Mapping[str, int]) -> list[str]:
    """Return what is wrong with where a run's plan stored the weights and states."""
    last = arm.resumed or arm.budget
    problems = []
    if last == "hbm" and (placed["dram"] or placed["nvme"]):
        problems.append(f"everything should be in HBM: {dict(placed)}")
    if last != "hbm" and not placed[last]:
        problems.append(f"nothing is stored in {last}: {dict(placed)}")
    return problems


# The campaign.


def run_campaign(args: argparse.Namespace) -> dict[str, Any]:
    """Run every combination and compare its runs; return the results."""
    size = TINY if args.tiny else SIZE
    combinations = [
        Combination(family, data, args.out.resolve() / f"{family}-{data}", size)
        for family in args.families
        for data in args.data
    ]
    arms = [arm for arm in ARMS if not args.arms or arm.name in (ARMS[0].name, *args.arms)]
    lock = threading.Lock()
    budgets: dict[str, dict[str, list[str]]] = {}
    for combination in combinations:
        combination.make_files()
        budgets[combination.name] = combination.budgets()

    def run(combination: Combination, arm: Arm) -> dict[str, Any]:
        try:
            record = run_arm(combination, arm, budgets[combination.name])
            text = f"{record['seconds']} s"
        except Exception as failed:
            record = {"arm": arm.name, "error": str(failed)}
            text = f"FAILED: {str(failed)[-600:]}"
        with lock:
            print(f"{combination.name}: {arm.name}: {text}", flush=True)
        return record

    with ThreadPoolExecutor(args.workers) as pool:
        futures = {
            combination.name: [pool.submit(run, combination, arm) for arm in arms]
            for combination in combinations
        }
        runs = {name: [future.result() for future in row] for name, row in futures.items()}
    rows = {name: _compare_all(arms, records) for name, records in runs.items()}
    equal = all(row["equal"] for found in rows.values() for row in found)
    return {"equal": equal, "size": "tiny" if args.tiny else "full", "combinations": rows}


def _compare_all(arms: Sequence[Arm], records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    reference = records[0]
    rows = []
    for arm, record in zip(arms, records, strict=True):
        row = {key: record[key] for key in ("arm", "placed", "placed_before", "seconds",
               "killed_after", "resumed_from", "error") if key in record}  # fmt: skip
        if "error" in reference or "error" in record:
            rows.append({**row, "equal": False})
            continue
        difference = compare(reference, record)
        problems = check_placement(arm, record["placed"])
        rows.append({**row, "equal": not difference and not problems, "losses":
                     [loss for loss, _ in record["steps"].values()],
                     "difference": difference, "problems": problems})  # fmt: skip
    return rows


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=(*FAMILIES, "gemma3"))
    parser.add_argument("--data", nargs="+", default=DATA, choices=DATA)
    parser.add_argument("--arms", nargs="+", help="names of runs to compare with the first")
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2))
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--out", type=Path, default=Path("build/repeat_campaign"))
    parser.add_argument("--save", action="store_true", help="write bench/results")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    began = time.perf_counter()
    results = run_campaign(args) | {"seconds": round(time.perf_counter() - began, 1)}
    for name, rows in results["combinations"].items():
        for row in rows:
            state = "equal" if row["equal"] else "DIFFERS"
            more = {k: row[k] for k in ("difference", "problems", "error") if row.get(k)}
            print(f"{name}: {row['arm']}: {state}{f' {json.dumps(more)}' if more else ''}")
    with contextlib.suppress(OSError):
        (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    if args.save:
        print(certificate.save("repeat_campaign", results))
    print("every bit is the same" if results["equal"] else "runs differ")
    return 0 if results["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
