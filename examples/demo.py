"""Fine-tune a small model with budgets far below what it needs. `make demo` runs this.

    python examples/demo.py [directory]

The demo makes its own data, tokenizer and config, of a model with two million parameters. Training
it needs about 40 MiB; the budgets are 14 MiB of HBM and 8 MiB of DRAM, so optimizer states go to
disk as well. Halfway, the run is stopped as with Ctrl-C, and resumed. A report shows where memory
and time went. The GPU computes if there is one; otherwise the CPU does.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from make_demo_data import capital, day, make
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import penstock as ps
from penstock.engine.prepare import choose_plan
from penstock.errors import InfeasibleError
from penstock.settings import Settings
from penstock.units import format_bytes_up

STEPS, CONTEXT, BATCH, MICRO_BATCH = 400, 128, 4, 4
PROFILED_STEPS = 20
HBM, DRAM, DISK = "14MiB", "8MiB", "64MiB"

QUESTIONS = (
    "What is the capital of France?",
    "Which day comes after Monday?",
    "Name the capital of Japan.",
    "What day is before Friday?",
    "What month is before June?",
)


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    logging.disable_progress_bar()
    model, out = folder / "model", folder / "out"
    print_title(f"Making chats, a tokenizer and a config in {folder}/")
    shutil.rmtree(out, ignore_errors=True)
    make(folder, tasks=(capital, day), hidden=192, layers=4)
    (folder / "disk").mkdir(exist_ok=True)

    print_title("Answers of the model with random weights")
    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    ask(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)), tokenizer)

    command = train_command(folder)
    print_title(format_command(command))
    half = STEPS // 2
    code = stop_after(subprocess.Popen(command), out / "metrics.jsonl", step=half)
    if code != 128 + signal.SIGINT:
        return code
    resume = [*command[:4], "--out", str(out), "--resume"]
    print_title(f"Stopped halfway, as with Ctrl-C. {format_command(resume)}")
    code = subprocess.run(resume, check=False).returncode
    if code:
        return code

    print_title(f"Answers of the model in {out}/, loaded by transformers")
    ask(AutoModelForCausalLM.from_pretrained(out), tokenizer)
    print_results(out)

    report = [*command[:3], "report", str(out / "profile")]
    print_title(f"Where time went in the first {PROFILED_STEPS} steps. {format_command(report)}")
    return subprocess.run(report, check=False).returncode


def train_command(folder: Path) -> list[str]:
    budgets = {"hbm": smallest_hbm(folder), "dram": DRAM, "nvme": f"{folder / 'disk'}:{DISK}"}
    length = {"context": CONTEXT, "batch": BATCH, "micro-batch": MICRO_BATCH, "steps": STEPS}
    optimizer = {"lr": 1.5e-3, "warmup": 10, "weight-decay": 0.01}
    rest = {
        "init": "random",
        "eval-split": 0.02,
        "cache": folder / "tokens",
        "profile": PROFILED_STEPS,
    }
    flags = [
        f"--{name}={value}" for name, value in {**budgets, **length, **optimizer, **rest}.items()
    ]
    start = [sys.executable, "-m", "penstock", "train"]
    inputs = [str(folder / "model"), f"--data={folder / 'chats.jsonl'}", f"--out={folder / 'out'}"]
    return [*start, *inputs, *flags]


def smallest_hbm(folder: Path) -> str:
    """Return the HBM budget, or the smallest that is feasible: a GPU driver needs some itself."""
    settings = Settings.of({"context": CONTEXT, "batch": BATCH, "micro_batch": MICRO_BATCH})
    budget: dict[str, Any] = {"hbm": HBM, "dram": DRAM, "nvme": f"{folder / 'disk'}:{DISK}"}
    try:
        choose_plan(ps.survey(folder / "model"), settings, budget=budget)
    except InfeasibleError as problem:
        return format_bytes_up(problem.least["hbm"] or 0)
    return HBM


def stop_after(child: subprocess.Popen[bytes], metrics: Path, *, step: int) -> int:
    """Wait until the run has taken a number of steps, stop it, and return its exit code."""
    try:
        while child.poll() is None:
            time.sleep(0.2)
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            steps = [event["step"] for event in map(parse, lines) if event.get("event") == "step"]
            if steps and steps[-1] >= step:
                child.send_signal(signal.SIGINT)
                return child.wait()
        return child.returncode
    except KeyboardInterrupt:  # the terminal sends Ctrl-C to the run as well, which saves
        return child.wait() or 128 + signal.SIGINT


def parse(line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except ValueError:  # the line is still being written
        return {}


def ask(model: Any, tokenizer: Any) -> None:
    model.eval()
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
        )
        answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        print(f"  {question:34} {' '.join(answer.split())}")


def print_results(out: Path) -> None:
    events = [parse(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {e["step"]: e["loss"] for e in events if e.get("event") == "eval"}
    first, last = losses[min(losses)], losses[max(losses)]
    print_title(f"Loss on held-out chats: {first:.3f} before, {last:.3f} after. In {out}/:")
    for path in sorted(out.iterdir()):
        size = f"{path.stat().st_size:>12,} B" if path.is_file() else ""
        print(f"  {path.name + ('/' if path.is_dir() else ''):28}{size}")


def format_command(command: list[str]) -> str:
    return "penstock " + " ".join(command[3:])


def print_title(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
