"""Measure steps of PenstockTrainer, relative to the engine's own steps in `penstock train`.

    python bench/bench_trainer.py --save
    python bench/bench_trainer.py --tiny --device cpu

Both arms train the same model with the same data, budgets and plan, one after the other. A step of
the trainer includes everything that Trainer does: data loading, collation, the scheduler,
callbacks, and a log entry for each step. Weights are random, because speed does not depend on them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate
from bench.measuring import device_peak, forget_device_peak
from bench.shapes import SHAPES, config_of
from penstock.engine.prepare import prepare
from penstock.integrations import PenstockConfig, PenstockTrainer
from penstock.machine.presets import preset
from penstock.records import to_json

GOAL = 1.03
"""A trainer's step should take at most this much of the engine's."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--hbm", default="24GiB")
    parser.add_argument("--dram", default="38GiB")
    parser.add_argument("--steps", type=int, default=6, help="measured steps; one more comes first")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.shape, args.context, args.hbm, args.dram = "tiny", 64, "64MiB", "64MiB"
    return args


def build_model(args: argparse.Namespace) -> Any:
    """Return a model with random weights in host memory. A GPU draws them faster."""
    torch.manual_seed(0)
    family: Any = transformers.AutoModelForCausalLM
    with torch.device(args.device):
        model = family.from_config(config_of(args.shape, args.context), dtype=torch.bfloat16)
    return model.to("cpu")


def rows(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    vocabulary, count = SHAPES[args.shape][0], args.batch * (args.steps + 1)
    ids = torch.randint(0, vocabulary, (count, args.context), generator=drawn)
    return [{"input_ids": row, "labels": row} for row in ids]


def machine_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the machine that both arms plan for; on a CPU, this one."""
    return {"machine": preset(args.machine)} if args.device == "cuda" else {}


def synchronize(args: argparse.Namespace) -> float:
    """Wait for the device, and return the time."""
    if args.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class StepTimes(transformers.TrainerCallback):
    """Notes when steps end, and the plan that the trainer follows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.ends: list[float] = []
        self.trainer: Any = None
        self.plan: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(synchronize(self.args))
        self.plan = self.trainer.engine.plan


def measure_trainer(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    times = StepTimes(args)
    with tempfile.TemporaryDirectory() as out:
        trainer = PenstockTrainer(
            model=model,
            args=transformers.TrainingArguments(
                out, per_device_train_batch_size=args.batch, max_steps=args.steps + 1,
                learning_rate=1e-5, bf16=args.device == "cuda", use_cpu=args.device == "cpu",
                logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
            ),
            train_dataset=rows(args),
            callbacks=[times],
            penstock=PenstockConfig(
                hbm=args.hbm, dram=args.dram, context=args.context, dtype="bf16",
                self_check=False, engine=machine_of(args),
            ),
        )  # fmt: skip
        times.trainer = trainer
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"step_seconds": _differences(times.ends), "losses": logged, "plan": times.plan}


def measure_engine(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the engine with batches of the trainer's rows, in their order."""
    engine = prepare(
        model, context=args.context, batch=args.batch, dtype="bf16", device=args.device,
        optimizer={"lr": 1e-5, "weight_decay": 0.0, "betas": (0.9, 0.999)}, self_check=False,
        budget={"hbm": args.hbm, "dram": args.dram}, **machine_of(args),
    )  # fmt: skip
    data, losses, ends = rows(args), [], []
    for start in range(0, len(data), args.batch):
        ids = torch.stack([row["input_ids"] for row in data[start : start + args.batch]])
        losses.append(float(engine.step({"input_ids": ids})))
        ends.append(synchronize(args))
    plan = engine.plan
    engine.close()
    return {"step_seconds": _differences(ends), "losses": losses, "plan": plan}


def _differences(ends: list[float]) -> list[float]:
    return [end - start for start, end in itertools.pairwise(ends)]


def main() -> None:
    args = arguments()
    began, model = time.perf_counter(), build_model(args)
    found = {}
    for name, measure in (("engine", measure_engine), ("trainer", measure_trainer)):
        found[name] = measure(model, args)
        found[name]["hbm_peak"] = device_peak()
        forget_device_peak()
        print(name, [f"{each:.3f}" for each in found[name]["step_seconds"]], flush=True)
    plans = [to_json(found[name].pop("plan").placement) for name in ("engine", "trainer")]
    medians = {name: statistics.median(arm["step_seconds"]) for name, arm in found.items()}
    results = {
        "settings": {k: str(v) for k, v in vars(args).items()}, **found, "medians": medians,
        "ratio": medians["trainer"] / medians["engine"], "goal": GOAL,
        "same_plan": plans[0] == plans[1], "seconds": time.perf_counter() - began,
    }  # fmt: skip
    print(f"ratio {results['ratio']:.3f} (goal {GOAL}), same plan: {results['same_plan']}, "
          f"{results['seconds']:.0f} s in all", flush=True)  # fmt: skip
    if args.save:
        print(certificate.save(f"trainer_{args.shape}", results), flush=True)


if __name__ == "__main__":
    main()
