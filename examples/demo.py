"""Fine-tune a small model under a budget far below its need: what `make demo` runs.

    python examples/demo.py [directory]

Data, tokenizer and a config of two million parameters are made on the spot. Its training wants some
40 MiB; the fast tier gets 14 MiB and DRAM 8 MiB, so that states go to disk as well. Halfway the run
is stopped, as by Ctrl-C, and resumed. A page shows where memory and time went. On a machine with a
GPU the GPU computes.
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
from penstock.engine.prepare import plan_for
from penstock.errors import InfeasibleError
from penstock.settings import Settings
from penstock.units import format_bytes_up

STEPS, CONTEXT, BATCH, MICRO_BATCH = 200, 128, 4, 4
PROFILED = 20
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
    say(f"Making chats, a tokenizer and a config in {folder}/")
    shutil.rmtree(out, ignore_errors=True)
    make(folder, tasks=(capital, day), hidden=192, layers=4)
    (folder / "disk").mkdir(exist_ok=True)

    say("What random weights answer")
    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    ask(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)), tokenizer)

    command = train_command(folder)
    say(shown(command))
    half = STEPS // 2
    code = watch(subprocess.Popen(command), out / "metrics.jsonl", until=half)
    if code != 128 + signal.SIGINT:
        return code
    again = [*command[:4], "--out", str(out), "--resume"]
    say(f"Stopped as by Ctrl-C, halfway. {shown(again)}")
    code = subprocess.run(again, check=False).returncode
    if code:
        return code

    say(f"What the model in {out}/ answers, loaded by transformers")
    ask(AutoModelForCausalLM.from_pretrained(out), tokenizer)
    tell_results(out)

    report = [*command[:3], "report", str(out / "profile")]
    say(f"Where the first {PROFILED} steps went. {shown(report)}")
    return subprocess.run(report, check=False).returncode


def train_command(folder: Path) -> list[str]:
    sizes = {"hbm": least_hbm(folder), "dram": DRAM, "nvme": f"{folder / 'disk'}:{DISK}"}
    run = {"context": CONTEXT, "batch": BATCH, "micro-batch": MICRO_BATCH, "steps": STEPS}
    rate = {"lr": 2e-3, "warmup": 10, "weight-decay": 0.01}
    rest = {"init": "random", "eval-split": 0.02, "cache": folder / "tokens", "profile": PROFILED}
    flags = [f"--{name}={value}" for name, value in {**sizes, **run, **rate, **rest}.items()]
    start = [sys.executable, "-m", "penstock", "train"]
    inputs = [str(folder / "model"), f"--data={folder / 'chats.jsonl'}", f"--out={folder / 'out'}"]
    return [*start, *inputs, *flags]


def least_hbm(folder: Path) -> str:
    """A GPU's driver takes a part for itself: there the least that will do."""
    settings = Settings.of({"context": CONTEXT, "batch": BATCH, "micro_batch": MICRO_BATCH})
    budget: dict[str, Any] = {"hbm": HBM, "dram": DRAM, "nvme": f"{folder / 'disk'}:{DISK}"}
    try:
        plan_for(ps.survey(folder / "model"), settings, budget=budget)
    except InfeasibleError as problem:
        return format_bytes_up(problem.least["hbm"] or 0)
    return HBM


def watch(child: subprocess.Popen[bytes], metrics: Path, *, until: int) -> int:
    """Lets the run come to a step, then asks it to stop; its exit code."""
    try:
        while child.poll() is None:
            time.sleep(0.2)
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            steps = [event["step"] for event in map(parse, lines) if event.get("event") == "step"]
            if steps and steps[-1] >= until:
                child.send_signal(signal.SIGINT)
                return child.wait()
        return child.returncode
    except KeyboardInterrupt:  # the terminal has told the run as well: it saves
        return child.wait() or 128 + signal.SIGINT


def parse(line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except ValueError:  # it is being written
        return {}


def ask(model: Any, tokenizer: Any) -> None:
    model.eval()
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
        )
        answer = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        print(f"  {question:34} {' '.join(answer.split())}")


def tell_results(out: Path) -> None:
    events = [parse(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {e["step"]: e["loss"] for e in events if e.get("event") == "eval"}
    first, last = losses[min(losses)], losses[max(losses)]
    say(f"Loss on held-out chats: {first:.3f} before, {last:.3f} after. In {out}/:")
    for path in sorted(out.iterdir()):
        size = f"{path.stat().st_size:>12,} B" if path.is_file() else ""
        print(f"  {path.name + ('/' if path.is_dir() else ''):28}{size}")


def shown(command: list[str]) -> str:
    return "penstock " + " ".join(command[3:])


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
